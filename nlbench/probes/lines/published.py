"""Published methods for finding breakpoints, adaptive and by sampling, to compare with `exact`.

`trace_adaptively` steps from one breakpoint to the next. At a point inside a region, one pass of
forward-mode differentiation computes the value of every unit and its rate of change. The smallest
displacement at which a unit's margin reaches zero gives the next breakpoint. The next point lies
past it by the sensitivity. `trace_by_sampling` compares activation patterns at uniform steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nlbench.errors import NotFinite
from nlbench.probes.function.derivatives import dual

from .recording.point_memory import PointMemory, measure_point_memory, share_out
from .recording.program import Program, ProgramStep, run_program, walk_measured
from .rules.pieces import Kinks, MaxGroups, Ranks, changes
from .rules.rounding import peak, tolerance_factor
from .rules.rule import OutputFunction
from .segments import points_at, segment_lengths
from .trace import SegmentTrace

Tensors = Sequence[Tensor]

BATCH_SEGMENTS = 64
"""Number of segments traced concurrently, enough for an efficient forward pass."""
COINCIDENT_T = 1e-12
"""Distance in t below which breakpoints are merged."""
TENSORS_PER_VALUE = 3
"""Number of live tensors per value at a point: the value, its rate, and one being computed."""


@dataclass
class _Walk:
    """A segment (2, *input) being traced: the position, and the breakpoints found so far."""

    ends: Tensor
    t: float = 0.0
    breakpoints: list[float] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    passed: int = 0

    @property
    def is_active(self) -> bool:
        return not self.breakpoints or self.breakpoints[-1] < 1


_Margin = tuple[Tensor, Tensor, Tensor]
"""Distances of units (P, ...) from their kinks, their rates of change with t, and tolerances below
which they count as zero, broadcastable to the distances."""
_Motion = tuple[Tensor, Tensor, list[_Margin]]
"""Values and rates (P, ...) of a step's output at moving points, and its units' margins."""


def trace_adaptively(
    program: Program,
    points: Tensor,
    *,
    sensitivity: float = 1e-6,
    memory: int | None = None,
    needs: PointMemory | None = None,
) -> Iterator[SegmentTrace]:
    """Trace a recorded program along segments (n, 2, *input), as many at a time as fit.

    See `trace_segment`. The next search begins `sensitivity`, a fraction of the segment, past a
    breakpoint.

    Each trace reports its ``sensitivity`` and, as ``shorter_than_sensitivity``, the number of
    boundaries that were crossed in the same step as another, so that the regions in between were
    missed. They are counted by extrapolating back from the next point. If the count is positive,
    some were missed. It is exact if a step skips one boundary and an estimate if it skips several.

    References
    ----------
    Gamba et al., "Are All Linear Regions Created Equal?", AISTATS 2022, appendix C.
    """
    needs = needs or measure_point_memory(program, points[0])
    _, size = share_out(needs.times(TENSORS_PER_VALUE), points.device, memory, BATCH_SEGMENTS)
    for batch in torch.split(points, size):
        walks = [_Walk(ends) for ends in batch]
        active = walks
        while active:
            _step(program, active, sensitivity)
            active = [walk for walk in active if walk.is_active]
        for walk, length in zip(walks, segment_lengths(batch[:, 0], batch[:, 1]), strict=True):
            yield _trace(walk, length, program, sensitivity)


def _step(program: Program, walks: Sequence[_Walk], sensitivity: float) -> None:
    """Advance each walk past its next breakpoint."""
    # Forward-mode differentiation doesn't work in inference mode, which the caller may have set.
    with torch.inference_mode(False), torch.no_grad():
        starts, ends = torch.stack([walk.ends for walk in walks], 1)
        rates = ends - starts
        t = torch.tensor([walk.t for walk in walks], dtype=torch.float64, device=starts.device)
        last = [walk.breakpoints[-1] if walk.breakpoints else 0.0 for walk in walks]
        since_last = t - torch.tensor(last, dtype=torch.float64, device=starts.device)
        here, rate, ahead, sites, passed_counts = _look_ahead(program, starts, rates, t, since_last)
        if not torch.isfinite(here).all():
            raise NotFinite("the network's output is not finite on the segment")
        remaining = 1 - t
        is_last = ahead >= remaining - COINCIDENT_T
        ahead = torch.where(is_last, remaining, ahead)
        rows = zip(
            walks,
            torch.where(is_last, 1.0, t + ahead).tolist(),
            (here + ahead[:, None] * rate).cpu(),
            torch.where(is_last, -1, sites).tolist(),
            passed_counts.tolist(),
            here.cpu(),
            strict=True,
        )
    for walk, place, value, site, passed, first in rows:
        if not walk.breakpoints:
            walk.breakpoints = [0.0]
            walk.values = [first]
            walk.origins = [-1]
        walk.passed += passed
        if place - walk.breakpoints[-1] > COINCIDENT_T or place == 1:
            walk.breakpoints.append(place)
            walk.values.append(value)
            walk.origins.append(site)
        walk.t = place + min(sensitivity, (1 - place) / 2)


def _look_ahead(
    program: Program, starts: Tensor, slopes: Tensor, t: Tensor, since_last: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Find the next breakpoint on each segment from the values and rates at one of its points.

    `since_last` (P,) is each point's distance from the last breakpoint. Return the outputs and
    their rates (P, k), the displacement to the next breakpoint (infinite if there is none), the
    index of the site that causes it, and the number of breakpoints since the last recorded one.
    """
    weight = t.reshape(-1, *[1] * (starts.ndim - 1)).to(starts.dtype)
    # Values, rates of change and the error bounds of both. Rounding errors at both ends contribute
    # at every point in between.
    bound = peak(starts) + peak(slopes)
    moving = {0: (starts + weight * slopes, slopes, bound, peak(slopes))}
    ahead = torch.full_like(t, torch.inf)
    site = torch.full_like(t, -1, dtype=torch.int64)
    crossed: list[tuple[Tensor, Tensor]] = []
    for step in program.steps:
        inputs, rates, bounds, rate_bounds = zip(*(moving[i] for i in step.inputs), strict=True)
        value, rate, margins = _move(step, inputs, rates, bounds, rate_bounds)
        for margin in margins:
            nearest, between = _find_zeros(*margin, since_last)
            site = torch.where(nearest < ahead - COINCIDENT_T, program.sites.index(step.site), site)
            ahead = torch.minimum(ahead, nearest)
            crossed.append(between)
        bound = step.rule.bound(inputs, bounds, value)
        moving[step.output] = value, rate, bound, step.rule.bound(rates, rate_bounds, rate)
        for index in step.ends:
            del moving[index]
    count = len(t)
    value, rate = (x.reshape(count, -1).double() for x in moving[program.output][:2])
    return value, rate, ahead, site, _count_distinct(crossed, count, t.device)


def _move(
    step: ProgramStep, inputs: Tensors, rates: Tensors, bounds: Tensors, rate_bounds: Tensors
) -> _Motion:
    """Apply a step to moving points, given error bounds for their values and rates.

    A unit on a kink counts as being on the side that it is moving to.
    """
    pieces = step.rule.pieces
    if isinstance(pieces, Kinks):
        return _move_kinks(step.rule.apply, pieces, inputs, rates, bounds, rate_bounds)
    if isinstance(pieces, MaxGroups):
        return _move_maxima(pieces, inputs, rates, bounds)
    if isinstance(pieces, Ranks):
        return _move_ranks(pieces, inputs, rates, bounds)
    if step.rule.pieces is not None:
        raise step.refusal("its breakpoints can't be predicted from a point")
    return *_jvp(step.rule.apply, inputs, rates), []


def _move_kinks(
    apply: OutputFunction,
    kinks: Kinks,
    inputs: Tensors,
    rates: Tensors,
    bounds: Tensors,
    rate_bounds: Tensors,
) -> _Motion:
    def shift(tensors: Tensors, change: Tensor) -> Tensors:
        # The margin depends on the first input with slope 1 or -1, or 0 where there is no kink.
        return [tensors[0] + slope * change, *tensors[1:]]

    basis = [torch.ones_like(inputs[0]), *map(torch.zeros_like, inputs[1:])]
    _, slope = _jvp(kinks.value, inputs, basis)
    _, speed = _jvp(kinks.value, inputs, rates)
    margins: list[_Margin] = []
    for value, tolerance, speed_tolerance in zip(
        kinks.distances(inputs),
        kinks.tolerances(inputs, bounds),
        kinks.tolerances(rates, rate_bounds),
        strict=True,
    ):
        margins.append((value, speed, tolerance))
        # A unit stays on its kink if its margin and its speed are within rounding error.
        near = value.abs() <= tolerance
        still = near & (speed.abs() <= tolerance + speed_tolerance)
        # The smallest step off the kink; later layers treat it as a rounding error.
        floats = torch.finfo(value.dtype)
        smallest = tolerance * 2**-30 + 4 * floats.eps * inputs[0].abs() + floats.tiny
        target = torch.where(still, 0.0, speed.sign() * smallest)
        inputs = shift(inputs, torch.where(near, target - value, 0.0))
        rates = shift(rates, torch.where(still, -speed, 0.0))
    return *_jvp(apply, inputs, rates), margins


def _move_maxima(groups: MaxGroups, inputs: Tensors, rates: Tensors, bounds: Tensors) -> _Motion:
    tied, members, tolerance = groups.tied(inputs, bounds)
    speeds = groups.members(rates)
    # Among tied members, the one that rises fastest is the maximum.
    first = speeds.masked_fill(~tied, -math.inf).argmax(-1, keepdim=True)
    value = members.gather(-1, first)
    speed = speeds.gather(-1, first)
    lead = value - members, speed - speeds, tolerance
    return groups.output(value.squeeze(-1)), groups.output(speed.squeeze(-1)), [lead]


def _move_ranks(ranks: Ranks, inputs: Tensors, rates: Tensors, bounds: Tensors) -> _Motion:
    x = ranks.groups(inputs)
    rate = ranks.groups(rates)
    error = ranks.groups([b.expand_as(value) for b, value in zip(bounds, inputs, strict=True)])
    error = tolerance_factor(x.dtype) * error
    # Among values that are equal up to rounding, the one that rises fastest ranks first.
    largest = rate.abs().amax(-1, keepdim=True)
    ahead = x + rate / torch.where(largest > 0, largest, 1) * error.amax(-1, keepdim=True)
    ranked = ahead.argsort(dim=-1, descending=True, stable=True)[..., ranks.ranks]
    value = x.gather(-1, ranked)
    speed = rate.gather(-1, ranked)
    margin = (
        value[..., None] - x[..., None, :],
        speed[..., None] - rate[..., None, :],
        torch.hypot(error.gather(-1, ranked)[..., None], error[..., None, :]),
    )
    return ranks.output(value), ranks.output(speed), [margin]


def _jvp(apply: OutputFunction, values: Tensors, rates: Tensors) -> tuple[Tensor, Tensor]:
    """Compute an operation's value and rate by forward-mode differentiation."""
    with forward_ad.dual_level():
        result = apply(list(map(dual, values, rates)))
        value, rate = forward_ad.unpack_dual(result)  # type: ignore[no-untyped-call]
    # A constant has no tangent.
    return value, torch.zeros_like(value) if rate is None else rate


def _find_zeros(
    value: Tensor, rate: Tensor, tolerance: Tensor, since_last: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the displacement (P,) to the next zero of a margin, and the zeros just passed.

    The latter are row indices and distances of zeros between the last breakpoint and the point.
    """
    count = len(since_last)
    tolerance = tolerance.expand_as(value).reshape(count, -1)
    value = value.reshape(count, -1)
    rate = rate.reshape(count, -1)
    distances = (value.double() / rate.double()).nan_to_num(torch.inf, torch.inf, -torch.inf)
    known = value.abs() > tolerance
    forward = torch.where(known & (distances < 0), -distances, torch.inf)
    nearest = forward.amin(1) if forward.shape[1] else torch.full_like(since_last, torch.inf)
    # The position of a unit's zero is uncertain by tolerance / rate.
    row, unit = (known & (distances > 0) & (distances < since_last[:, None])).nonzero().unbind(1)
    passed = distances[row, unit]
    uncertainty = 2 * tolerance[row, unit].double() / rate[row, unit].double().abs()
    is_distinct = since_last[row] - passed > COINCIDENT_T + uncertainty
    return nearest, (row[is_distinct], passed[is_distinct])


def _count_distinct(
    passed: Sequence[tuple[Tensor, Tensor]], count: int, device: torch.device
) -> Tensor:
    """Count the distinct distances in each row: (P,)."""
    if not passed:
        return torch.zeros(count, dtype=torch.int64, device=device)
    row = torch.cat([row for row, _ in passed])
    distances = torch.cat([part for _, part in passed])
    order = distances.argsort()
    order = order[row[order].argsort(stable=True)]
    row = row[order]
    distances = distances[order]
    new = torch.ones_like(row, dtype=torch.bool)
    new[1:] = (row.diff() > 0) | (distances.diff() > COINCIDENT_T)
    return torch.bincount(row[new], minlength=count)


def _trace(walk: _Walk, length: float, program: Program, sensitivity: float) -> SegmentTrace:
    device = walk.ends.device
    return SegmentTrace(
        torch.tensor(walk.breakpoints, dtype=torch.float64, device=device),
        torch.stack(walk.values).to(device),
        length,
        torch.tensor(walk.origins, device=device),
        program.sites,
        "adaptive",
        {"sensitivity": sensitivity, "shorter_than_sensitivity": float(walk.passed)},
        torch.finfo(walk.ends.dtype).eps,
    )


ROUNDING_SAMPLES = 17
"""Number of samples on a segment at which rounding errors are measured."""
PERTURBED_COPIES = 2
"""Number of copies of each of these samples with perturbed last digits."""


def trace_by_sampling(
    program: Program,
    points: Tensor,
    *,
    resolution: int = 1000,
    memory: int | None = None,
    needs: PointMemory | None = None,
) -> Iterator[SegmentTrace]:
    """Sample a recorded program along segments.

    A breakpoint is placed midway between neighbouring samples whose patterns differ; several
    boundaries in one step count as one. Regions are convex, so no pattern recurs, and each distinct
    pattern is one region. Each trace reports its ``resolution``. See `trace_segment`.

    The rounding errors that determine whether a unit's side of its kink is known are measured by
    perturbing the last digits of a few samples (see `walk_measured`). The other two methods
    estimate them, so a wrong estimate shows up as a difference from this method.
    """
    needs = needs or measure_point_memory(program, points[0])
    # Number of samples per forward pass, enough to make it efficient.
    _, size = share_out(needs, points.device, memory, 64, needed=3)
    for (start, end), length in zip(
        points, segment_lengths(points[:, 0], points[:, 1]), strict=True
    ):
        yield _sample(program, start, end, length, resolution, size)


def _sample(
    program: Program, start: Tensor, end: Tensor, length: float, resolution: int, size: int
) -> SegmentTrace:
    breakpoints = []
    sites = []
    errors = _measure_errors(program, start, end, size)
    # A batch repeats the last two samples of the previous one, since a sample may be on a boundary.
    for first in range(0, resolution, size - 2):
        last = min(first + size - 2, resolution)
        before = min(first, 1)
        t = torch.arange(first - before, last + 1, dtype=torch.float64, device=start.device)
        _, site = _compare_samples(program, points_at(start, end, t / resolution), errors)
        interval = (site[before:] >= 0).nonzero().squeeze(1)
        breakpoints.append((interval + first + 0.5) / resolution)
        sites.append(site[before:][interval])
    inside = torch.cat(breakpoints).double()
    ends = inside.new_tensor([0.0, 1.0])
    t = torch.cat([ends[:1], inside, ends[1:]])
    no_site = torch.full((1,), -1, device=start.device)
    values = [
        _compare_samples(program, points_at(start, end, part), errors)[0]
        for part in torch.split(t, size)
    ]
    return SegmentTrace(
        t,
        torch.cat(values).double(),
        length,
        torch.cat([no_site, *sites, no_site]),
        program.sites,
        "sampling",
        {"resolution": float(resolution)},
        torch.finfo(start.dtype).eps,
    )


def _measure_errors(
    program: Program, start: Tensor, end: Tensor, size: int
) -> dict[int, list[Tensor]]:
    """Measure the input errors of each step with kinks, one per unit or channel."""
    errors: dict[int, list[Tensor]] = {}
    places = torch.linspace(0, 1, ROUNDING_SAMPLES, dtype=torch.float64, device=start.device)
    with torch.no_grad():
        for part in torch.split(places, max(1, size // (PERTURBED_COPIES + 1))):
            for walked in walk_measured(program, points_at(start, end, part), PERTURBED_COPIES):
                if walked.step.rule.pieces is not None:
                    measured = [2 * bound[:1] for bound in walked.bounds]
                    largest = errors.get(walked.step.output, measured)
                    errors[walked.step.output] = list(map(torch.maximum, largest, measured))
    return errors


def _compare_samples(
    program: Program, inputs: Tensor, errors: dict[int, list[Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return outputs (P, k) and the first site to change after each sample, or -1, (P - 1,)."""
    site = torch.full((len(inputs) - 1,), -1, device=inputs.device)

    def compare(step: ProgramStep, x: Tensors) -> None:
        if step.rule.pieces is not None and len(site):
            error = [e.expand(len(inputs), *e.shape[1:]) for e in errors[step.output]]
            is_first = (site < 0) & changes(step.rule.pieces, x, error)
            site.masked_fill_(is_first, program.sites.index(step.site))

    with torch.no_grad():
        output = run_program(program, inputs, compare).reshape(len(inputs), -1)
    if not torch.isfinite(output).all():
        raise NotFinite("the network's output is not finite on the segment")
    return output, site
