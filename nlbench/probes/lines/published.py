"""The published ways to find breakpoints, for comparison with `exact`: adaptive and by sampling.

`trace_adaptively` steps from one breakpoint to the next. At a point inside a region one pass
carries value and rate of every unit (forward-mode differentiation). The smallest displacement at
which a unit's margin becomes zero is the next breakpoint. The next point lies behind it by the
sensitivity. `trace_by_sampling` compares activation patterns at uniform steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nlbench.errors import NotFinite
from nlbench.probes.function.derivatives import dual

from .recording.point_memory import PointMemory, measure_point_memory, share_out
from .recording.program import Program, Step, run_program, walk_measured
from .rules.pieces import Kinks, Leaders, Ranks, changes
from .rules.rounding import noise_of, peak
from .rules.rule import Apply
from .segments import Segment, points_at, segment_length
from .trace import SegmentTrace

__all__ = ["trace_adaptively", "trace_by_sampling"]

Tensors = Sequence[Tensor]

BATCH_SEGMENTS = 64
"""Segments walked side by side: enough to keep a forward pass busy."""
COINCIDENT_T = 1e-12
"""Breakpoints closer than this in t are one."""
TENSORS_PER_VALUE = 3
"""Tensors alive for each value at a point: the value, its rate, and one being computed."""


@dataclass
class _Walk:
    """A segment under way: its position and the breakpoints so far."""

    index: int
    start: Tensor
    end: Tensor
    t: float = 0.0
    breakpoints: list[float] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    passed: int = 0


@dataclass(frozen=True)
class _Lookahead:
    """The view from P points: outputs and their rates (P, k), and the next breakpoint.

    `ahead` (P,) is the displacement to the next breakpoint, infinite if there is none, and
    `site` (P,) the site that makes it; `passed` (P,) counts those between the last breakpoint
    and the point.
    """

    value: Tensor
    rate: Tensor
    ahead: Tensor
    site: Tensor
    passed: Tensor


@dataclass(frozen=True)
class _Margin:
    """The distance of units from their kinks, at points that move.

    Parameters
    ----------
    value, rate : tensor of shape (P, ...)
        The margin, and its change as t grows by 1.
    noise : tensor of shape (P, ...), each axis of full size or 1
        Magnitude up to which the value may be zero.
    """

    value: Tensor
    rate: Tensor
    noise: Tensor


@dataclass(frozen=True)
class _Front:
    """Value and rate (P, ...) of a step's output at points that move, and its units' margins."""

    value: Tensor
    rate: Tensor
    margins: Sequence[_Margin] = ()


def trace_adaptively(
    program: Program,
    segments: Iterable[Segment],
    *,
    sensitivity: float = 1e-6,
    memory: int | None = None,
    batch_segments: int = BATCH_SEGMENTS,
    needs: PointMemory | None = None,
) -> Iterator[SegmentTrace]:
    """Trace a recorded program on one segment after another; see `trace_segment`.

    Each trace notes its ``sensitivity`` and, as ``shorter_than_sensitivity``, how many
    boundaries were crossed together with another: the regions before them are left out.
    They are counted by looking back along the rates behind them. A positive count is certain,
    and exact if it is one; of several in one step it is an estimate.

    Parameters
    ----------
    program : nlbench.probes.lines.recording.program.Program
    segments : iterable of (start, end), tensors of shape (*input)
    sensitivity : float
        How far behind a breakpoint the next search begins, as a share of the segment.
    memory : int, optional
        Memory limit in bytes; by default half of what is free.
    batch_segments : int
        Most segments walked side by side.
    needs : PointMemory, optional
        Memory of a point, if it was measured before.

    Yields
    ------
    SegmentTrace
        In the order of the segments.

    References
    ----------
    Gamba et al., "Are All Linear Regions Created Equal?", AISTATS 2022, appendix C.
    """
    waiting = iter(segments)
    first = next(waiting, None)
    if first is None:
        return
    numbered = enumerate(itertools.chain([first], waiting))
    needs = needs or measure_point_memory(program, torch.stack(first))
    _, size = share_out(needs.times(TENSORS_PER_VALUE), first[0].device, memory, batch_segments)
    walks: list[_Walk] = []
    finished: dict[int, SegmentTrace] = {}
    following = 0
    while True:
        # Bounds the finished traces that wait for an earlier one.
        room = min(size - len(walks), 2 * size - len(walks) - len(finished))
        walks += [_Walk(i, a, b) for i, (a, b) in itertools.islice(numbered, max(0, room))]
        if not walks:
            break
        _step(program, walks, sensitivity)
        for walk in walks:
            if walk.breakpoints and walk.breakpoints[-1] == 1:
                finished[walk.index] = _trace(walk, program, sensitivity)
        walks = [walk for walk in walks if walk.index not in finished]
        while following in finished:
            yield finished.pop(following)
            following += 1


def _step(program: Program, walks: Sequence[_Walk], sensitivity: float) -> None:
    """Take each walk to its next breakpoint, and across."""
    # Forward-mode differentiation doesn't work in inference mode, which may be the caller's.
    with torch.inference_mode(False), torch.no_grad():
        starts = torch.stack([walk.start for walk in walks])
        rates = torch.stack([walk.end for walk in walks]) - starts
        t = torch.tensor([walk.t for walk in walks], dtype=torch.float64, device=starts.device)
        last = [walk.breakpoints[-1] if walk.breakpoints else 0.0 for walk in walks]
        behind = t - torch.tensor(last, dtype=torch.float64, device=starts.device)
        view = _look(program, starts, rates, t, behind)
        if not torch.isfinite(view.value).all():
            raise NotFinite("the network's output is not finite on the segment")
        left = 1 - t
        is_last = view.ahead >= left - COINCIDENT_T
        ahead = torch.where(is_last, left, view.ahead)
        here = view.value.double()
        rows = zip(
            walks,
            torch.where(is_last, 1.0, t + ahead).tolist(),
            (here + ahead[:, None] * view.rate.double()).cpu(),
            torch.where(is_last, -1, view.site).tolist(),
            view.passed.tolist(),
            here.cpu(),
            strict=True,
        )
    for walk, place, value, site, passed, first in rows:
        if not walk.breakpoints:
            walk.breakpoints, walk.values, walk.origins = [0.0], [first], [-1]
        walk.passed += passed
        if place - walk.breakpoints[-1] > COINCIDENT_T or place == 1:
            walk.breakpoints.append(place)
            walk.values.append(value)
            walk.origins.append(site)
        walk.t = place + min(sensitivity, (1 - place) / 2)


def _look(program: Program, starts: Tensor, rates: Tensor, t: Tensor, behind: Tensor) -> _Lookahead:
    """Carry values and rates at one point of each segment through the program.

    `behind` (P,) is the distance to the last breakpoint.
    """
    weight = t.reshape(-1, *[1] * (starts.ndim - 1)).to(starts.dtype)
    x = starts + weight * rates
    values, speeds = {0: x}, {0: rates}
    # The ends are rounded, wherever between them the point is.
    bounds, rests = {0: peak(starts) + peak(rates)}, {0: peak(rates)}
    ahead = torch.full_like(t, torch.inf)
    site = torch.full_like(t, -1, dtype=torch.int64)
    crossed: list[tuple[Tensor, Tensor]] = []
    for step in program.steps:
        inputs = [values[i] for i in step.inputs]
        moves = [speeds[i] for i in step.inputs]
        sizes = [bounds[i] for i in step.inputs]
        slow = [rests[i] for i in step.inputs]
        front = _front(step, inputs, moves, sizes, slow)
        for margin in front.margins:
            nearest, between = _zeros(margin, behind)
            site = torch.where(nearest < ahead - COINCIDENT_T, program.sites.index(step.site), site)
            ahead = torch.minimum(ahead, nearest)
            crossed.append(between)
        values[step.output], speeds[step.output] = front.value, front.rate
        bounds[step.output] = step.rule.bound(inputs, sizes, front.value)
        rests[step.output] = step.rule.bound(moves, slow, front.rate)
        for number in step.ends:
            del values[number], speeds[number], bounds[number], rests[number]
    count = len(t)
    return _Lookahead(
        values[program.output].reshape(count, -1),
        speeds[program.output].reshape(count, -1),
        ahead,
        site,
        _distinct(crossed, count, t.device),
    )


def _front(
    step: Step, inputs: Tensors, rates: Tensors, bounds: Tensors, rate_bounds: Tensors
) -> _Front:
    """Carry moving points through a step, from the bounds of their values and rates.

    A unit on a kink counts as on the side it is heading for.
    """
    pieces = step.rule.pieces
    if isinstance(pieces, Kinks):
        return _kinks_front(step.rule.apply, pieces, inputs, rates, bounds, rate_bounds)
    if isinstance(pieces, Leaders):
        return _leaders_front(pieces, inputs, rates, bounds)
    if isinstance(pieces, Ranks):
        return _ranks_front(pieces, inputs, rates, bounds)
    if step.rule.bend is not None:
        raise step.refusal("its breakpoints can't be predicted from a point")
    return _Front(*_pushed(step.rule.apply, inputs, rates))


def _kinks_front(
    apply: Apply,
    kinks: Kinks,
    inputs: Tensors,
    rates: Tensors,
    bounds: Tensors,
    rate_bounds: Tensors,
) -> _Front:
    def shift(tensors: Tensors, change: Tensor) -> Tensors:
        # The first input changes the margin: a slope of 1, -1, or 0 where there is no kink.
        return [tensors[0] + slope * change, *tensors[1:]]

    basis = [torch.ones_like(inputs[0]), *map(torch.zeros_like, inputs[1:])]
    _, slope = _pushed(kinks.value, inputs, basis)
    _, speed = _pushed(kinks.value, inputs, rates)
    margins = []
    for value, noise, rest in zip(
        kinks.distances(inputs),
        kinks.noises(inputs, bounds),
        kinks.noises(rates, rate_bounds),
        strict=True,
    ):
        margins.append(_Margin(value, speed, noise))
        # A unit that stays on its kink is no more than rounding, and goes nowhere.
        near = value.abs() <= noise
        still = near & (speed.abs() <= noise + rest)
        # The smallest change of a number: to the next layers it is rounding.
        floats = torch.finfo(value.dtype)
        least = noise * 2**-30 + 4 * floats.eps * inputs[0].abs() + floats.tiny
        heading = torch.where(still, 0.0, speed.sign() * least)
        inputs = shift(inputs, torch.where(near, heading - value, 0.0))
        rates = shift(rates, torch.where(still, -speed, 0.0))
    return _Front(*_pushed(apply, inputs, rates), margins)


def _leaders_front(leaders: Leaders, inputs: Tensors, rates: Tensors, bounds: Tensors) -> _Front:
    tied, members, noise = leaders.tied(inputs, bounds)
    speeds = leaders.members(rates)
    # Of members that share the first place the one that rises fastest has it.
    first = speeds.masked_fill(~tied, -math.inf).argmax(-1, keepdim=True)
    value, speed = members.gather(-1, first), speeds.gather(-1, first)
    lead = _Margin(value - members, speed - speeds, noise)
    return _Front(leaders.output(value.squeeze(-1)), leaders.output(speed.squeeze(-1)), [lead])


def _ranks_front(ranks: Ranks, inputs: Tensors, rates: Tensors, bounds: Tensors) -> _Front:
    x, rate = ranks.lines(inputs), ranks.lines(rates)
    error = ranks.lines([b.expand_as(value) for b, value in zip(bounds, inputs, strict=True)])
    error = noise_of(x.dtype) * error
    # Of numbers that are equal but for rounding the one that rises fastest is first.
    most = rate.abs().amax(-1, keepdim=True)
    ahead = x + rate / torch.where(most > 0, most, 1) * error.amax(-1, keepdim=True)
    owner = ahead.argsort(dim=-1, descending=True, stable=True)[..., ranks.ranks]
    value, speed = x.gather(-1, owner), rate.gather(-1, owner)
    margin = _Margin(
        value[..., None] - x[..., None, :],
        speed[..., None] - rate[..., None, :],
        torch.hypot(error.gather(-1, owner)[..., None], error[..., None, :]),
    )
    return _Front(ranks.output(value), ranks.output(speed), [margin])


def _pushed(apply: Apply, values: Tensors, rates: Tensors) -> tuple[Tensor, Tensor]:
    """Carry values and rates through an operation, by forward-mode differentiation."""
    with forward_ad.dual_level():
        result = apply(list(map(dual, values, rates)))
        value, rate = forward_ad.unpack_dual(result)  # type: ignore[no-untyped-call]
    # A constant has no tangent.
    return value, torch.zeros_like(value) if rate is None else rate


def _zeros(margin: _Margin, behind: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the displacement (P,) to the next zero, and the zeros just behind.

    The latter are row and distance of those between the last breakpoint and the point.
    """
    count = len(behind)
    value, rate = margin.value.reshape(count, -1), margin.rate.reshape(count, -1)
    noise = margin.noise.expand_as(margin.value).reshape(count, -1)
    distances = (value.double() / rate.double()).nan_to_num(torch.inf, torch.inf, -torch.inf)
    known = value.abs() > noise
    forward = torch.where(known & (distances < 0), -distances, torch.inf)
    nearest = forward.amin(1) if forward.shape[1] else torch.full_like(behind, torch.inf)
    # The zero of a unit is known to its noise over its rate.
    row, unit = (known & (distances > 0) & (distances < behind[:, None])).nonzero().unbind(1)
    passed = distances[row, unit]
    blur = 2 * noise[row, unit].double() / rate[row, unit].double().abs()
    apart = behind[row] - passed > COINCIDENT_T + blur
    return nearest, (row[apart], passed[apart])


def _distinct(passed: Sequence[tuple[Tensor, Tensor]], count: int, device: torch.device) -> Tensor:
    """Count the distinct distances of each row: (P,)."""
    if not passed:
        return torch.zeros(count, dtype=torch.int64, device=device)
    row = torch.cat([row for row, _ in passed])
    distances = torch.cat([part for _, part in passed])
    order = distances.argsort()
    order = order[row[order].argsort(stable=True)]
    row, distances = row[order], distances[order]
    new = torch.ones_like(row, dtype=torch.bool)
    new[1:] = (row.diff() > 0) | (distances.diff() > COINCIDENT_T)
    return torch.bincount(row[new], minlength=count)


def _trace(walk: _Walk, program: Program, sensitivity: float) -> SegmentTrace:
    device = walk.start.device
    return SegmentTrace(
        torch.tensor(walk.breakpoints, dtype=torch.float64, device=device),
        torch.stack(walk.values).to(device),
        segment_length(walk.start, walk.end),
        torch.tensor(walk.origins, device=device),
        program.sites,
        "adaptive",
        {"sensitivity": sensitivity, "shorter_than_sensitivity": float(walk.passed)},
        torch.finfo(walk.start.dtype).eps,
    )


BATCH_SAMPLES = 64
"""Samples computed at once: enough to keep a forward pass busy."""
ROUNDING_SAMPLES = 17
"""Samples of a segment at which rounding errors are measured."""
PERTURBED_COPIES = 2
"""Copies of such a sample with other last digits."""


def trace_by_sampling(
    program: Program,
    segments: Iterable[Segment],
    *,
    resolution: int = 1000,
    memory: int | None = None,
    needs: PointMemory | None = None,
) -> Iterator[SegmentTrace]:
    """Sample a recorded program on one segment after another; see `trace_segment`.

    Where the pattern differs between neighbouring samples there is a breakpoint, put in
    the middle; several boundaries in one step are one. As regions are convex no pattern
    comes back, so that regions are the different patterns met. Each trace notes its
    ``resolution``.

    Units too close to a kink to decide are found by measuring rounding at a few samples, with
    random last digits (see `walk_measured`). The estimates of the other two methods are not used,
    so that an error of theirs shows here.

    Parameters
    ----------
    program : nlbench.probes.lines.recording.program.Program
    segments : iterable of (start, end), tensors of shape (*input)
    resolution : int
        Number of steps.
    memory : int, optional
        Memory limit in bytes; by default half of what is free.
    needs : PointMemory, optional
        Memory of a point, if it was measured before.

    Yields
    ------
    SegmentTrace
        In the order of the segments.
    """
    size = 0
    for start, end in segments:
        if not size:
            needs = needs or measure_point_memory(program, torch.stack([start, end]))
            _, size = share_out(needs, start.device, memory, BATCH_SAMPLES, needed=3)
        yield _sampled(program, start, end, resolution, size)


def _sampled(
    program: Program, start: Tensor, end: Tensor, resolution: int, size: int
) -> SegmentTrace:
    breakpoints, sites = [], []
    errors = _measured_errors(program, start, end, size)
    # A batch begins with two samples of the one before, as a sample may lie on a boundary.
    for first in range(0, resolution, size - 2):
        last = min(first + size - 2, resolution)
        before = min(first, 1)
        t = torch.arange(first - before, last + 1, dtype=torch.float64, device=start.device)
        _, site = _compared(program, points_at(start, end, t / resolution), errors)
        interval = (site[before:] >= 0).nonzero().squeeze(1)
        breakpoints.append((interval + first + 0.5) / resolution)
        sites.append(site[before:][interval])
    inside = torch.cat(breakpoints).double()
    ends = inside.new_tensor([0.0, 1.0])
    t = torch.cat([ends[:1], inside, ends[1:]])
    none = torch.full((1,), -1, device=start.device)
    values = [
        _compared(program, points_at(start, end, part), errors)[0] for part in torch.split(t, size)
    ]
    return SegmentTrace(
        t,
        torch.cat(values).double(),
        segment_length(start, end),
        torch.cat([none, *sites, none]),
        program.sites,
        "sampling",
        {"resolution": float(resolution)},
        torch.finfo(start.dtype).eps,
    )


def _measured_errors(
    program: Program, start: Tensor, end: Tensor, size: int
) -> dict[int, list[Tensor]]:
    """Measure the input errors of each step that bends, one number a unit or channel."""
    errors: dict[int, list[Tensor]] = {}
    places = torch.linspace(0, 1, ROUNDING_SAMPLES, dtype=torch.float64, device=start.device)
    with torch.no_grad():
        for part in torch.split(places, max(1, size // (PERTURBED_COPIES + 1))):
            for seen in walk_measured(program, points_at(start, end, part), PERTURBED_COPIES):
                if seen.step.rule.pieces is not None:
                    measured = [2 * bound[:1] for bound in seen.bounds]
                    largest = errors.get(seen.step.output, measured)
                    errors[seen.step.output] = list(map(torch.maximum, largest, measured))
    return errors


def _compared(
    program: Program, inputs: Tensor, errors: dict[int, list[Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return outputs (P, k), and the first site that changes after each sample (P - 1,), or -1."""
    site = torch.full((len(inputs) - 1,), -1, device=inputs.device)

    def look(step: Step, x: Tensors) -> None:
        if step.rule.pieces is not None and len(site):
            error = [e.expand(len(inputs), *e.shape[1:]) for e in errors[step.output]]
            is_first = (site < 0) & changes(step.rule.pieces, x, error)
            site.masked_fill_(is_first, program.sites.index(step.site))

    with torch.no_grad():
        output = run_program(program, inputs, look).reshape(len(inputs), -1)
    if not torch.isfinite(output).all():
        raise NotFinite("the network's output is not finite on the segment")
    return output, site
