"""Check a trace against the network itself, apart from the error estimates it was made with.

At the ends and inside a few regions the network is run, one input at a time, and compared with
the traced values. At two points of each of these regions all units have to be on the same
pieces, and at both sides of a few breakpoints some unit of the site it is said to come from on
different ones. How far values may differ, and which units are too close to a kink to say, is
told from the values' own sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nlbench.errors import UnsupportedOperation

from .exact.trace import COINCIDENT
from .recording.program import Computed, Program, agree, run_alone, walk, walk_measured
from .rules.rule import Pieces, changes, noise_of, peak
from .trace import SegmentTrace, points_at

__all__ = ["check_trace"]


CHECKED = 5
"""In how many regions, besides the widest, traced values are compared with the network."""
COMPARED = 2
"""In how many regions, and at how many breakpoints, the pieces that units are on."""
DROWNED = 1e-3
"""Share of a step's largest value from which on its rounding errors make it unknown."""
UNDECIDED = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Share of a step's largest value up to which a unit may be on either side of a kink."""
MEASURED = 32
"""The same in units of what a change of all last digits makes of it."""


def check_trace(
    program: Program,
    network: nn.Module,
    points: Tensor,
    trace: SegmentTrace,
    *,
    together: int = 64,
) -> None:
    """Compare a trace with the network itself.

    Parameters
    ----------
    program : nlbench.probes.lines.recording.program.Program
        Of the network.
    network : torch.nn.Module
        In the dtype of the points.
    points : tensor of shape (2, *input)
        The segment's ends.
    trace : nlbench.probes.lines.trace.SegmentTrace
    together : int
        Most points to go through the program at once, at least 4.

    Raises
    ------
    nlbench.UnsupportedOperation
        If the network gives other values, units change their pieces elsewhere than at
        breakpoints, or what rounding leaves exceeds a thousandth of some step's values.
    """
    spread = torch.arange(CHECKED) * trace.regions // CHECKED + trace.regions // (2 * CHECKED)
    width = trace.t.diff()
    left = torch.unique(torch.cat([spread.to(width.device), width.argmax().reshape(1)]))
    _check_values(program, network, points, trace, left, together)
    inside = _inside(trace, torch.unique(torch.stack([width.argmax(), left[len(left) // 2]])))
    beside = _beside(trace)
    pairs = [*(pair for pair, _ in beside), *inside]
    if pairs:
        sites = [*(site for _, site in beside), *([""] * len(inside))]
        _check_pieces(program, points, torch.cat(pairs), sites, together)
    _check_rounding(program, points, torch.cat([trace.t[[0, -1]], *inside]), together)


def _check_values(
    program: Program,
    network: nn.Module,
    points: Tensor,
    trace: SegmentTrace,
    left: Tensor,
    together: int,
) -> None:
    # Between sampled breakpoints the network is not the line through its values.
    right = left if trace.method == "sampling" else left + 1
    t = torch.cat([trace.t[[0, -1]], (trace.t[left] + trace.t[right]) / 2])
    values = torch.cat([trace.values[[0, -1]], (trace.values[left] + trace.values[right]) / 2])
    inputs = points_at(points[0], points[1], t)
    expected = run_alone(network, inputs).reshape(len(t), -1)
    if expected.shape == values.shape:
        found = values.to(expected.dtype)
        same = agree(found, expected, trace.values)
        if not bool(same.all()):
            # What rounding makes of the network's steps, and what a walk may be off by.
            slack = _rounding(program, inputs, together) + _slack(trace)
            same |= (found - expected).abs() <= slack
        if bool(same.all()):
            return
    raise UnsupportedOperation(
        "forward", "the network", "the traced values do not reproduce the network's output"
    )


def _rounding(program: Program, inputs: Tensor, together: int) -> Tensor | float:
    """Say how far outputs are off by what the program's steps round: (1, k), measured."""
    errors, copies = [], 3
    with torch.inference_mode():
        for part in torch.split(inputs, max(1, together // (1 + copies))):
            for seen in walk_measured(program, part, copies):
                if seen.step.output == program.output:
                    errors.append(seen.bound[:1].expand_as(seen.output[:1]).reshape(1, -1))
    most = torch.cat(errors).amax(0, keepdim=True) if errors else 0.0
    return MEASURED * torch.finfo(inputs.dtype).eps * most


def _slack(trace: SegmentTrace) -> float:
    """How far a walk's values may be off: by its t, and by what it passed over."""
    if trace.method != "adaptive":
        return 0.0
    steepest = float((trace.values.diff(dim=0) / trace.t.diff()[:, None]).abs().max())
    passed = trace.notes["sensitivity"] if trace.notes["shorter_than_sensitivity"] else 0.0
    return (2 * passed + 16 * trace.precision) * steepest


def _resolution(trace: SegmentTrace) -> float:
    """How far from a breakpoint of a trace those of the network may lie."""
    if trace.method == "sampling":
        return 1 / trace.notes["resolution"]
    if trace.method == "adaptive":
        return trace.notes["sensitivity"]
    return COINCIDENT[torch.float64 if trace.precision < 1e-12 else torch.float32]


def _inside(trace: SegmentTrace, left: Tensor) -> list[Tensor]:
    """Give two points, (2,), of each of some regions that are long enough."""
    start, end = trace.t[left], trace.t[left + 1]
    margin = torch.clamp(0.05 * (end - start), min=2 * _resolution(trace))
    pairs = torch.stack([start + margin, end - margin], 1)
    return list(pairs[end - start > 4 * margin])


def _beside(trace: SegmentTrace) -> list[tuple[Tensor, str]]:
    """Give points at both sides of some breakpoints, (2,), and the site of each."""
    middle, width = (trace.t[1:] + trace.t[:-1]) / 2, trace.t.diff()
    room = torch.minimum(width[1:], width[:-1])
    chosen = room.topk(min(COMPARED, len(room))).indices
    chosen = chosen[room[chosen] > 4 * _resolution(trace)]
    origins = trace.origins[1:-1][chosen].tolist()
    pairs = torch.stack([middle[:-1][chosen], middle[1:][chosen]], 1)
    return [(pair, trace.sites[site]) for pair, site in zip(pairs, origins, strict=True)]


def _check_pieces(
    program: Program, points: Tensor, t: Tensor, sites: Sequence[str], together: int
) -> None:
    """Compare the pieces that units are on at each two points.

    Of a site that is named some unit has to be on another piece; where none is, no unit may be.
    """
    some = max(1, together // 4)
    with torch.inference_mode():
        for first in range(0, len(sites), some):
            part = sites[first : first + some]
            inputs = points_at(points[0], points[1], t[2 * first : 2 * (first + len(part))])
            for seen in walk_measured(program, inputs):
                if seen.step.rule.pieces is not None:
                    _compare(seen, seen.step.rule.pieces, part)


def _check_rounding(program: Program, points: Tensor, t: Tensor, together: int) -> None:
    """Refuse a step whose values are known to be no more than rounding's, but not zero."""
    sizes: dict[str, tuple[float, float]] = {}
    with torch.inference_mode():
        for part in torch.split(t, max(1, together)):
            for seen in walk(program, points_at(points[0], points[1], part)):
                if seen.step.rule.bend is not None:
                    noise, size = sizes.get(seen.step.site, (0.0, 0.0))
                    off = max(float(bound.max()) for bound in seen.bounds)
                    noise = max(noise, off * noise_of(seen.output.dtype))
                    size = max(size, *(float(peak(x).max()) for x in seen.inputs))
                    sizes[seen.step.site] = noise, size
    for step in program.steps:
        noise, size = sizes.get(step.site, (0.0, 0.0))
        # What is within the noise altogether is zero but for rounding.
        if noise < size and noise > DROWNED * size:
            raise step.refusal(
                f"rounding leaves up to {noise / size:.1g} of its largest value on the segment, "
                f"expected at most {DROWNED:g}"
            )


def _compare(seen: Computed, pieces: Pieces, sites: Sequence[str]) -> None:
    step = seen.step
    for number, expected in enumerate(sites):
        if expected and expected != step.site:
            continue
        pair = slice(2 * number, 2 * number + 2)
        inputs = [x[pair] for x in seen.inputs]
        undecided = [torch.zeros_like(peak(x)) for x in inputs]
        if not expected:
            share = UNDECIDED[seen.output.dtype]
            undecided = [
                torch.maximum(MEASURED * torch.finfo(x.dtype).eps * bound[pair], share * peak(x))
                / noise_of(x.dtype)
                for x, bound in zip(inputs, seen.bounds, strict=True)
            ]
        is_apart = bool(changes(pieces, inputs, undecided).any())
        if expected and not is_apart:
            raise step.refusal("a traced breakpoint is none of the network's")
        if is_apart and not expected:
            raise step.refusal("a unit crosses a boundary that the trace has not")
