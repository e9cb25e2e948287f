"""Accuracy: the fraction of labels that the network predicts correctly."""

from __future__ import annotations

from typing import ClassVar

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


def ignore_padding(labels: Tensor, tokens: Tensor | None) -> Tensor:
    """Return class labels (n, t, ...) with -100 where `tokens`, of shape (n, t), is False.

    Examples
    --------
    >>> ignore_padding(torch.tensor([[2, 1]]), torch.tensor([[True, False]])).tolist()
    [[2, -100]]
    """
    is_integer = not (labels.is_floating_point() or labels.is_complex())
    if tokens is None or not is_integer or labels.dtype == torch.bool:
        return labels
    if labels.shape[:2] != tokens.shape:
        return labels
    mask = tokens.to(labels.device).reshape(*tokens.shape, *(1,) * (labels.ndim - 2))
    return labels.long().masked_fill(~mask, IGNORED_LABEL)


def refuse_unclear_classes(outputs: Tensor, labels: Tensor) -> None:
    """Refuse outputs whose classes may be along the first or along the last axis of a sample.

    Raises
    ------
    nlbench.Undefined
        If the labels of shape (n, ...) fit outputs (n, classes, ...) and (n, ..., classes).
    """
    n, *positions = labels.shape
    if not positions or outputs.ndim != labels.ndim + 1 or outputs.shape[-1] < 2:
        return
    if outputs.shape[:-1] == labels.shape == (n, *outputs.shape[2:]):
        shapes = f"{tuple(outputs.shape)} for labels of shape {tuple(labels.shape)}"
        raise Undefined(
            f"the network's output has shape {shapes}, so its classes may be along axis 1 or the "
            "last axis; measure another number of positions, or, if they are along the last axis, "
            f"pass labels of shape {(*labels.shape, 1)}"
        )


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
    network, the labels are the next tokens. Padding is left out.

    Definition
    ----------
    .. math::

        \frac{\#\{i : \operatorname{argmax}_j f_j(x_i) = \text{label}_i\}}{\#\{i\}}

    Units
    -----
    None.

    Undefined
    ---------
    Samples without integer labels; a network with one output, or with as many classes as positions,
    where the axis of the classes is unclear.

    Cost
    ----
    One forward pass.

    Limits
    ------
    It does not measure nonlinearity; use it to check that the networks compared are equally
    accurate.
    """

    name = "accuracy"
    # 2: padding is left out, and an unclear axis of classes is undefined.
    version: ClassVar[str] = "2"
    probe = "outputs"
    bounds = (0.0, 1.0)
    more_means = "neither"

    def terms(self, observation: OutputBatch) -> tuple[Tensor, ...]:
        """Count the correct and all labels of each sample of one batch."""
        refuse_unclear_classes(observation.outputs, observation.labels)
        labels = ignore_padding(observation.labels, observation.tokens)
        return _counts(observation.outputs, labels)

    def statistics(self, *terms: Tensor) -> dict[str, float]:
        """Return the accuracy over all batches."""
        return {"value": _fraction(*terms)}
