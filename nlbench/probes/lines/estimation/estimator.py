"""Estimates of boundaries and of the deviation from the chord, without finding breakpoints.

Each unit that is on different pieces at two points has crossed a boundary at least once between
them. The number of these units, summed over neighbouring nodes of a uniform grid, is therefore a
lower bound on the number of boundaries, like transitions of activation codes at a fixed number of
points (Novak et al., "Sensitivity and Generalization in Neural Networks: an Empirical Study", ICLR
2018). The bound grows as the grid is halved, and the last halvings show what further ones would
add. The same forward passes yield the network's outputs, whose distance to the chord is integrated.

This module decides when to halve the grid, when to use double precision and when to stop. For the
other modules, see `nlbench.probes.lines.estimation`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from nlbench.errors import RequestError
from nlbench.introspection.memory import halve_on_oom
from nlbench.introspection.precision import each_exact
from nlbench.introspection.threads import torch_threads
from nlbench.probes.lines.quadrature import RELATIVE_ROUNDING
from nlbench.probes.lines.rules.pieces import MaxGroups, Ranks
from nlbench.probes.lines.segments import Segment
from nlbench.probes.lines.trace import SegmentEstimate

from .evaluator import Evaluator
from .extrapolation import (
    CHECK_PLACES,
    PAIRED_FRACTION,
    RANKED_FRACTION,
    CrossingEstimate,
    DeviationEstimate,
    check_places,
)
from .grids import COMPARED_STEPS, COST_PROBE_STEPS, GridGroup, interleave
from .piecewise import COARSE_ROUNDING, MeasuredRounding

DEFAULT_TOLERANCE = 2e-3
DEFAULT_EVALUATIONS = 4096
DEFAULT_BUDGET = 1000
"""Maximum number of forward passes for an exact trace, if the method is chosen automatically."""
MIN_STEPS = 16
"""Minimum number of grid steps for a number of crossings to be trusted."""
MIN_DEVIATION_STEPS = 32
"""Minimum number of grid steps for a deviation to be trusted."""
PAIR_SEARCH_STEPS = 128
"""Number of steps up to which halving continues because a pair of crossings may be missing."""
MISCOUNTED_CROSSINGS = 1.0
"""Number of crossings that may be merged or lost in single precision or by ties in max pooling."""


@dataclass(frozen=True)
class _EstimateOptions:
    """Options for `estimate_segments`.

    If `may_be_imprecise`, segments that need double precision are marked and left unfinished. If
    `expects_ties`, all segments are assumed to have coincident crossings. If not `integrates`, only
    boundaries are counted; if not `counts`, only on the grid that predicts the cost of an exact
    trace.
    """

    tolerance: float
    evaluations: int
    budget: int
    may_be_imprecise: bool
    expects_ties: bool = False
    integrates: bool = True
    counts: bool = True


@dataclass
class _SegmentState:
    """Current estimates for one segment.

    `is_exact` marks a segment for an exact trace, `is_imprecise` one that needs double precision,
    `has_ties` one that needs it only for its crossings. `grid_steps` is the number of steps of the
    finest grid, and `values` those of the grid for the deviation once there is one.
    `extra_evaluations` counts the evaluations that are not at nodes of the grid.
    """

    evaluator: Evaluator
    segment: Segment
    rounding: MeasuredRounding
    crossings: CrossingEstimate | None = None
    values: Tensor = field(default_factory=lambda: torch.zeros(0))
    deviation: DeviationEstimate | None = None
    grid_steps: int = 0
    is_exact: bool = False
    is_imprecise: bool = False
    has_ties: bool = False
    extra_evaluations: int = 0

    def rounding_error(self) -> Tensor:
        """Return the rounding error of the distances to the chord: (k,)."""
        values = self.values
        measured = self.rounding.output_error
        size = values.abs().amax() if values.numel() else values.new_zeros(())
        expected = 2 * torch.finfo(self.evaluator.dtype).eps * size
        # It is far larger where outputs are small differences of large numbers.
        exceeds = measured > 2 * COARSE_ROUNDING * expected
        return torch.where(exceeds, 2 * measured, expected).expand(values.shape[1])

    def deviation_target(self, tolerance: float) -> float:
        """Return the error, a norm over outputs, that the tolerance allows the deviation."""
        assert self.deviation is not None
        size = float(self.values.abs().amax()) if self.values.numel() else 0.0
        total = float(torch.linalg.vector_norm(self.deviation.parts.total))
        return max(tolerance * total, RELATIVE_ROUNDING * size)

    def is_integrated(self, tolerance: float) -> bool:
        """Return True if further halving would not bring the deviation's error within its target.

        See `CrossingEstimate.is_resolved`.
        """
        assert self.deviation is not None
        error, fixed = (
            float(torch.linalg.vector_norm(x))
            for x in (self.deviation.error, self.rounding_error())
        )
        return error <= max(self.deviation_target(tolerance) - fixed, fixed)

    def integrate(self, checks: Tensor, tolerance: float, is_last: bool) -> bool:
        """Integrate on the coarsest grid that is accurate enough. Return False if there is none.

        Its values and integrals don't depend on how often counting has halved the grid. If it
        `is_last`, there is an estimate in any case.
        """
        values = self.values
        if len(values) <= MIN_DEVIATION_STEPS and not is_last:
            return False
        stride = max(1, (len(values) - 1) // MIN_DEVIATION_STEPS)
        while True:
            self.values = values[::stride]
            self.deviation = DeviationEstimate.of(self.values, checks)
            is_fine = len(self.values) > MIN_DEVIATION_STEPS and self.is_integrated(tolerance)
            if is_fine or stride == 1:
                return is_fine
            stride //= 2

    def estimate(self, tolerance: float) -> SegmentEstimate:
        """Return the finished estimate."""
        deviation = self.deviation
        assert deviation is not None
        steps = len(self.values) - 1
        start, end = self.segment
        deviation_error = deviation.error + self.rounding_error()
        is_close = float(deviation_error.norm()) <= self.deviation_target(tolerance)
        estimate = SegmentEstimate(
            t=torch.linspace(0, 1, steps + 1, dtype=torch.float64, device=self.values.device),
            values=self.values.clone(),
            length=float(torch.linalg.vector_norm((end - start).double())),
            above=deviation.parts.above.clone(),
            below=deviation.parts.below.clone(),
            variation=deviation.parts.variation.clone(),
            deviation_error=deviation_error,
            evaluations=self.grid_steps + 1 + CHECK_PLACES + self.extra_evaluations,
            tolerance=tolerance,
            converged=is_close,
            precision=torch.finfo(self.evaluator.dtype).eps,
        )
        crossings = self.crossings
        if crossings is None:
            return estimate
        sites = self.evaluator.piecewise.program.sites
        return replace(
            estimate,
            crossings=crossings.total,
            at_least=crossings.at_least,
            error=crossings.error,
            contributions=dict(zip(sites, crossings.by_site.tolist(), strict=True)),
            twice=crossings.twice,
            undecided=crossings.undecided,
            converged=is_close and crossings.is_close(tolerance),
        )


@each_exact
def estimate_segments(
    model: nn.Module,
    segments: Iterable[Segment],
    *,
    tolerance: float,
    evaluations: int,
    dtype: torch.dtype | None = None,
    memory: int | None = None,
    budget: int = 0,
    counts: bool = True,
) -> Iterator[SegmentEstimate | None]:
    """Estimate segments one at a time. See `nlbench.probes.lines.estimate_segment`.

    Parameters
    ----------
    model : torch.nn.Module
    segments : iterable of (start, end)
    tolerance, evaluations, dtype, memory
        See `estimate_segment`.
    budget : int
        Number of forward passes. A segment is not estimated if an evaluation at nine points
        predicts that an exact trace takes at most this many.
    counts : bool
        False to integrate only, which does not change the integrals.

    Yields
    ------
    SegmentEstimate or None
        In the order of the segments; None if an exact trace is within the budget.
    """
    if not 0 < tolerance < 1:
        raise RequestError(f"a tolerance of {tolerance}, expected more than 0 and less than 1")
    remaining = iter(segments)
    first = next(remaining, None)
    if first is None:
        return
    remaining = itertools.chain([first], remaining)

    @functools.cache
    def evaluator_in(precision: torch.dtype) -> Evaluator:
        return Evaluator(model, precision, first, memory)

    first_dtype = dtype or torch.float32
    options = _EstimateOptions(
        tolerance, evaluations, budget, may_be_imprecise=dtype is None, counts=counts
    )
    precise = replace(options, may_be_imprecise=False)
    crossings_only = replace(precise, integrates=False)
    count = 1
    while group := list(itertools.islice(remaining, count)):
        states = _estimate_in_memory(evaluator_in, first_dtype, group, options)
        if group[0] is first:
            # The other segments rarely differ, so they skip the search in single precision.
            options = replace(options, expects_ties=states[0].has_ties)
        count = evaluator_in(first_dtype).batch_segments
        imprecise = [i for i, state in enumerate(states) if state.is_imprecise]
        segments = [group[i] for i in imprecise]
        doubles = _estimate_in_memory(evaluator_in, torch.float64, segments, precise)
        for i, double in zip(imprecise, doubles, strict=True):
            extra = states[i].extra_evaluations + double.extra_evaluations
            states[i] = replace(double, extra_evaluations=extra)
        tied = [i for i, state in enumerate(states) if state.has_ties]
        segments = [group[i] for i in tied]
        doubles = _estimate_in_memory(evaluator_in, torch.float64, segments, crossings_only)
        for i, double in zip(tied, doubles, strict=True):
            states[i].crossings, states[i].values = double.crossings, double.values
            states[i].extra_evaluations += double.extra_evaluations + COST_PROBE_STEPS + 1
        if tied:
            # Further values are computed in single precision, which is sufficient.
            evaluator = evaluator_in(first_dtype)
            integrate = functools.partial(_integrate, [states[i] for i in tied], options, evaluator)
            _, evaluator.batch_points = halve_on_oom(
                integrate, evaluator.batch_points, evaluator.device
            )
        for state in states:
            yield None if state.is_exact else state.estimate(tolerance)


def _estimate_in_memory(
    evaluator_in: Callable[[torch.dtype], Evaluator],
    dtype: torch.dtype,
    segments: Sequence[Segment],
    options: _EstimateOptions,
) -> list[_SegmentState]:
    """Estimate segments in batches, which are halved on out-of-memory."""
    if not segments:
        return []
    evaluator = evaluator_in(dtype)
    before = evaluator.batch_points

    def attempt(points: int) -> list[_SegmentState]:
        evaluator.batch_points = points
        size = max(1, evaluator.batch_segments * points // before)
        states = []
        for first in range(0, len(segments), size):
            batch = segments[first : first + size]
            states += _estimate(evaluator, evaluator_in, batch, options)
        return states

    with torch_threads(evaluator.threads):
        states, evaluator.batch_points = halve_on_oom(attempt, before, evaluator.device)
    evaluator.batch_segments = max(1, evaluator.batch_segments * evaluator.batch_points // before)
    return states


@torch.inference_mode()
def _estimate(
    evaluator: Evaluator,
    evaluator_in: Callable[[torch.dtype], Evaluator],
    segments: Sequence[Segment],
    options: _EstimateOptions,
) -> list[_SegmentState]:
    """Halve the grids of segments until their boundary counts are known, then integrate."""
    states = []
    for segment in segments:
        start, end = (x.to(evaluator.dtype) for x in segment)
        rounding = evaluator.piecewise.measure_rounding(torch.lerp(start, end, 0.5)[None])
        states.append(_SegmentState(evaluator, (start, end), rounding))
    _CrossingCounter(evaluator, evaluator_in, states, options).run()
    if not options.counts:
        for state in states:
            state.crossings = None
    if options.integrates:
        finished = [s for s in states if not (s.is_exact or s.is_imprecise or s.has_ties)]
        _integrate(finished, options, evaluator, evaluator.batch_points)
    return states


class _CrossingCounter:
    """Counts crossings on grids that are halved until the counts are known.

    `_active` are the segments that need finer grids, in the order of the group.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        evaluator_in: Callable[[torch.dtype], Evaluator],
        states: Sequence[_SegmentState],
        options: _EstimateOptions,
    ) -> None:
        self._evaluator = evaluator
        self._options = options
        self._active = list(states)
        self._group = GridGroup(
            evaluator,
            [state.segment for state in states],
            [state.rounding for state in states],
            functools.partial(evaluator_in, torch.float64),
        )
        kinds = {type(pieces) for pieces in evaluator.piecewise.pieces.values()}
        self._paired_fraction = RANKED_FRACTION if Ranks in kinds else PAIRED_FRACTION
        is_single = evaluator.dtype == torch.float32
        self._miscounted = MISCOUNTED_CROSSINGS if is_single or MaxGroups in kinds else 0.0

    def run(self) -> None:
        """Halve the grids until each segment's count is known or needs another method."""
        self._group.begin()
        while self._active:
            self._group.halve()
            is_probe = self._group.steps == COST_PROBE_STEPS
            is_last = self._is_finest()
            if is_probe and is_last and self._options.counts:
                self._exclude_copies()
            is_last = is_last or (is_probe and not self._options.counts)
            self._update(is_last)
            unfinished = [
                i for i, state in enumerate(self._active) if not self._is_finished(state, is_last)
            ]
            if is_last:
                return
            self._keep(unfinished)
            if is_probe and self._active:
                self._prepare_fine_grids()

    def _is_finest(self) -> bool:
        """Return True if the limits on evaluations and memory exclude finer grids."""
        group = self._group
        if 2 * group.steps + 1 + CHECK_PLACES > self._options.evaluations:
            return True
        return 2 * group.pattern_bytes * 2 > self._evaluator.budget / 2

    def _update(self, is_last: bool) -> None:
        """Estimate the crossings on the current grid, and evaluate doubtful ones again."""
        group = self._group
        estimates = self._estimate_crossings()
        doubtful = self._doubtful_segments(estimates, is_last)
        if doubtful:
            group.look_again(doubtful)
            estimates = self._estimate_crossings()
        for i in doubtful:
            # Single precision can't tell if members of a window are equal at a node.
            is_known = estimates[i].is_resolved(self._options.tolerance)
            if self._options.may_be_imprecise and group.doubtful[i] and not is_known:
                self._active[i].has_ties = True
                self._active[i].extra_evaluations += group.steps - COST_PROBE_STEPS
        for i, state in enumerate(self._active):
            state.extra_evaluations += int(group.evaluated_again[i])
            state.crossings = estimates[i]
            state.values = group.values[i]

    def _estimate_crossings(self) -> list[CrossingEstimate]:
        # Counting requires no other transfer from the device.
        counts, undecided = self._group.counts()
        return [
            CrossingEstimate.of(
                counts[:, i], undecided[i], self._miscounted, repeated, self._paired_fraction
            )
            for i, repeated in enumerate(self._group.doubtful.tolist())
        ]

    def _doubtful_segments(self, estimates: Sequence[CrossingEstimate], is_last: bool) -> list[int]:
        """Return the segments whose doubtful crossings decide whether the count is known."""
        if self._group.steps < MIN_STEPS:
            return []
        doubtful = []
        for i, count in enumerate(self._group.doubtful.tolist()):
            if count > 0 and (is_last or estimates[i].is_resolved(self._options.tolerance, count)):
                doubtful.append(i)
        return doubtful

    def _is_finished(self, state: _SegmentState, is_last: bool) -> bool:
        """Return True if a segment needs no finer grid, or another method."""
        assert state.crossings is not None
        steps = self._group.steps
        if state.has_ties:
            return True
        if steps == COST_PROBE_STEPS and _needs_other_method(state, self._options):
            return True
        if steps < MIN_STEPS:
            return False
        tolerance = self._options.tolerance
        is_settled = steps >= PAIR_SEARCH_STEPS or state.crossings.is_settled(tolerance)
        return is_last or (is_settled and state.crossings.is_resolved(tolerance))

    def _keep(self, indices: Sequence[int]) -> None:
        """Keep some of the active segments."""
        if 0 < len(indices) < len(self._active):
            self._group.select(indices)
        self._active = [self._active[i] for i in indices]

    def _prepare_fine_grids(self) -> None:
        """Exclude copies, and mark segments with coincident crossings."""
        options = self._options
        if options.expects_ties and options.may_be_imprecise:
            for state in self._active:
                state.has_ties = True
            self._active = []
            return
        self._exclude_copies()
        if not self._evaluator.piecewise.may_coincide:
            return
        have_ties = self._group.compare_crossings()
        for state, has_ties in zip(self._active, have_ties, strict=True):
            state.extra_evaluations += self._group.steps + 1
            # The comparison requires positions that single precision can't resolve.
            state.has_ties = has_ties and options.may_be_imprecise
        self._keep([i for i, state in enumerate(self._active) if not state.has_ties])

    def _exclude_copies(self) -> None:
        self._group.exclude_copies()
        # Both ends are evaluated again in double precision.
        ends = 0 if self._evaluator.dtype == torch.float64 else 2
        for state in self._active:
            state.extra_evaluations += len(COMPARED_STEPS) + ends


def _needs_other_method(state: _SegmentState, options: _EstimateOptions) -> bool:
    """Return True if nine points show that a segment needs an exact trace or double precision."""
    assert state.crossings is not None
    state.is_exact = state.crossings.total + 1 <= options.budget
    if state.is_exact or not options.may_be_imprecise:
        return state.is_exact
    rounding = state.rounding_error()
    tolerance = options.tolerance
    deviation = DeviationEstimate.of(state.values, None).parts.total
    lost = float(torch.linalg.vector_norm(rounding))
    loses_crossings = 2 * state.crossings.fixed > tolerance * state.crossings.total
    if (options.counts and loses_crossings) or lost > tolerance * float(
        torch.linalg.vector_norm(deviation)
    ) / 2:
        state.is_imprecise = True
        state.extra_evaluations += COST_PROBE_STEPS + 1
    return state.is_imprecise


@torch.inference_mode()
def _integrate(
    states: Sequence[_SegmentState],
    options: _EstimateOptions,
    evaluator: Evaluator,
    batch_points: int,
) -> None:
    """Halve grids until the distances to the chord are accurate enough."""
    evaluator.batch_points = batch_points
    if not states:
        return
    all_checks = evaluator.outputs([s.segment for s in states], [check_places()] * len(states))
    unfinished = list(zip(states, all_checks, strict=True))
    while unfinished:
        inaccurate = []
        for state, checks in unfinished:
            state.grid_steps = len(state.values) - 1
            is_last = 2 * state.grid_steps + 1 + CHECK_PLACES > options.evaluations
            if not state.integrate(checks, options.tolerance, is_last) and not is_last:
                inaccurate.append((state, checks))
        unfinished = inaccurate
        if unfinished:
            chosen = [state for state, _ in unfinished]
            counts = [len(state.values) - 1 for state in chosen]
            middles = [(2 * torch.arange(n, dtype=torch.float64) + 1) / (2 * n) for n in counts]
            values = evaluator.outputs([state.segment for state in chosen], middles)
            for state, middle in zip(chosen, values, strict=True):
                state.values = interleave(state.values[None], middle[None])[0]
