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

from .exact.trace import MIN_BREAKPOINT_GAP
from .recording.agreement import agree, run_alone
from .recording.program import ComputedStep, Program, walk, walk_measured
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


def _compare(computed: ComputedStep, pieces: Pieces, sites: Sequence[str]) -> None:
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
