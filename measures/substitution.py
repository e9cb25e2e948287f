"""Substitution: the cost of replacing a place by its best affine map."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nlbench.errors import NotFinite, Undefined
from nlbench.measure import Measure, MoreMeans, Result, Value
from nlbench.measure.left_out import merge_all_but_one
from nlbench.measure.replicates import SampleGroups, combine, leave_groups_out
from nlbench.options import Option
from nlbench.probes.replacement import ReplacedOutputs
from nlbench.probes.replacement.replacement_probe import DEGREES, UNFITTED

from .accuracy import IGNORED_LABEL, class_labels, ignore_padding, refuse_unclear_classes

MIN_SAMPLES = 2


CHUNK_ENTRIES = (2**24, 2**17)
"""Logits compared at a time on accelerators, and on the CPU, where they fit into its cache."""


PROBABILITIES = "the network's outputs are probabilities, whose logarithm is taken"
"""Remark on networks that end in a softmax."""

ROUNDING_EPS = 16
"""Largest difference of a sum of probabilities from 1, in eps of their dtype."""


def are_probabilities(outputs: Tensor) -> bool:
    """Return True if all rows (..., classes) are non-negative and sum to 1, within rounding.

    Examples
    --------
    >>> logits = torch.tensor([[3.0, 1.0]])
    >>> are_probabilities(logits), are_probabilities(logits.softmax(-1))
    (False, True)
    """
    if not outputs.numel() or not bool((outputs >= 0).all()):
        return False
    sums = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).sum(-1)
    return bool(((sums - 1).abs() <= ROUNDING_EPS * torch.finfo(outputs.dtype).eps).all())


def log_probabilities(probabilities: Tensor) -> Tensor:
    """Return logarithms, which are finite also where rounding makes a probability 0."""
    if bool((probabilities < 0).any()):
        raise Undefined("the network's outputs are probabilities, and negative with a map instead")
    return probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()


def loss_change(
    outputs: Tensor, replaced: Tensor, labels: Tensor, tokens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the change in each sample's cross-entropy, in nats.

    Parameters
    ----------
    outputs, replaced : tensor of shape (n, ..., classes)
        Logits without and with a place replaced.
    labels : integer tensor of shape (n, ...)
        Positions with label -100 are ignored.
    tokens : tensor of shape (n, ...), optional
        False at positions to ignore, such as padding.

    Returns
    -------
    change : tensor of shape (n,), float64
        Sum over the sample's positions.
    positions : tensor of shape (n,), float64
        Number of positions that are not ignored.

    Examples
    --------
    >>> sure, even = torch.tensor([[3.0, 1.0]]).log(), torch.zeros(1, 2)
    >>> change, _ = loss_change(sure, even, torch.tensor([0]))
    >>> math.isclose(change.item(), math.log(2) - math.log(4 / 3), rel_tol=1e-6)
    True
    """
    terms = _ClassTerms.of(outputs, replaced, ignore_padding(labels, tokens), tokens)
    return _per_sample(terms.loss), _per_sample(terms.counted)


def divergence(
    outputs: Tensor, replaced: Tensor, labels: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the divergence KL(f ‖ f_s) of each sample's class probabilities, in nats.

    Parameters
    ----------
    outputs, replaced : tensor of shape (n, ..., classes)
        Logits without and with a place replaced.
    labels : integer tensor of shape (n, ...), optional
        Positions with label -100 are ignored; other labels are not used.

    Returns
    -------
    divergence, positions : tensor of shape (n,), float64
        See `loss_change`.

    Examples
    --------
    >>> logits = torch.tensor([[3.0, 1.0]]).log()
    >>> kl, _ = divergence(logits, torch.zeros(1, 2))
    >>> math.isclose(kl.item(), 0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel_tol=1e-6)
    True
    """
    terms = _ClassTerms.of(outputs, replaced, labels)
    return _per_sample(terms.kl), _per_sample(terms.counted)


@dataclass(frozen=True)
class _ClassTerms:
    """Changes in the class probabilities at each position, tensors of shape (n, ...), float64.

    Parameters
    ----------
    kl : tensor
    loss, accuracy : tensor
        Zero if there are no labels.
    counted : tensor
        1, or 0 at ignored positions, where the changes are 0 too.
    """

    kl: Tensor
    loss: Tensor
    accuracy: Tensor
    counted: Tensor

    @classmethod
    def of(
        cls, outputs: Tensor, replaced: Tensor, labels: Tensor | None, tokens: Tensor | None = None
    ) -> _ClassTerms:
        """Compare logits (n, ..., classes), in chunks of rows that fit into the cache.

        Positions are ignored where `tokens`, of shape (n, ...), is False.
        """
        if outputs.device.type == "mps":
            outputs = outputs.cpu()
            replaced = replaced.cpu()
        shape = outputs.shape[:-1]
        classes = outputs.shape[-1]
        before, after = (logits.reshape(-1, classes) for logits in (outputs, replaced))
        terms = torch.zeros(4, len(before), dtype=torch.float64, device=before.device)
        if labels is None:
            terms[3] = 1
        else:
            labels = class_labels(outputs, labels.to(before.device)).reshape(-1)
            terms[3] = labels != IGNORED_LABEL
            labels = torch.where(labels == IGNORED_LABEL, 0, labels).long()
        if tokens is not None:
            terms[3] *= tokens.to(before.device).expand(shape).reshape(-1)
        step = max(1, CHUNK_ENTRIES[before.device.type == "cpu"] // classes)
        for start in range(0, len(before), step):
            rows = slice(start, start + step)
            chunk = None if labels is None else labels[rows]
            changes = _row_terms(before[rows], after[rows], chunk)
            # Values in padding may be anything, also infinite.
            terms[:3, rows] = torch.where(terms[3, rows] > 0, changes, 0.0)
        return cls(*(values.reshape(shape) for values in terms))


def _row_terms(before: Tensor, after: Tensor, labels: Tensor | None) -> Tensor:
    """Return the divergence and the changes in loss and accuracy (3, rows) of logits (rows, k)."""
    p, q = (torch.log_softmax(logits.double(), -1) for logits in (before, after))
    terms = p.new_zeros(3, len(p))
    # Zero probability times an infinite logarithm is zero.
    terms[0] = torch.where(p > -math.inf, p.exp() * (p - q), 0.0).sum(-1)
    if labels is not None:
        index = labels[:, None]
        terms[1] = (p.gather(1, index) - q.gather(1, index))[:, 0]
        hits, hits_before = (logits.argmax(-1) == labels for logits in (after, before))
        terms[2] = hits.double() - hits_before.double()
    return terms


def _per_sample(values: Tensor) -> Tensor:
    return values.double().reshape(len(values), -1).sum(1).cpu()


@dataclass
class _Terms:
    """Sums and weights per sample for one map at one place, keyed by cost."""

    parts: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def add(self, cost: str, terms: tuple[Tensor, Tensor]) -> None:
        self.parts.setdefault(cost, []).append(terms)

    def mean(self, cost: str, scale: float = 1.0) -> float:
        sums, weights = map(torch.cat, zip(*self.parts[cost], strict=True))
        if not weights.sum():
            raise Undefined("there are no labels to predict")
        mean = float(sums.sum()) / float(weights.sum())
        if not math.isfinite(mean):
            raise NotFinite("the outputs with the place replaced are not finite")
        return mean / scale

    def leave_groups_out(self, cost: str, groups: NDArray[np.integer[Any]]) -> tuple[float, ...]:
        """Compute the mean without each group of samples."""
        sums, weights = (
            torch.cat(column).numpy() for column in zip(*self.parts[cost], strict=True)
        )
        if len(groups) != len(sums):
            return ()
        return leave_groups_out(groups, lambda kept: sums[kept].sum() / weights[kept].sum())


class Substitution(Measure):
    r"""Cost of replacing each activation by its best affine map, fitted on other samples.

    ``value`` is the cost of the first of ``replacement.maps``: by default the best slope and
    intercept per channel of an activation call, and the best full map of a block or another module.
    Costs of other maps are named after the map. ``loss``, ``kl`` and ``accuracy`` are the first
    map's changes in these quantities.

    Definition
    ----------
    .. math::

        \frac{1}{n} \sum_i \ell(f_s(x_i), t_i) - \ell(f(x_i), t_i)

    f_s is the network with the place's output replaced by that map of its input, and ℓ the
    cross-entropy of label t; or, by ``cost``, KL(f ‖ f_s), or ‖f_s − f‖² over the variance of f.
    Outputs that are non-negative and sum to 1 are probabilities, others logits.

    Units
    -----
    Nats; none for the squared change.

    Undefined
    ---------
    Fewer than two evaluation samples, a batch that skips a place, labels that don't fit the cost.

    Cost
    ----
    One forward pass to fit all places, and for each place and map a pass that starts at the place.

    Limits
    ------
    Costs of several places don't add up, and those of an untrained network mean little. A change in
    the loss can be negative.

    Examples
    --------
    >>> import nlbench
    >>> network = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(1, 1))
    >>> x = torch.linspace(-1, 1, 2001)[:, None]
    >>> run = nlbench.evaluate(network, x, ["substitution"], labels=x)
    >>> round(run["substitution"].summary["value"], 1)  # of the variance 5/48, 1/48 remains
    0.2
    """

    name: ClassVar[str] = "substitution"
    # 4: outputs that are probabilities aren't taken for logits, and replaced outputs are written
    # where the network reads them.
    version: ClassVar[str] = "4"
    probe: ClassVar[str] = "replacement"
    bounds: ClassVar[tuple[float, float]] = (-math.inf, math.inf)
    more_means: ClassVar[MoreMeans] = "more nonlinear"
    options: ClassVar[Mapping[str, Option]] = {
        "cost": Option(
            "auto",
            "loss: change in the cross-entropy; kl: divergence of the class probabilities; "
            "squared: squared change in the outputs over their variance; auto: based on the labels",
            choices=("auto", "loss", "kl", "squared"),
        ),
        "tolerance": Option(
            0.01,
            "largest cost of a map that counts as sufficient, for degree",
            minimum=0,
            maximum=1e9,
        ),
    }

    def reset(self) -> None:
        """Discard all places."""
        # Keyed by place, then by map.
        self._terms: dict[str, dict[str, _Terms]] = {}
        self._primary = ""
        self._cost = ""
        # True if the outputs are probabilities, False if they are logits.
        self._probabilities: bool | None = None
        # Count, sum and sum of squares of each output; each batch is added once.
        self._moments: tuple[Tensor | float, Tensor | float, Tensor | float] = (0.0, 0.0, 0.0)
        self._shift: Tensor | None = None
        self._batch = self._grouped_batch = -1
        self._groups = SampleGroups()
        self._group_moments: dict[int, tuple[Tensor | float, ...]] = {}
        # Fractions of each batch's inputs outside a polynomial's range, with the batches' sizes.
        self._outside: dict[str, dict[int, tuple[float, int]]] = {}

    def update(self, observation: ReplacedOutputs) -> None:
        """Compare the outputs of one batch with those of one map at one place."""
        outputs = observation.outputs
        replaced = observation.replaced
        tokens = observation.tokens
        labels = observation.labels
        if labels is not None:
            labels = ignore_padding(labels, tokens)
        counted_outputs = outputs if tokens is None else outputs[tokens]
        if not bool(torch.isfinite(counted_outputs).all()):
            raise NotFinite("the network's outputs are not finite")
        cost = self._cost = str(self.settings["cost"])
        if cost == "auto":
            cost = self._cost = _default_cost(outputs, labels)
        classes = labels is not None and _are_class_labels(outputs, labels, cost)
        if cost == "loss" and not classes:
            raise Undefined("the samples have no labels of classes; set substitution.cost=kl")
        self._primary = observation.primary
        if observation.outside is not None:
            batches = self._outside.setdefault(observation.place, {})
            batches[observation.batch] = observation.outside, len(outputs)
        terms = self._terms.setdefault(observation.place, {}).setdefault(observation.map, _Terms())
        if (
            self.replicated
            and observation.inputs is not None
            and observation.batch > self._grouped_batch
        ):
            self._grouped_batch = observation.batch
            self._groups.add(observation.inputs)
        has_probabilities = outputs.ndim > 1 and outputs.shape[-1] > 1
        if cost == "kl" and not has_probabilities:
            raise Undefined("the network has one output, and so no classes")
        if classes or cost == "kl":
            if self._is_of_probabilities(counted_outputs):
                outputs, replaced = map(log_probabilities, (outputs, replaced))
            changes = _ClassTerms.of(outputs, replaced, labels if classes else None, tokens)
            counted = _per_sample(changes.counted)
            if classes:
                terms.add("loss", (_per_sample(changes.loss), counted))
                terms.add("accuracy", (_per_sample(changes.accuracy), counted))
            if cost != "squared":
                terms.add("kl", (_per_sample(changes.kl), counted))
        if cost == "squared":
            self._add_squares(observation, terms)

    def _is_of_probabilities(self, outputs: Tensor) -> bool:
        """Return True if the outputs are probabilities in this batch, as in all others."""
        found = are_probabilities(outputs)
        if self._probabilities is None:
            self._probabilities = found
        if found != self._probabilities:
            raise Undefined("the network's outputs are probabilities in some batches only")
        return found

    def _add_squares(self, observation: ReplacedOutputs, terms: _Terms) -> None:
        outputs, replaced = (
            t.cpu().double() if t.ndim > 1 else t.cpu().double()[:, None]
            for t in (observation.outputs, observation.replaced)
        )
        tokens = observation.tokens
        valid = torch.ones(1, dtype=torch.bool)
        if tokens is not None:
            valid = tokens.cpu().reshape(*tokens.shape, *(1,) * (outputs.ndim - tokens.ndim))
        valid = valid.expand(outputs.shape).flatten(1)
        outputs = outputs.flatten(1)
        replaced = replaced.flatten(1)
        squares = torch.where(valid, (replaced - outputs).square(), 0.0).sum(1)
        terms.add("squared", (squares, valid.double().sum(1)))
        if observation.batch > self._batch:
            self._batch = observation.batch
            count, total, total_squares = self._moments
            # Relative to the first output, so that an offset costs no precision.
            if self._shift is None:
                self._shift = torch.where(valid[0], outputs[0], 0.0)
            shifted = torch.where(valid, outputs - self._shift, 0.0)
            self._moments = (
                count + valid.sum(0),
                total + shifted.sum(0),
                total_squares + shifted.square().sum(0),
            )
            if self._grouped_batch == self._batch:
                self._add_group_moments(valid, shifted)

    def _add_group_moments(self, valid: Tensor, shifted: Tensor) -> None:
        """Add the moments of one batch's outputs to those of each group."""
        groups = torch.from_numpy(self._groups.array[-len(valid) :])
        for group in sorted(set(groups.tolist())):
            rows = groups == group
            sums = (valid[rows].sum(0), shifted[rows].sum(0), shifted[rows].square().sum(0))
            earlier = self._group_moments.get(group, (0.0, 0.0, 0.0))
            self._group_moments[group] = tuple(
                old + new for old, new in zip(earlier, sums, strict=True)
            )

    def compute(self) -> Result:
        """Return the cost of each place."""
        scale = 1.0
        n = 0
        scales: tuple[float, ...] = (1.0,) * len(np.unique(self._groups.array))
        if self._cost == "squared":
            scale = _mean_variance(*self._moments)
            if scale <= 0:
                raise Undefined("constant output")
            parts = [self._group_moments[group] for group in sorted(self._group_moments)]
            scales = tuple(_mean_variance(*others) for others in _sums_without_each(parts))
        values = []
        groups = self._groups.array
        for place, maps in self._terms.items():
            first = maps.get(self._primary)
            if first is None:
                reason = UNFITTED[self._primary]
                values.append(Value.missing(place, "undefined", reason))
                continue
            statistics = {"value": first.mean(self._cost, scale)}
            for name, terms in maps.items():
                if name != self._primary:
                    statistics[name] = terms.mean(self._cost, scale)
            costs = {**statistics, self._primary: statistics["value"]}
            statistics |= self._degree(place, costs)
            for other in ("loss", "kl", "accuracy"):
                if other in first.parts:
                    statistics[other] = first.mean(other)
            n = sum(len(sums) for sums, _ in first.parts[self._cost])
            if n < MIN_SAMPLES:
                raise Undefined(
                    f"{n} sample to evaluate maps on, at least {MIN_SAMPLES} are needed"
                )
            means = first.leave_groups_out(self._cost, groups)
            replicates = combine(lambda cost, unit: cost / unit, means, scales) if means else ()
            values.append(Value(place, statistics, n, replicates=replicates))
        result = Result.of(values, n=n, notes={"cost": self._cost})
        if self._probabilities and result.status == "ok":
            result = replace(result, reason=PROBABILITIES)
        return result

    def _degree(self, place: str, costs: Mapping[str, float]) -> dict[str, float]:
        """Return the least sufficient degree and the fraction of inputs outside the range.

        Nothing is returned without polynomials, and no degree if none is sufficient.
        """
        if place not in self._outside:
            return {}
        fractions, sizes = zip(*self._outside[place].values(), strict=True)
        statistics = {"outside": float(np.average(fractions, weights=sizes))}
        sufficient = [
            DEGREES[name]
            for name, cost in costs.items()
            if name in DEGREES and cost <= float(self.settings["tolerance"])
        ]
        if sufficient:
            statistics["degree"] = float(min(sufficient))
        return statistics


def _mean_variance(count: Tensor | float, total: Tensor | float, squares: Tensor | float) -> float:
    """Compute the variance of an output, averaged over outputs by how often each is counted."""
    count, total, squares = (torch.as_tensor(moment) for moment in (count, total, squares))
    variances = squares - total.square() / count.clamp(min=1)
    return float(variances.sum() / count.sum())


def _sums_without_each(
    parts: Sequence[tuple[Tensor | float, ...]],
) -> list[tuple[Tensor | float, ...]]:
    """Add up all parts but one, for each part that is left out."""
    if len(parts) < 2:
        return []
    return merge_all_but_one(
        parts, lambda a, b: tuple(one + other for one, other in zip(a, b, strict=True))
    )


def _are_class_labels(outputs: Tensor, labels: Tensor, cost: str) -> bool:
    """Return True if labels are classes, and raise if the cost requires that and they aren't."""
    try:
        refuse_unclear_classes(outputs, labels)
        class_labels(outputs, labels)
    except Undefined as error:
        if cost == "loss":
            raise Undefined(f"{error}; or set substitution.cost=kl") from error
        return False
    return True


def _default_cost(outputs: Tensor, labels: Tensor | None) -> str:
    if outputs.ndim < 2 or outputs.shape[-1] == 1:
        return "squared"
    if labels is None:
        return "kl"
    if not labels.is_floating_point() or labels.shape != outputs.shape[:-1]:
        return "squared" if labels.is_floating_point() else "loss"
    # Indices of classes as floats are an error, which `class_labels` describes.
    are_indices = (labels == labels.round()) & (labels < outputs.shape[-1])
    return "loss" if bool(are_indices.all()) else "squared"
