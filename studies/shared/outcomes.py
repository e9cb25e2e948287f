"""Outcomes for trained classifiers: generalisation gap, robustness, and removable units."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nlbench.introspection.module_stack import CallId
from nlbench.measure import Measure, Result
from nlbench.models.training.label_noise import corrupt_labels
from nlbench.probes.replacement import AffineFit, CallInterception, find_calls
from nlbench.probes.replacement.fits import copy_to_rows
from nlbench.studies.framework.network_measure import network_measure
from nlbench.subjects.data import read_items
from nlbench.subjects.load import load_dataset

from .removal_criteria import gradients_at_calls

REMOVED_FRACTIONS = tuple(number / 20 for number in range(21))


@dataclass(frozen=True)
class TaskSamples:
    """Both splits of a dataset, with normalised inputs.

    Parameters
    ----------
    train, test : pair of tensors
        Inputs and correct labels.
    epsilon : float
        Size of an adversarial perturbation, in units of the inputs.
    """

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: int
    epsilon: float

    @classmethod
    def load(cls, data: str, epsilon: float) -> TaskSamples:
        """Load a registered dataset."""
        dataset: Any = load_dataset(data)

        def split(name: str) -> tuple[Tensor, Tensor]:
            items = dataset.split(name)
            inputs, labels = zip(*read_items(items, range(len(items))), strict=True)
            return dataset.normalize(torch.stack(inputs)), torch.tensor(labels)

        return cls(split("train"), split("test"), dataset.classes, epsilon)


def generalisation_gap(train_accuracy: float, accuracy: float, noise: float, classes: int) -> float:
    """Compute the training accuracy minus the expected accuracy on equally noisy test labels.

    Parameters
    ----------
    train_accuracy : float
        Accuracy on the training labels, including wrong ones.
    accuracy : float
        Accuracy on correct test labels.
    noise : float
        Fraction of training labels replaced, each by another class drawn uniformly.

    Examples
    --------
    A network that always predicts the correct label doesn't overfit:

    >>> generalisation_gap(0.6, 1.0, 0.4, 10)
    0.0
    """
    return train_accuracy - (1 - noise) * accuracy - noise * (1 - accuracy) / (classes - 1)


def fgsm_robustness(model: nn.Module, inputs: Tensor, labels: Tensor, epsilon: float) -> float:
    """Compute the fraction of correctly classified inputs that stay correct under an FGSM attack.

    The attack ascends m = log Σ exp z_j - z_y, with the sum over the wrong classes j. The
    cross-entropy is softplus(m); its gradient has the same sign but vanishes for confident
    predictions. The result is 0 if no input is classified correctly.

    References
    ----------
    I. Goodfellow, J. Shlens, C. Szegedy. Explaining and Harnessing Adversarial Examples. ICLR,
    2015.

    Examples
    --------
    >>> model, inputs = nn.Linear(1, 2, bias=False), torch.tensor([[0.1], [0.3]])
    >>> _ = model.weight.data.copy_(torch.tensor([[0.0], [1.0]]))
    >>> fgsm_robustness(model, inputs, torch.tensor([1, 1]), 0.2)
    0.5
    """
    with torch.enable_grad():
        points = inputs.clone().requires_grad_()
        logits = model(points)
        is_label = functional.one_hot(labels, logits.shape[-1]).bool()
        wrong = logits.masked_fill(is_label, -torch.inf).logsumexp(-1)
        (gradient,) = torch.autograd.grad((wrong - logits[is_label]).sum(), points)
    with torch.no_grad():
        attacked = model(inputs + epsilon * gradient.sign()).argmax(-1) == labels
    correct = logits.argmax(-1) == labels
    return float((attacked & correct).sum() / correct.sum().clamp(min=1))


def nonlinear_fraction(model: nn.Module, samples: TaskSamples) -> float:
    """Compute the fraction of units that must stay nonlinear to lose at most a point of accuracy.

    Units are channels of activation calls. They are replaced by affine maps in order of their
    Fisher term E(g·(ŷ - y))², in steps of 5% of all units; the maps for a step are fitted in the
    network with all earlier calls replaced. Between steps the accuracy is interpolated.
    """
    inputs, labels = (tensor[:512] for tensor in samples.train)
    calls = find_calls(model, inputs[:2])
    terms: dict[str, Tensor] = {}
    for name, (x, y, gradient) in gradients_at_calls(model, calls, inputs, labels).items():
        axis = next(call.channel_axis for call in calls if call.name == name)
        error = _fit_and_apply(x, y, axis, len(x)) - y
        product = (gradient * error).movedim(axis, -1).double()
        terms[name] = product.reshape(len(x), -1, product.shape[-1]).sum(1).square().mean(0)
    order = torch.cat(list(terms.values())).argsort(stable=True).argsort()
    parts = torch.split(order, [len(part) for part in terms.values()])
    ranks = dict(zip(terms, parts, strict=True))
    by_call = {call.call: call for call in calls}
    tested = torch.cat([inputs, samples.test[0]])

    def accuracy(removed: float) -> float:
        count = round(removed * len(order))

        def replace(identity: CallId, x: Tensor, compute: Callable[[], Any]) -> Any:
            if identity not in by_call:
                return compute()
            call = by_call[identity]
            before = x.clone()
            y = compute()
            fitted = _fit_and_apply(before, y, call.channel_axis, len(inputs))
            is_removed = ranks[call.name] < count
            shape = [1] * y.ndim
            shape[call.channel_axis] = -1
            return torch.where(is_removed.reshape(shape), fitted, y)

        logits = CallInterception(model).run(tested.clone(), replace)[len(inputs) :]
        return float((logits.argmax(-1) == samples.test[1]).double().mean())

    accuracies = [accuracy(share) for share in REMOVED_FRACTIONS]
    return 1 - first_loss(REMOVED_FRACTIONS, accuracies, 0.01)


def _fit_and_apply(x: Tensor, y: Tensor, axis: int, count: int) -> Tensor:
    """Fit the best map per channel to the first `count` samples, and apply it to all."""
    fit = AffineFit()
    fit.add(copy_to_rows(x[:count], axis), copy_to_rows(y[:count], axis))
    return fit.per_channel()(x, axis)


def first_loss(shares: Sequence[float], accuracies: Sequence[float], cost: float) -> float:
    """Return the interpolated fraction at which accuracy has first fallen by `cost`.

    Examples
    --------
    >>> first_loss([0.0, 0.5, 1.0], [0.9, 0.9, 0.7], 0.05), first_loss([0.0, 1.0], [0.9, 0.9], 0.05)
    (0.625, 1.0)
    """
    losses = [accuracies[0] - accuracy for accuracy in accuracies]
    for index in range(1, len(losses)):
        if losses[index] > cost:
            below = (cost - losses[index - 1]) / (losses[index] - losses[index - 1])
            return shares[index - 1] + below * (shares[index] - shares[index - 1])
    return shares[-1]


def outcomes_measure(
    samples: TaskSamples, trainings: Mapping[int, tuple[float, int]]
) -> type[Measure]:
    """Return a measure of the outcomes for trained networks.

    Parameters
    ----------
    trainings : mapping of int to (float, int)
        Fraction of wrong labels and training seed for each network, keyed by its ``id``.
    """

    def network_outcomes(batch: Any) -> Result:
        """Accuracies, training loss and outcomes for a network.

        ``value`` is the accuracy on the test split, ``train`` and ``loss`` the accuracy and the
        cross-entropy on the training labels; ``gap``, ``fragility`` (1 -
        `fgsm_robustness`) and ``nonlinear`` (`nonlinear_fraction`) are the outcomes; ``gap_0``,
        ``gap_1``, ``fragility_0`` and ``fragility_1`` are those on halves of the test samples;
        ``norm`` is the Euclidean norm of the weights.
        """
        model = batch.model
        noise, seed = trainings[id(model)]
        inputs, labels = samples.train
        labels = corrupt_labels(labels, noise, samples.classes, seed)
        with torch.no_grad():
            logits = model(inputs)
            loss = functional.cross_entropy(logits.double(), labels)
            train = float((logits.argmax(-1) == labels).double().mean())
            correct = (model(samples.test[0]).argmax(-1) == samples.test[1]).double()
            share = nonlinear_fraction(model, samples)
        accuracy = float(correct.mean())
        weights = torch.cat([p.detach().flatten() for p in model.parameters() if p.ndim > 1])
        summary = {
            "value": accuracy,
            "train": train,
            "loss": float(loss),
            "gap": generalisation_gap(train, accuracy, noise, samples.classes),
            "fragility": 1 - fgsm_robustness(model, *samples.test, samples.epsilon),
            "nonlinear": share,
            "norm": float(weights.norm()),
        }
        for half in (0, 1):
            accuracy = float(correct[half::2].mean())
            gap = generalisation_gap(train, accuracy, noise, samples.classes)
            inputs, labels = (tensor[half::2] for tensor in samples.test)
            robustness = fgsm_robustness(model, inputs, labels, samples.epsilon)
            summary |= {f"gap_{half}": gap, f"fragility_{half}": 1 - robustness}
        return Result(summary, n=len(correct))

    return network_measure("network-outcomes", network_outcomes)
