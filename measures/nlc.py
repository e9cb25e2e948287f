"""Nonlinearity coefficient: the network's Jacobian relative to the spread of its outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nlbench.citation import Source
from nlbench.errors import NotFinite, Undefined
from nlbench.measure import Measure, MoreMeans, Result
from nlbench.measure.replicates import SampleGroups, combine
from nlbench.options import Option
from nlbench.probes.function import FunctionBatch, directional_derivative

from .papers import bibtex

# Standard deviation of the outputs, in units of their floating-point spacing, below which rounding
# makes up more than a thousandth of the variance.
MIN_SPREAD_IN_ROUNDINGS = 8

# One sample, and two others whose difference is the direction.
MIN_SAMPLES = 3


def nonlinearity_coefficient(
    function: Callable[[Tensor], Tensor], inputs: Tensor, *, directions: int = 4
) -> Tensor:
    """Estimate the nonlinearity coefficient sqrt(E tr(J Cov_x Jᵀ) / tr Cov_f) of a function.

    For two other samples x' and x'', v = (x' - x'') / √2 has covariance Cov_x. The numerator is
    therefore the mean of ‖J(x) v‖², computed from derivatives along v, and the denominator the mean
    of ‖f(x') - f(x'')‖² / 2 over the same pairs. For an affine function the two are equal for each
    pair, so the estimate is exactly 1. For each direction, every sample serves once as x, x' and
    x''.

    Parameters
    ----------
    function : callable
        Maps inputs (n, ...) to outputs (n, k), sample by sample, differentiable almost everywhere.
    inputs : tensor of shape (n, ...)
        Floating-point. Their order does not bias the estimate: they are shuffled with a fixed
        seed.
    directions : int
        Directions per sample, at most (n - 1) / 2. For odd n, that many directions form all pairs.

    Returns
    -------
    tensor, scalar, float64
        At least 0, and 1 for an affine function.

    Raises
    ------
    nlbench.Undefined
        If there are fewer than three samples, the input or output is constant, the output varies
        though its derivative is zero everywhere, or an operation can't be differentiated.
    nlbench.NotFinite
        If an output or a derivative is not finite.

    References
    ----------
    G. Philipp, J. G. Carbonell, "The Nonlinearity Coefficient - Predicting Generalization in Deep
    Neural Networks", arXiv:1806.00179, 2018; G. Philipp, "The Nonlinearity Coefficient - A
    Practical Guide to Neural Architecture Design", arXiv:2105.12210, 2021, section 1.

    Examples
    --------
    >>> x = torch.linspace(-1, 1, 101, dtype=torch.float64)[:, None]
    >>> round(nonlinearity_coefficient(lambda x: 3 * x - 2, x).item(), 9)
    1.0
    >>> bool(nonlinearity_coefficient(lambda x: torch.sin(9 * x), x) > 5)
    True
    """
    return _coefficient(*_terms(function, inputs, directions).per_sample())


def _offsets(n: int, directions: int) -> Iterator[tuple[int, int]]:
    """Yield the offsets of x' and x'' from x, with the n samples arranged on a circle.

    Pairs differ by 1, 2, …, so that no pair occurs twice, and neither element is x itself.
    """
    for offset in range(1, min(directions, (n - 1) // 2) + 1):
        yield offset, 2 * offset


@dataclass(frozen=True)
class _Terms:
    """Terms of the coefficient for the samples x of a batch, in shuffled order, and directions.

    Parameters
    ----------
    slopes : tensor of shape (directions, n)
        ‖J(x) v‖².
    spreads : tensor of shape (directions, n)
        ‖f(x') - f(x'')‖² / 2.
    floors : tensor of shape (n,)
        Spread below which rounding of the outputs matters.
    order : integer tensor of shape (n,)
        Index in the batch of each sample.
    dtype : torch.dtype
        Dtype of the outputs.
    """

    slopes: Tensor
    spreads: Tensor
    floors: Tensor
    order: Tensor
    dtype: torch.dtype

    def per_sample(self) -> tuple[Tensor, Tensor, Tensor, torch.dtype]:
        """Average (n,) over directions and over each sample's parts as x, x' and x''."""
        offsets = list(_offsets(len(self.order), len(self.slopes)))
        means = []
        for terms in (self.slopes, self.spreads):
            shared = [_shared(t, *o) for t, o in zip(terms, offsets, strict=True)]
            means.append(torch.stack(shared).mean(0))
        slopes, spreads = means
        return slopes, spreads, self.floors, self.dtype

    def memberships(self, groups: Tensor) -> Tensor:
        """Return the groups (directions, n, 3) of x, x' and x'', given those (n,) of the batch."""
        first = groups[self.order]
        members = [
            torch.stack([first, first.roll(-one), first.roll(-two)], 1)
            for one, two in _offsets(len(first), len(self.slopes))
        ]
        return torch.stack(members)


def _terms(
    function: Callable[[Tensor], Tensor], inputs: Tensor, directions: int, limit: int | None = None
) -> _Terms:
    """Compute the terms of the coefficient."""
    n = len(inputs)
    if n < MIN_SAMPLES:
        raise Undefined(f"n = {n}: at least {MIN_SAMPLES} samples per batch are needed")
    if not inputs.is_floating_point():
        raise Undefined(f"the inputs are {inputs.dtype}, along which there is no derivative")
    # Neighbouring samples, such as those of a sequence, would be too similar.
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    inputs = inputs[order.to(inputs.device)]
    slopes = []
    spreads = []
    for first, second in _offsets(n, directions):
        direction = (inputs.roll(-first, 0) - inputs.roll(-second, 0)) / math.sqrt(2)
        outputs, derivatives = directional_derivative(function, inputs, direction, limit=limit)
        dtype = outputs.dtype
        outputs = _flat(outputs)
        derivatives = _flat(derivatives)
        difference = outputs.roll(-first, 0) - outputs.roll(-second, 0)
        slopes.append(derivatives.square().sum(1))
        spreads.append(difference.square().sum(1) / 2)
    floors = (MIN_SPREAD_IN_ROUNDINGS * torch.finfo(dtype).eps * outputs).square().sum(1)
    return _Terms(torch.stack(slopes), torch.stack(spreads), floors, order, dtype)


def _shared(terms: Tensor, first: int, second: int) -> Tensor:
    """Average the terms (n,) in which each sample takes part: as x, x' and x''."""
    return (terms + terms.roll(first) + terms.roll(second)) / 3


def _flat(values: Tensor) -> Tensor:
    """Convert to finite float64 of shape (n, k)."""
    if values.device.type == "mps":
        values = values.cpu()
    values = values.reshape(len(values), -1).double()
    if not torch.isfinite(values).all():
        raise NotFinite("an output or a derivative of the network is not finite")
    return values


def _coefficient(slopes: Tensor, spreads: Tensor, floors: Tensor, dtype: torch.dtype) -> Tensor:
    slope = slopes.sum()
    spread = spreads.sum()
    if not (torch.isfinite(slope) and torch.isfinite(spread)):
        raise NotFinite("the squares of outputs or derivatives overflow in float64")
    if slope > 0 and spread < floors.sum():
        name = str(dtype).removeprefix("torch.")
        advice = "" if dtype == torch.float64 else ": try --precision float64"
        raise Undefined(f"constant output: its spread is below {name}'s rounding{advice}")
    if spread == 0:
        raise Undefined("constant output")
    if slope == 0:
        raise Undefined(
            "the derivative is zero at every sample but the output varies: the network rounds, "
            "compares or detaches values"
        )
    return (slope / spread).sqrt()


class NonlinearityCoefficient(Measure):
    r"""Nonlinearity coefficient of the network as a function: 1 for an affine network.

    It is a ratio of sums over all samples of the run; pairs are formed within a batch. Its
    standard error is that for samples and directions, too large rather than too small.

    Definition
    ----------
    .. math::

        \operatorname{NLC} = \sqrt{\frac{E_x \operatorname{tr}(J(x)\, \Sigma_x\, J(x)^\top)}
        {\operatorname{tr} \Sigma_f}}

    where J is the Jacobian and Σ are the covariances of inputs and outputs.

    Units
    -----
    None. A value of 1 means an affine network.

    Undefined
    ---------
    No batch of at least three samples; inputs that are not floating-point; a constant output; an
    operation without a derivative; a network whose derivative is zero at every sample, or whose
    backward is not its derivative, such as one with straight-through rounding.

    Cost
    ----
    ``directions`` = 4 forward-mode derivatives per sample, each costing about two forward passes.

    Limits
    ------
    It is at least 1 for normally distributed inputs, by the Poincaré inequality; for clustered
    inputs it may be below 1 if the network is steep only between the clusters. The samples define
    Σx, so values for different data are not comparable.

    Examples
    --------
    sin(w x) for x uniformly distributed on [-1, 1]:

    >>> x = torch.linspace(-1, 1, 2001, dtype=torch.float64)[:, None]
    >>> [round(nonlinearity_coefficient(lambda x: torch.sin(w * x), x).item(), 1) for w in (1, 9)]
    [0.9, 5.0]
    """

    name: ClassVar[str] = "nlc"
    # 2: the error takes into account that each sample is part of several terms.
    version: ClassVar[str] = "2"
    probe: ClassVar[str] = "function"
    bounds: ClassVar[tuple[float, float]] = (0.0, math.inf)
    more_means: ClassVar[MoreMeans] = "more nonlinear"
    options: ClassVar[Mapping[str, Option]] = {
        "directions": Option(
            4, "derivatives per sample, along differences between samples", minimum=1, maximum=1e6
        )
    }
    source: ClassVar[Source] = Source(
        "G. Philipp, J. G. Carbonell. The Nonlinearity Coefficient - Predicting Generalization in "
        "Deep Neural Networks. arXiv:1806.00179, 2018; estimated along differences of samples as "
        "in G. Philipp. The Nonlinearity Coefficient - A Practical Guide to Neural Architecture "
        "Design. arXiv:2105.12210, 2021",
        "definition of the NLC",
        bibtex("philipp2018nonlinearity", "philipp2021nonlinearity"),
    )

    def reset(self) -> None:
        """Discard all batches."""
        self._batches: list[tuple[Tensor, ...]] = []
        self._groups = SampleGroups()
        # Slopes and spreads (terms,) of all batches, and the groups (terms, 3) of their samples.
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []
        self._skipped_samples = 0

    def update(self, observation: FunctionBatch) -> None:
        """Compute a batch's terms, and store three numbers per sample."""
        if len(observation.inputs) < MIN_SAMPLES:
            self._skipped_samples += len(observation.inputs)
            return
        observation.check_derivative("forward")
        directions = int(self.settings["directions"])
        terms = _terms(observation.function, observation.inputs, directions, observation.limit)
        *per_sample, self._dtype = terms.per_sample()
        self._batches.append(tuple(term.cpu() for term in per_sample))
        if self.replicated:
            groups = torch.from_numpy(self._groups.add(observation.inputs, observation.sources))
            members = terms.memberships(groups)
            sides = terms.slopes.flatten().cpu(), terms.spreads.flatten().cpu()
            self._parts.append((*sides, members.flatten(0, 1).cpu()))

    def compute(self) -> Result:
        """Return the coefficient of the network."""
        if not self._batches:
            raise Undefined(f"no batch of at least {MIN_SAMPLES} samples")
        slopes, spreads, floors = map(torch.cat, zip(*self._batches, strict=True))
        summary = {"value": _coefficient(slopes, spreads, floors, self._dtype).item()}
        notes = {"samples left out": self._skipped_samples} if self._skipped_samples else {}
        return Result(summary, n=len(slopes), notes=notes, replicates=self._leave_out())

    def _leave_out(self) -> tuple[float, ...]:
        """Compute the coefficient without all terms to which a group contributes, for each."""
        if not self._parts:
            return ()
        slopes, spreads, members = map(torch.cat, zip(*self._parts, strict=True))
        kept = [(members != group).all(1) for group in sorted(set(members[:, 0].tolist()))]
        return combine(
            lambda slope, spread: math.sqrt(slope / spread),
            [slopes[mask].sum().item() for mask in kept],
            [spreads[mask].sum().item() for mask in kept],
        )
