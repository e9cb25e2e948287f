"""Step along segments from one breakpoint to the next.

At a point inside a region one pass carries value and rate of every unit (forward-mode
differentiation). The smallest displacement at which a unit's margin becomes zero is the
next breakpoint; the next point lies behind it by the sensitivity. Memory is constant, and
what is passed over in crossing is counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nlbench.errors import NotFinite
from nlbench.introspection.memory import PointMemory, share_out

from .recording.program import Program, Step, point_memory_of, run_program, walk_measured
from .rules.kinks import pushed
from .rules.rule import Margin, changes, peak
from .trace import SegmentTrace, distance, points_at

__all__ = ["trace_adaptively", "trace_by_sampling"]


POINTS = 64
"""Segments that are walked side by side: as many as keep a forward pass busy."""
COINCIDENT = 1e-12
"""Breakpoints closer than this in t are one."""
CARRIED = 3
"""How often what is alive at a point is there: value, rate, and one of them in the making."""

Segment = tuple[Tensor, Tensor]


@dataclass
class _Walk:
    """A segment on its way: where it is, and what was met."""

    index: int
    start: Tensor
    end: Tensor
    t: float = 0.0
    met: list[float] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    passed: int = 0


@dataclass(frozen=True)
class _Sight:
    """What is seen from P points: outputs and their rates (P, k), and what is next.

    `ahead` (P,) is the displacement to the next breakpoint, infinite if there is none, and
    `site` (P,) whose it is; `passed` (P,) is how many lie between the last one and here.
    """

    value: Tensor
    rate: Tensor
    ahead: Tensor
    site: Tensor
    passed: Tensor


def trace_adaptively(
    program: Program,
    segments: Iterable[Segment],
    *,
    sensitivity: float = 1e-6,
    memory: int | None = None,
    together: int = POINTS,
    needs: PointMemory | None = None,
) -> Iterator[SegmentTrace]:
    """Trace a recorded program on one segment after another; see `trace_segment`.

    Each trace notes its ``sensitivity`` and, as ``shorter_than_sensitivity``, how many
    boundaries were crossed together with another: the regions before them are left out.
    They are counted by looking back along the rates behind them. That some were passed over
    is certain, and of one its number; of several in one step it is an estimate.

    Parameters
    ----------
    program : nlbench.probes.lines.recording.program.Program
    segments : iterable of (start, end), tensors of shape (*input)
    sensitivity : float
        How far behind a breakpoint the next search begins, as a share of the segment.
    memory : int, optional
        Bytes that may be used; by default half of what is free.
    together : int
        Most segments that are walked side by side.
    needs : PointMemory, optional
        What a point takes, where it was measured before.

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
    needs = needs or point_memory_of(program, torch.stack(first))
    _, together = share_out(needs.times(CARRIED), first[0].device, memory, together)
    walks: list[_Walk] = []
    finished: dict[int, SegmentTrace] = {}
    following = 0
    while True:
        # No more than a few traces wait for one before them.
        room = min(together - len(walks), 2 * together - len(walks) - len(finished))
        walks += [_Walk(i, a, b) for i, (a, b) in itertools.islice(numbered, max(0, room))]
        if not walks:
            break
        _step(program, walks, sensitivity)
        for walk in walks:
            if walk.met and walk.met[-1] == 1:
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
        last = [walk.met[-1] if walk.met else 0.0 for walk in walks]
        behind = t - torch.tensor(last, dtype=torch.float64, device=starts.device)
        sight = _look(program, starts, rates, t, behind)
        if not torch.isfinite(sight.value).all():
            raise NotFinite("the network's output is not finite on the segment")
        left = 1 - t
        ends = sight.ahead >= left - COINCIDENT
        ahead = torch.where(ends, left, sight.ahead)
        here = sight.value.double()
        rows = zip(
            walks,
            torch.where(ends, 1.0, t + ahead).tolist(),
            (here + ahead[:, None] * sight.rate.double()).cpu(),
            torch.where(ends, -1, sight.site).tolist(),
            sight.passed.tolist(),
            here.cpu(),
            strict=True,
        )
    for walk, place, value, site, passed, first in rows:
        if not walk.met:
            walk.met, walk.values, walk.origins = [0.0], [first], [-1]
        walk.passed += passed
        if place - walk.met[-1] > COINCIDENT or place == 1:
            walk.met.append(place)
            walk.values.append(value)
            walk.origins.append(site)
        walk.t = place + min(sensitivity, (1 - place) / 2)


def _look(program: Program, starts: Tensor, rates: Tensor, t: Tensor, behind: Tensor) -> _Sight:
    """Carry values and rates at one point of each segment through the program.

    `behind` (P,) is how far back the last breakpoint lies.
    """
    weight = t.reshape(-1, *[1] * (starts.ndim - 1)).to(starts.dtype)
    x = starts + weight * rates
    values, speeds = {0: x}, {0: rates}
    # What is rounded are the ends, wherever between them the point is.
    bounds, rests = {0: peak(starts) + peak(rates)}, {0: peak(rates)}
    ahead = torch.full_like(t, torch.inf)
    site = torch.full_like(t, -1, dtype=torch.int64)
    crossed: list[tuple[Tensor, Tensor]] = []
    for step in program.steps:
        inputs = [values[i] for i in step.inputs]
        moves = [speeds[i] for i in step.inputs]
        sizes = [bounds[i] for i in step.inputs]
        slow = [rests[i] for i in step.inputs]
        if step.rule.advance is None:
            value, speed = pushed(step.rule.apply, inputs, moves)
        else:
            front = step.rule.advance(inputs, moves, sizes, slow)
            value, speed = front.value, front.rate
            number = program.sites.index(step.site)
            for margin in front.margins:
                nearest, between = _sight_of(margin, behind)
                site = torch.where(nearest < ahead - COINCIDENT, number, site)
                ahead = torch.minimum(ahead, nearest)
                crossed.append(between)
        values[step.output], speeds[step.output] = value, speed
        bounds[step.output] = step.rule.bound(inputs, sizes, value)
        rests[step.output] = step.rule.bound(moves, slow, speed)
        for number in step.ends:
            del values[number], speeds[number], bounds[number], rests[number]
    count = len(t)
    return _Sight(
        values[program.output].reshape(count, -1),
        speeds[program.output].reshape(count, -1),
        ahead,
        site,
        _distinct(crossed, count, t.device),
    )


def _sight_of(margin: Margin, behind: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Give the displacement (P,) to the next zero, and which zeros lie just behind.

    The latter are row and distance of those between the last breakpoint and the point.
    """
    count = len(behind)
    value, rate = margin.value.reshape(count, -1), margin.rate.reshape(count, -1)
    noise = margin.noise.expand_as(margin.value).reshape(count, -1)
    distance = (value.double() / rate.double()).nan_to_num(torch.inf, torch.inf, -torch.inf)
    known = value.abs() > noise
    forward = torch.where(known & (distance < 0), -distance, torch.inf)
    nearest = forward.amin(1) if forward.shape[1] else torch.full_like(behind, torch.inf)
    # The zero of a unit is known to its noise over its rate.
    row, unit = (known & (distance > 0) & (distance < behind[:, None])).nonzero().unbind(1)
    found = distance[row, unit]
    blur = 2 * noise[row, unit].double() / rate[row, unit].double().abs()
    apart = behind[row] - found > COINCIDENT + blur
    return nearest, (row[apart], found[apart])


def _distinct(found: Sequence[tuple[Tensor, Tensor]], count: int, device: torch.device) -> Tensor:
    """Count, for each row, the distances that differ from each other: (P,)."""
    if not found:
        return torch.zeros(count, dtype=torch.int64, device=device)
    row = torch.cat([row for row, _ in found])
    distance = torch.cat([distance for _, distance in found])
    order = distance.argsort()
    order = order[row[order].argsort(stable=True)]
    row, distance = row[order], distance[order]
    new = torch.ones_like(row, dtype=torch.bool)
    new[1:] = (row.diff() > 0) | (distance.diff() > COINCIDENT)
    return torch.bincount(row[new], minlength=count)


def _trace(walk: _Walk, program: Program, sensitivity: float) -> SegmentTrace:
    device = walk.start.device
    return SegmentTrace(
        torch.tensor(walk.met, dtype=torch.float64, device=device),
        torch.stack(walk.values).to(device),
        distance(walk.start, walk.end),
        torch.tensor(walk.origins, device=device),
        program.sites,
        "adaptive",
        {"sensitivity": sensitivity, "shorter_than_sensitivity": float(walk.passed)},
        torch.finfo(walk.start.dtype).eps,
    )


POINTS_SAMPLING = 64
"""Points at once: as many as keep a forward pass busy."""

MEASURED_AT = 17
"""Samples at which rounding errors are measured."""
COPIES = 2
"""How often a sample is computed with other last digits."""


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

    Which units are too close to a kink to say is measured at a few samples, by changing last
    digits at random (see `walk_measured`): nothing is shared with the estimates of the other
    two methods, so that what these would lose shows here.

    Parameters
    ----------
    program : nlbench.probes.lines.recording.program.Program
    segments : iterable of (start, end), tensors of shape (*input)
    resolution : int
        Number of steps.
    memory : int, optional
        Bytes that may be used; by default half of what is free.
    needs : PointMemory, optional
        What a point takes, where it was measured before.

    Yields
    ------
    SegmentTrace
        In the order of the segments.
    """
    points = 0
    for start, end in segments:
        if not points:
            needs = needs or point_memory_of(program, torch.stack([start, end]))
            _, points = share_out(needs, start.device, memory, POINTS_SAMPLING, needed=3)
        yield _trace_sampling(program, start, end, resolution, points)


def _trace_sampling(
    program: Program, start: Tensor, end: Tensor, resolution: int, points: int
) -> SegmentTrace:
    found, sites = [], []
    errors = _measured_errors(program, start, end, points)
    # A batch begins with two samples of the one before, as a sample may lie on a boundary.
    for first in range(0, resolution, points - 2):
        last = min(first + points - 2, resolution)
        before = min(first, 1)
        t = torch.arange(first - before, last + 1, dtype=torch.float64, device=start.device)
        _, site = _look_sampling(program, points_at(start, end, t / resolution), errors)
        interval = (site[before:] >= 0).nonzero().squeeze(1)
        found.append((interval + first + 0.5) / resolution)
        sites.append(site[before:][interval])
    inside = torch.cat(found).double()
    ends = inside.new_tensor([0.0, 1.0])
    t = torch.cat([ends[:1], inside, ends[1:]])
    none = torch.full((1,), -1, device=start.device)
    values = [
        _look_sampling(program, points_at(start, end, part), errors)[0]
        for part in torch.split(t, points)
    ]
    return SegmentTrace(
        t,
        torch.cat(values).double(),
        distance(start, end),
        torch.cat([none, *sites, none]),
        program.sites,
        "sampling",
        {"resolution": float(resolution)},
        torch.finfo(start.dtype).eps,
    )


def _measured_errors(
    program: Program, start: Tensor, end: Tensor, points: int
) -> dict[int, list[Tensor]]:
    """Measure the errors of what each step that bends is given, one number a unit or channel."""
    errors: dict[int, list[Tensor]] = {}
    places = torch.linspace(0, 1, MEASURED_AT, dtype=torch.float64, device=start.device)
    with torch.no_grad():
        for part in torch.split(places, max(1, points // (COPIES + 1))):
            for seen in walk_measured(program, points_at(start, end, part), COPIES):
                if seen.step.rule.pieces is not None:
                    own = [2 * bound[:1] for bound in seen.bounds]
                    known = errors.get(seen.step.output, own)
                    errors[seen.step.output] = list(map(torch.maximum, known, own))
    return errors


def _look_sampling(
    program: Program, inputs: Tensor, errors: dict[int, list[Tensor]]
) -> tuple[Tensor, Tensor]:
    """Give outputs (P, k), and the first site that differs between neighbours (P - 1,), or -1."""
    site = torch.full((len(inputs) - 1,), -1, device=inputs.device)

    def look(step: Step, x: Sequence[Tensor]) -> None:
        if step.rule.pieces is not None and len(site):
            own = [e.expand(len(inputs), *e.shape[1:]) for e in errors[step.output]]
            is_first = (site < 0) & changes(step.rule.pieces, x, own)
            site.masked_fill_(is_first, program.sites.index(step.site))

    with torch.no_grad():
        output = run_program(program, inputs, look).reshape(len(inputs), -1)
    if not torch.isfinite(output).all():
        raise NotFinite("the network's output is not finite on the segment")
    return output, site
