"""Comparison of a trace with the network, independent of the trace's error estimates.

At the ends and inside a few regions, the network is run, one input at a time, and compared with
the traced values. At two points in some of these regions, all units must be on the same pieces.
Across a few breakpoints, some unit of the recorded site must be on different pieces.
The tolerances depend on the magnitudes of the values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nlbench.errors import UnsupportedOperation
from nlbench.introspection.batch_independence import equal_but_for_rounding

from .exact.trace import MIN_BREAKPOINT_GAP
from .recording.agreement import agree, output_tolerance, run_alone
from .recording.program import MeasuredStep, Program, walk, walk_measured
from .rules.pieces import Pieces, changes
from .rules.rounding import noise_of, peak
from .segments import points_at
from .trace import SegmentTrace

CHECKED_REGIONS = 5
"""Number of regions, in addition to the widest, where values are compared with the network."""
CHECKED_BREAKPOINTS = 2
"""Number of breakpoints across which the pieces of units are compared."""
MAX_RELATIVE_ROUNDING = 1e-3
"""Rounding error of a step, relative to its largest value, above which a trace is refused."""
RELATIVE_KINK_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Distance from a kink within which the side is unknown, relative to a step's largest value."""
PERTURBED_COPIES = 3
"""Number of perturbed copies of a point that measure its rounding errors."""
MEASURED_ERROR_FACTOR = 32
"""Distance from a kink within which the side is unknown, in measured rounding errors."""
POINTS_PER_CHECK = 8 * (1 + PERTURBED_COPIES)
"""Maximum number of points of a trace, with their copies, that are computed at a time."""


def check_traces(
    program: Program,
    network: nn.Module,
    points: Tensor,
    traces: Sequence[SegmentTrace],
    *,
    batch_points: int = 64,
) -> None:
    """Raise if a trace disagrees with the network.

    Traces are checked together as far as memory allows. Where the network takes no batches, or a
    difference is found, they are checked one by one.

    Parameters
    ----------
    points : tensor of shape (segments, 2, *input)
        The segments' ends.
    program, network, batch_points
        See `check_trace`, which also describes the errors.
    """
    size = batch_points // POINTS_PER_CHECK
    for first in range(0, len(traces), max(1, size)):
        part = slice(first, first + max(1, size))
        are_equal = [False]
        if size:
            checks = _JointChecks(program, points[part], traces[part])
            are_equal = checks.run(network).tolist()
        for ends, trace, is_equal in zip(points[part], traces[part], are_equal, strict=True):
            if not is_equal:
                check_trace(program, network, ends, trace, batch_points=batch_points)


def check_trace(
    program: Program,
    network: nn.Module,
    points: Tensor,
    trace: SegmentTrace,
    *,
    batch_points: int = 64,
) -> None:
    """Raise if a trace disagrees with the network.

    Parameters
    ----------
    program : Program
        Recorded from the network.
    network : torch.nn.Module
        In the dtype of the points.
    points : tensor of shape (2, *input)
        The segment's ends.
    batch_points : int
        Maximum number of points computed at a time, at least 4.

    Raises
    ------
    nlbench.UnsupportedOperation
        If the network's outputs differ, units change pieces at points other than breakpoints,
        or rounding errors exceed a thousandth of a step's largest value.
    """
    centred = torch.arange(CHECKED_REGIONS) * trace.regions // CHECKED_REGIONS
    centred = centred + trace.regions // (2 * CHECKED_REGIONS)
    width = trace.t.diff()
    widest = width.argmax()
    left = torch.unique(torch.cat([centred.to(width.device), widest.reshape(1)]))
    _check_values(program, network, points, trace, left, batch_points)
    inside = _points_inside(trace, torch.unique(torch.stack([widest, left[len(left) // 2]])))
    across = _points_across(trace)
    pairs = [*(pair for pair, _ in across), *inside]
    if pairs:
        sites = [*(site for _, site in across), *([""] * len(inside))]
        _check_pieces(program, points, torch.cat(pairs), sites, batch_points)
    _check_rounding(program, points, torch.cat([trace.t[[0, -1]], *inside]), batch_points)


def _check_values(
    program: Program,
    network: nn.Module,
    points: Tensor,
    trace: SegmentTrace,
    left: Tensor,
    batch_points: int,
) -> None:
    # Between sampled breakpoints the network is not affine.
    right = left if trace.method == "sampling" else left + 1
    t = torch.cat([trace.t[[0, -1]], (trace.t[left] + trace.t[right]) / 2])
    values = torch.cat([trace.values[[0, -1]], (trace.values[left] + trace.values[right]) / 2])
    inputs = points_at(points[0], points[1], t)
    expected = run_alone(network, inputs).reshape(len(t), -1)
    if expected.shape == values.shape:
        values = values.to(expected.dtype)
        same = agree(values, expected, trace.values)
        if not bool(same.all()):
            tolerance = _rounding(program, inputs, batch_points) + _walk_tolerance(trace)
            same |= (values - expected).abs() <= tolerance
        if bool(same.all()):
            return
    raise UnsupportedOperation(
        "forward", "the network", "the traced values do not reproduce the network's output"
    )


def _rounding(program: Program, inputs: Tensor, batch_points: int) -> Tensor | float:
    """Measure the rounding error of the outputs: (1, k)."""
    errors = []
    with torch.inference_mode():
        for part in torch.split(inputs, max(1, batch_points // (1 + PERTURBED_COPIES))):
            for computed in walk_measured(program, part, PERTURBED_COPIES):
                if computed.step.output == program.output:
                    errors.append(computed.bound[:1].expand_as(computed.output[:1]).reshape(1, -1))
    largest = torch.cat(errors).amax(0, keepdim=True) if errors else 0.0
    return MEASURED_ERROR_FACTOR * torch.finfo(inputs.dtype).eps * largest


def _walk_tolerance(trace: SegmentTrace) -> float:
    """Return the error in an adaptive trace's values due to errors in t and skipped regions."""
    if trace.method != "adaptive":
        return 0.0
    steepest = float((trace.values.diff(dim=0) / trace.t.diff()[:, None]).abs().max())
    passed = trace.notes["sensitivity"] if trace.notes["shorter_than_sensitivity"] else 0.0
    return (2 * passed + 16 * trace.precision) * steepest


def _resolution(trace: SegmentTrace) -> float:
    """Return the maximum distance of a trace's breakpoints from those of the network."""
    if trace.method == "sampling":
        return 1 / trace.notes["resolution"]
    if trace.method == "adaptive":
        return trace.notes["sensitivity"]
    return MIN_BREAKPOINT_GAP[torch.float64 if trace.precision < 1e-12 else torch.float32]


def _points_inside(trace: SegmentTrace, left: Tensor) -> list[Tensor]:
    """Return two points, (2,), in each of the given regions that is wide enough."""
    start, end = trace.t[left], trace.t[left + 1]
    margin = torch.clamp(0.05 * (end - start), min=2 * _resolution(trace))
    pairs = torch.stack([start + margin, end - margin], 1)
    return list(pairs[end - start > 4 * margin])


def _points_across(trace: SegmentTrace) -> list[tuple[Tensor, str]]:
    """Return, for the most isolated breakpoints, points on both sides, (2,), and the site."""
    middle, width = (trace.t[1:] + trace.t[:-1]) / 2, trace.t.diff()
    space = torch.minimum(width[1:], width[:-1])
    chosen = space.topk(min(CHECKED_BREAKPOINTS, len(space))).indices
    chosen = chosen[space[chosen] > 4 * _resolution(trace)]
    origins = trace.origins[1:-1][chosen].tolist()
    pairs = torch.stack([middle[:-1][chosen], middle[1:][chosen]], 1)
    return [(pair, trace.sites[site]) for pair, site in zip(pairs, origins, strict=True)]


def _check_pieces(
    program: Program, points: Tensor, t: Tensor, sites: Sequence[str], batch_points: int
) -> None:
    """Compare the pieces of units at the two points of each pair.

    If the pair has a site, some unit of that site must be on different pieces; otherwise, no unit
    may be.
    """
    copies = min(PERTURBED_COPIES, max(1, batch_points // 2 - 1))
    pairs = max(1, batch_points // (2 * (1 + copies)))
    with torch.inference_mode():
        for first in range(0, len(sites), pairs):
            part = sites[first : first + pairs]
            inputs = points_at(points[0], points[1], t[2 * first : 2 * (first + len(part))])
            for computed in walk_measured(program, inputs, copies):
                if computed.step.rule.pieces is not None:
                    _compare(computed, computed.step.rule.pieces, part)


def _check_rounding(program: Program, points: Tensor, t: Tensor, batch_points: int) -> None:
    """Raise if the values of a step consist largely, but not entirely, of rounding errors."""
    sizes: dict[str, tuple[float, float]] = {}
    with torch.inference_mode():
        for part in torch.split(t, max(1, batch_points)):
            for computed in walk(program, points_at(points[0], points[1], part)):
                if computed.step.rule.bend is not None:
                    noise, size = sizes.get(computed.step.site, (0.0, 0.0))
                    error = max(float(bound.max()) for bound in computed.bounds)
                    noise = max(noise, error * noise_of(computed.output.dtype))
                    size = max(size, *(float(peak(x).max()) for x in computed.inputs))
                    sizes[computed.step.site] = noise, size
    for step in program.steps:
        noise, size = sizes.get(step.site, (0.0, 0.0))
        # Values that are all within the noise are zero up to rounding.
        if noise < size and noise > MAX_RELATIVE_ROUNDING * size:
            raise step.refusal(
                f"rounding errors reach {noise / size:.1g} of its largest value on the segment, "
                f"expected at most {MAX_RELATIVE_ROUNDING:g}"
            )


def _compare(computed: MeasuredStep, pieces: Pieces, sites: Sequence[str]) -> None:
    step = computed.step
    for index, expected in enumerate(sites):
        if expected and expected != step.site:
            continue
        pair = slice(2 * index, 2 * index + 2)
        inputs = [x[pair] for x in computed.inputs]
        undecided = [torch.zeros_like(peak(x)) for x in inputs]
        if not expected:
            relative = RELATIVE_KINK_TOLERANCE[computed.output.dtype]
            undecided = [
                torch.maximum(
                    MEASURED_ERROR_FACTOR * torch.finfo(x.dtype).eps * bound[pair],
                    relative * peak(x),
                )
                / noise_of(x.dtype)
                for x, bound in zip(inputs, computed.bounds, strict=True)
            ]
        is_apart = bool(changes(pieces, inputs, undecided).any())
        if expected and not is_apart:
            raise step.refusal("a traced breakpoint is not one of the network's")
        if is_apart and not expected:
            raise step.refusal("a unit crosses a boundary that is missing in the trace")


class _JointChecks:
    """The comparisons of `check_trace` for S traces at once.

    Parameters
    ----------
    program : Program
    points : tensor of shape (S, 2, *input)
    traces : sequence of SegmentTrace
        Found by the same method.
    """

    def __init__(self, program: Program, points: Tensor, traces: Sequence[SegmentTrace]) -> None:
        self._program = program
        self._points = points
        self._traces = traces
        # A row per trace, padded with the end of the segment.
        self._t = nn.utils.rnn.pad_sequence(
            [trace.t for trace in traces], batch_first=True, padding_value=1.0
        )
        regions = [trace.regions for trace in traces]
        self._regions = torch.tensor(regions, device=points.device)[:, None]
        self._widest = self._t.diff().argmax(1, keepdim=True)
        centred = torch.arange(CHECKED_REGIONS, device=points.device) * self._regions
        self._centred = centred // CHECKED_REGIONS + self._regions // (2 * CHECKED_REGIONS)

    def run(self, network: nn.Module) -> Tensor:
        """Return a mask (S,) of the traces that agree with the network."""
        with torch.inference_mode():
            inside = self._points_inside()
            return (
                self._values_agree(network)
                & self._pieces_agree(inside)
                & self._rounding_is_small(inside)
            )

    def _inputs(self, t: Tensor) -> Tensor:
        """Return the inputs (S * m, *input) at t (S, m)."""
        start, end = (self._points[:, i, None] for i in (0, 1))
        weight = t.to(start.dtype).reshape(*t.shape, *(1,) * (start.ndim - 2))
        return torch.lerp(start, end, weight).flatten(0, 1)

    def _values_agree(self, network: nn.Module) -> Tensor:
        left = torch.cat([self._centred, self._widest], 1)
        # Between sampled breakpoints the network is not affine.
        right = left if self._traces[0].method == "sampling" else left + 1
        left, right = (torch.cat([0 * self._regions, self._regions, i], 1) for i in (left, right))
        t = (self._t.gather(1, left) + self._t.gather(1, right)) / 2
        inputs = self._inputs(t)
        expected = _run_together(network, inputs)
        is_empty = torch.zeros(len(self._traces), dtype=torch.bool, device=inputs.device)
        if expected is None:
            return is_empty
        outputs = torch.cat([trace.values for trace in self._traces])
        expected = expected.reshape(*t.shape, -1)
        if expected.shape[-1] != outputs.shape[1] or not expected.numel():
            return is_empty
        first = (self._regions + 1).cumsum(0) - (self._regions + 1)
        values = ((outputs[first + left] + outputs[first + right]) / 2).to(expected.dtype)
        lengths = self._regions.flatten() + 1
        high, low = (torch.segment_reduce(outputs, kind, lengths=lengths) for kind in _EXTREMES)
        high = torch.maximum(high.to(expected.dtype), expected.amax(1))
        low = torch.minimum(low.to(expected.dtype), expected.amin(1))
        tolerance = output_tolerance(low, high)[:, None]
        return equal_but_for_rounding(values, expected, tolerance).flatten(1).all(1)

    def _points_inside(self) -> Tensor:
        """Return two points each in two regions, (S, 4).

        Return 0 if a region is too narrow.
        """
        left = torch.cat([self._widest, self._centred[:, CHECKED_REGIONS // 2, None]], 1)
        start, end = self._t.gather(1, left), self._t.gather(1, left + 1)
        margin = torch.clamp(0.05 * (end - start), min=2 * _resolution(self._traces[0]))
        pairs = torch.stack([start + margin, end - margin], 2)
        return pairs.where((end - start > 4 * margin)[..., None], 0.0).flatten(1)

    def _points_across(self) -> tuple[Tensor, Tensor]:
        """Return points on both sides of isolated breakpoints, (S, 4), and their sites, (S, 2).

        The site is -1, and both points are 0, if there is no such breakpoint.
        """
        t = torch.nn.functional.pad(self._t, (0, CHECKED_BREAKPOINTS), value=1.0)
        middle, width = (t[:, 1:] + t[:, :-1]) / 2, t.diff()
        space = torch.minimum(width[:, 1:], width[:, :-1])
        space, chosen = space.topk(CHECKED_BREAKPOINTS, 1)
        is_isolated = space > 4 * _resolution(self._traces[0])
        pairs = torch.stack([middle.gather(1, chosen), middle.gather(1, chosen + 1)], 2)
        origins = nn.utils.rnn.pad_sequence(
            [trace.origins for trace in self._traces], batch_first=True, padding_value=-1
        )
        sites = origins.gather(1, (chosen + 1).clamp(max=origins.shape[1] - 1))
        pairs = pairs.where(is_isolated[..., None], 0.0)
        return pairs.flatten(1), sites.where(is_isolated, -1)

    def _pieces_agree(self, inside: Tensor) -> Tensor:
        across, sites = self._points_across()
        t = torch.cat([across, inside], 1)
        sites = torch.cat([sites, torch.full_like(sites, -1)], 1).flatten()
        is_inside = (sites < 0).repeat_interleave(2)
        agrees = torch.ones_like(sites, dtype=torch.bool)
        steps = walk_measured(self._program, self._inputs(t), PERTURBED_COPIES, t.shape[1])
        for computed in steps:
            pieces = computed.step.rule.pieces
            if pieces is not None:
                is_apart = _are_apart(computed, pieces, is_inside)
                site = self._program.sites.index(computed.step.site)
                agrees &= torch.where(sites < 0, ~is_apart, is_apart | (sites != site))
        return agrees.reshape(len(t), -1).all(1)

    def _rounding_is_small(self, inside: Tensor) -> Tensor:
        ends = self._t.gather(1, torch.cat([0 * self._regions, self._regions], 1))
        t = torch.cat([ends, inside], 1)
        sizes: dict[str, tuple[Tensor, Tensor]] = {}
        for computed in walk(self._program, self._inputs(t)):
            step = computed.step
            if step.rule.bend is not None:
                error = torch.stack([_largest(bound, len(t)) for bound in computed.bounds]).amax(0)
                noise = error * noise_of(computed.output.dtype)
                size = torch.stack([_largest(peak(x), len(t)) for x in computed.inputs]).amax(0)
                before = sizes.get(step.site, (noise, size))
                sizes[step.site] = torch.maximum(noise, before[0]), torch.maximum(size, before[1])
        is_small = torch.ones(len(t), dtype=torch.bool, device=t.device)
        for noise, size in sizes.values():
            is_small &= (noise >= size) | (noise <= MAX_RELATIVE_ROUNDING * size)
        return is_small


_EXTREMES = ("max", "min")


def _largest(x: Tensor, groups: int) -> Tensor:
    return x.reshape(groups, -1).amax(1)


def _run_together(network: nn.Module, inputs: Tensor) -> Tensor | None:
    """Return the outputs (m, ...), or None if the network takes no batches.

    The last input is run alone, as in a recording.
    """
    try:
        outputs = network(inputs.clone())
    except Exception:
        return None
    is_batch = isinstance(outputs, Tensor) and outputs.ndim > 0 and len(outputs) == len(inputs)
    if not is_batch or not bool(outputs.isfinite().all()):
        return None
    alone = run_alone(network, inputs[-1:])
    return torch.cat([outputs[:-1], alone]) if alone.shape == outputs[-1:].shape else None


def _are_apart(computed: MeasuredStep, pieces: Pieces, is_inside: Tensor) -> Tensor:
    """Return a mask of the pairs of points at which some unit is on different pieces.

    At the points (P,) in `is_inside`, a unit within rounding of a kink may be on both sides.
    """
    undecided = []
    for x, bound in zip(computed.inputs, computed.bounds, strict=True):
        measured = MEASURED_ERROR_FACTOR * torch.finfo(x.dtype).eps * bound
        distance = torch.maximum(measured, RELATIVE_KINK_TOLERANCE[x.dtype] * peak(x))
        rows = is_inside.reshape(-1, *(1,) * (x.ndim - 1))
        undecided.append(distance.div_(noise_of(x.dtype)).masked_fill_(~rows, 0.0))
    possible = pieces.possible(computed.inputs, undecided)
    is_apart = (possible[:, ::2] & possible[:, 1::2]).any(0).logical_not_()
    return is_apart.flatten(1).any(1)
