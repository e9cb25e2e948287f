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

from nlbench.errors import NlbenchError, UnsupportedOperation
from nlbench.introspection.batch_independence import equal_but_for_rounding

from .exact.trace import MIN_BREAKPOINT_GAP
from .recording.agreement import output_tolerance, run_alone
from .recording.program import MeasuredStep, Program, walk, walk_measured
from .rules.pieces import UnitPieces
from .rules.rounding import peak, tolerance_factor
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
    """Raise if a trace disagrees with the network, or rounding errors are too large to tell.

    Traces are checked together as far as memory allows, `batch_points` at a time, at least 4. Where
    the network takes no batches, or a difference is found, they are checked one by one.
    """
    size = batch_points // POINTS_PER_CHECK
    for first in range(0, len(traces), max(1, size)):
        part = slice(first, first + max(1, size))
        if size:
            try:
                _Checks(program, network, points[part], traces[part], POINTS_PER_CHECK, False).run()
                continue
            except NlbenchError:
                pass
        for ends, trace in zip(points[part], traces[part], strict=True):
            _Checks(program, network, ends[None], [trace], batch_points, True).run()


class _Checks:
    """Comparisons of traces of one method with the network, which raise if a trace disagrees.

    At most `batch_points` points of a trace, with their copies, are computed at a time. With
    `is_alone` the network runs on one input at a time, and the error of its output is measured.
    """

    def __init__(
        self,
        program: Program,
        network: nn.Module,
        points: Tensor,
        traces: Sequence[SegmentTrace],
        batch_points: int,
        is_alone: bool,
    ) -> None:
        self._program = program
        self._network = network
        self._points = points
        self._traces = traces
        self._batch_points = batch_points
        self._is_alone = is_alone
        # A row per trace, padded with the end of the segment.
        self._t = nn.utils.rnn.pad_sequence(
            [trace.t for trace in traces], batch_first=True, padding_value=1.0
        )
        regions = [trace.regions for trace in traces]
        self._regions = torch.tensor(regions, device=points.device)[:, None]
        self._ends = torch.cat([0 * self._regions, self._regions], 1)
        self._widest = self._t.diff().argmax(1, keepdim=True)
        centred = torch.arange(CHECKED_REGIONS, device=points.device) * self._regions
        self._centred = centred // CHECKED_REGIONS + self._regions // (2 * CHECKED_REGIONS)

    @torch.inference_mode()
    def run(self) -> None:
        """Raise if a trace disagrees with the network."""
        self._check_values()
        inside = self._points_inside()
        self._check_pieces(inside)
        self._check_rounding(inside)

    def _inputs(self, t: Tensor) -> Tensor:
        """Return the inputs (S * m, *input) at t (S, m)."""
        start, end = (self._points[:, i, None] for i in (0, 1))
        weight = t.to(start.dtype).reshape(*t.shape, *(1,) * (start.ndim - 2))
        return torch.lerp(start, end, weight).flatten(0, 1)

    def _check_values(self) -> None:
        left = torch.cat([self._centred, self._widest], 1)
        # Between sampled breakpoints the network is not affine.
        right = left if self._traces[0].method == "sampling" else left + 1
        left, right = (torch.cat([self._ends, i], 1) for i in (left, right))
        t = (self._t.gather(1, left) + self._t.gather(1, right)) / 2
        inputs = self._inputs(t)
        run = run_alone if self._is_alone else _run_together
        expected = run(self._network, inputs).reshape(*t.shape, -1)
        outputs = torch.cat([trace.values for trace in self._traces])
        if expected.shape[-1] != outputs.shape[1]:
            raise _not_reproduced()
        if not expected.numel():
            return
        first = (self._regions + 1).cumsum(0) - (self._regions + 1)
        values = ((outputs[first + left] + outputs[first + right]) / 2).to(expected.dtype)
        lengths = self._regions.flatten() + 1
        high, low = (torch.segment_reduce(outputs, kind, lengths=lengths) for kind in _EXTREMES)
        high = torch.maximum(high.to(expected.dtype), expected.amax(1))
        low = torch.minimum(low.to(expected.dtype), expected.amin(1))
        tolerance = output_tolerance(low, high)[:, None]
        is_equal = equal_but_for_rounding(values, expected, tolerance)
        if self._is_alone and not bool(is_equal.all()):
            measured = self._output_error(inputs) + _walk_tolerance(self._traces[0])
            is_equal |= (values - expected).abs() <= measured
        if not bool(is_equal.all()):
            raise _not_reproduced()

    def _output_error(self, inputs: Tensor) -> Tensor:
        """Measure the rounding error of the outputs: (1, k)."""
        errors = [inputs.new_zeros(1, 1)]
        for part in torch.split(inputs, max(1, self._batch_points // (1 + PERTURBED_COPIES))):
            for computed in walk_measured(self._program, part, PERTURBED_COPIES):
                if computed.step.output == self._program.output:
                    bound = computed.bound[:1].expand_as(computed.output[:1]).reshape(1, -1)
                    errors.append(torch.maximum(errors.pop(), bound))
        return MEASURED_ERROR_FACTOR * torch.finfo(inputs.dtype).eps * errors[0]

    def _points_inside(self) -> Tensor:
        """Return two points each in two regions, (S, 4). Return 0 if a region is too narrow."""
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
        middle = (t[:, 1:] + t[:, :-1]) / 2
        width = t.diff()
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

    def _check_pieces(self, inside: Tensor) -> None:
        """Compare the pieces of units at the two points of each pair.

        If the pair has a site, some unit of that site must be on different pieces. Otherwise, no
        unit may be.
        """
        across, sites = self._points_across()
        t = torch.cat([across, inside], 1)
        sites = torch.cat([sites, torch.full_like(sites, -1)], 1)
        copies = min(PERTURBED_COPIES, max(1, self._batch_points // 2 - 1))
        pairs = max(1, self._batch_points // (2 * (1 + copies)))
        parts = zip(torch.split(t, 2 * pairs, 1), torch.split(sites, pairs, 1), strict=True)
        for points, sites in parts:
            self._compare_pieces(self._inputs(points), sites.flatten(), copies, points.shape[1])

    def _compare_pieces(self, inputs: Tensor, sites: Tensor, copies: int, group: int) -> None:
        is_inside = (sites < 0).repeat_interleave(2)
        for computed in walk_measured(self._program, inputs, copies, group):
            step = computed.step
            if step.rule.pieces is not None:
                is_apart = _are_apart(computed, step.rule.pieces, is_inside)
                site = self._program.sites.index(step.site)
                if bool(((sites == site) & ~is_apart).any()):
                    raise step.refusal("a traced breakpoint is not one of the network's")
                if bool(((sites < 0) & is_apart).any()):
                    raise step.refusal("a unit crosses a boundary that is missing in the trace")

    def _check_rounding(self, inside: Tensor) -> None:
        """Raise if the values of a step consist largely, but not entirely, of rounding errors."""
        t = torch.cat([self._t.gather(1, self._ends), inside], 1)
        sizes: dict[str, Tensor] = {}  # Tolerance and largest value of each trace, (2, S), by site.
        for points in torch.split(t, max(1, self._batch_points), 1):
            for computed in walk(self._program, self._inputs(points)):
                site = computed.step.site
                if computed.step.rule.pieces is not None:
                    error = self._largest(computed.bounds)
                    tolerance = error * tolerance_factor(computed.output.dtype)
                    size = torch.stack([tolerance, self._largest(list(map(peak, computed.inputs)))])
                    sizes[site] = torch.maximum(size, sizes.get(site, size))
        for step in self._program.steps:
            if step.site in sizes:
                tolerance, size = sizes[step.site]
                # Values that are all within the tolerance are zero up to rounding.
                is_lost = (tolerance < size) & (tolerance > MAX_RELATIVE_ROUNDING * size)
                if bool(is_lost.any()):
                    relative = float((tolerance / size)[is_lost].max())
                    raise step.refusal(
                        f"rounding errors reach {relative:.1g} of its largest value on the "
                        f"segment, expected at most {MAX_RELATIVE_ROUNDING:g}"
                    )

    def _largest(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the largest element for each trace, (S,)."""
        count = len(self._traces)
        return torch.stack([x.reshape(count, -1).amax(1) for x in tensors]).amax(0)


_EXTREMES = ("max", "min")


def _not_reproduced() -> UnsupportedOperation:
    why = "the traced values do not reproduce the network's output"
    return UnsupportedOperation("forward", "the network", why)


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


def _run_together(network: nn.Module, inputs: Tensor) -> Tensor:
    """Return the outputs (m, ...). Raise if the network takes no batches.

    The last input is run alone, as in a recording.
    """
    try:
        outputs = network(inputs.clone())
    except Exception as error:
        raise _not_reproduced() from error
    is_batch = isinstance(outputs, Tensor) and outputs.ndim > 0 and len(outputs) == len(inputs)
    if not is_batch or not bool(outputs.isfinite().all()):
        raise _not_reproduced()
    alone = run_alone(network, inputs[-1:])
    if alone.shape != outputs[-1:].shape:
        raise _not_reproduced()
    return torch.cat([outputs[:-1], alone])


def _are_apart(computed: MeasuredStep, pieces: UnitPieces, is_inside: Tensor) -> Tensor:
    """Return a mask of the pairs of points at which some unit is on different pieces.

    At the points (P,) in `is_inside`, a unit within rounding of a kink may be on both sides.
    """
    undecided = []
    for x, bound in zip(computed.inputs, computed.bounds, strict=True):
        measured = MEASURED_ERROR_FACTOR * torch.finfo(x.dtype).eps * bound
        distance = torch.maximum(measured, RELATIVE_KINK_TOLERANCE[x.dtype] * peak(x))
        rows = is_inside.reshape(-1, *(1,) * (x.ndim - 1))
        undecided.append(distance.div_(tolerance_factor(x.dtype)).masked_fill_(~rows, 0.0))
    possible = pieces.possible(computed.inputs, undecided)
    is_apart = (possible[:, ::2] & possible[:, 1::2]).any(0).logical_not_()
    return is_apart.flatten(1).any(1)
