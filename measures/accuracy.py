"""Accuracy: the fraction of labels that the network predicts correctly."""

from __future__ import annotations

import torch
from torch import Tensor

from nlbench.errors import NotFinite, Undefined
from nlbench.probes.outputs import OutputBatch

from .statistics.sample_measure import SampleMeasure

IGNORED_LABEL = -100
"""Label of positions without a prediction, such as padding."""


def accuracy_score(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the fraction of labels that have the largest logit.

    Parameters
    ----------
    logits : tensor of shape (n, ..., classes)
    labels : integer tensor of shape (n, ...)
        Positions with label -100 are ignored.

    Returns
    -------
    tensor, scalar, float64
        In [0, 1].

    Raises
    ------
    nlbench.Undefined
        If labels aren't integers with one logit per class each, or if all labels are ignored.
    nlbench.NotFinite
        If a logit is NaN or infinite at a position that is not ignored.

    Examples
    --------
    >>> accuracy_score(torch.eye(3), torch.tensor([0, 1, 1])).item()
    0.6666666666666666
    """
    return torch.tensor(_fraction(*_counts(logits, labels)), dtype=torch.float64)


def _fraction(correct: Tensor, total: Tensor) -> float:
    if not total.any():
        raise Undefined("there are no labels to predict")
    return int(correct.sum()) / int(total.sum())


def _counts(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers (n,) of correct and of all labels of each sample."""
    labels = class_labels(logits, labels)
    counted = labels != IGNORED_LABEL
    if not bool(torch.isfinite(logits[counted]).all()):
        raise NotFinite("the network's logits are not finite")
    correct = (logits.argmax(-1) == labels) & counted
    first, second = (side[..., None].flatten(1).sum(1).cpu() for side in (correct, counted))
    return first, second


def class_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """Return labels as class indices, one for each row of logits.

    Parameters
    ----------
    logits : tensor of shape (n, ..., classes)
    labels : integer tensor of shape (n, ...) or (n, ..., 1)
        -100 where there is nothing to predict.

    Returns
    -------
    tensor of shape (n, ...)

    Raises
    ------
    nlbench.Undefined
        If the labels are no class indices, or there isn't one logit per class.

    Examples
    --------
    >>> class_labels(torch.zeros(2, 3), torch.tensor([[2], [0]]))
    tensor([2, 0])
    """
    kind = str(labels.dtype).removeprefix("torch.")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise Undefined(f"the labels are {kind}, expected integers: the index of a class each")
    if logits.ndim > 1 and labels.shape == logits.shape and _are_one_hot(labels):
        raise Undefined(
            "the labels are one-hot, expected the index of a class each: labels.argmax(-1)"
        )
    if logits.ndim > 1 and labels.shape == (*logits.shape[:-1], 1):
        labels = labels[..., 0]
    if logits.ndim < 2 or logits.shape[:-1] != labels.shape:
        raise Undefined(
            f"the network's output has shape {tuple(logits.shape)} for labels of shape "
            f"{tuple(labels.shape)}, expected one logit per class"
        )
    classes = logits.shape[-1]
    if classes < 2:
        raise Undefined(f"the network has {classes} logits, expected at least two")
    invalid = labels[(labels != IGNORED_LABEL) & ((labels < 0) | (labels >= classes))]
    if len(invalid):
        raise Undefined(
            f"a label is {int(invalid[0])}, the network has {classes} logits; expected 0 to "
            f"{classes - 1}, or {IGNORED_LABEL} where there is nothing to predict"
        )
    return labels


def _are_one_hot(labels: Tensor) -> bool:
    return bool(((labels == 1).sum(-1) == 1).all() & (labels.ne(0).sum(-1) == 1).all())


class Accuracy(SampleMeasure):
    r"""Fraction of labels, one per sample or per position, that the network predicts correctly.

    The samples are those of the request; ``--samples 0`` uses the whole split. For a translation
    network, the labels are the next tokens.

    Definition
    ----------
    .. math::

        \frac{\#\{i : \operatorname{argmax}_j f_j(x_i) = \text{label}_i\}}{\#\{i\}}

    Units
    -----
    None.

    Undefined
    ---------
    Samples without integer labels; a network with one output.

    Cost
    ----
    One forward pass.

    Limits
    ------
    It does not measure nonlinearity; use it to check that the networks compared are equally
    accurate.
    """

    name = "accuracy"
    probe = "outputs"
    bounds = (0.0, 1.0)
    more_means = "neither"

    def terms(self, observation: OutputBatch) -> tuple[Tensor, ...]:
        """Count the correct and all labels of each sample of one batch."""
        return _counts(observation.outputs, observation.labels)

    def statistics(self, *terms: Tensor) -> dict[str, float]:
        """Return the accuracy over all batches."""
        return {"value": _fraction(*terms)}
