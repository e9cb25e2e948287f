"""Accuracy: the share of labels that the network predicts right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nlbench.errors import NotFinite, Undefined
from nlbench.measure import Measure, Result

if TYPE_CHECKING:
    from nlbench.probes.outputs import OutputBatch

__all__ = ["Accuracy", "accuracy_score"]

NOTHING = -100
"""Label of what isn't to be predicted, such as padding."""


def accuracy_score(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of labels that have the largest logit.

    Parameters
    ----------
    logits : tensor of shape (n, ..., classes)
    labels : integer tensor of shape (n, ...)
        -100 where nothing is to be predicted.

    Returns
    -------
    scalar float64 tensor

    Raises
    ------
    nlbench.Undefined
        If the logits aren't one a class for each label, or there is nothing to predict.
    nlbench.NotFinite
        If a logit that counts is NaN or infinite.

    Examples
    --------
    >>> accuracy_score(torch.eye(3), torch.tensor([0, 1, 1])).item()
    0.6666666666666666
    """
    return torch.tensor(_share(*_counts(logits, labels)), dtype=torch.float64)


def _share(right: int, asked: int) -> float:
    if not asked:
        raise Undefined("there is nothing to predict")
    return right / asked


def _counts(logits: Tensor, labels: Tensor) -> tuple[int, int]:
    if logits.ndim < 2 or logits.shape[:-1] != labels.shape:
        raise Undefined(
            f"the network's output has shape {tuple(logits.shape)} for labels of shape "
            f"{tuple(labels.shape)}: not one logit a class"
        )
    classes = logits.shape[-1]
    if classes < 2:
        raise Undefined(f"the network has {classes} logits, between which nothing is predicted")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        kind = str(labels.dtype).removeprefix("torch.")
        raise Undefined(f"the labels are {kind}, expected whole numbers")
    asked = labels != NOTHING
    if not bool(torch.isfinite(logits[asked]).all()):
        raise NotFinite("the network's logits are not finite, so it has no accuracy")
    wrong = labels[asked & ((labels < 0) | (labels >= classes))]
    if len(wrong):
        raise Undefined(f"a label is {int(wrong[0])}, the network has {classes} logits")
    return int((logits.argmax(-1) == labels)[asked].sum()), int(asked.sum())


class Accuracy(Measure):
    """Share of labels, one a sample or one a place, that the network predicts right.

    The samples are those of the request; ``--samples 0`` takes the whole split. Of a network
    that translates a label is the next token.
    """

    name = "accuracy"
    probe = "outputs"
    bounds = (0.0, 1.0)
    more_means = "neither"

    def reset(self) -> None:
        """Forget what was counted."""
        self._right = self._asked = self._samples = 0

    def update(self, observation: OutputBatch) -> None:
        """Count one batch."""
        right, asked = _counts(observation.outputs, observation.labels)
        self._right, self._asked = self._right + right, self._asked + asked
        self._samples += len(observation.labels)

    def compute(self) -> Result:
        """Give the share over all batches."""
        return Result({"value": _share(self._right, self._asked)}, n=self._samples)
