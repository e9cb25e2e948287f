"""Whether a trace is what the network does: a comparison with runs of the network itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .program import Program, check_values
from .segment import SegmentTrace

__all__ = ["check_trace"]

CHECKED = 5
"""In how many regions, besides the widest, a trace is compared with the network."""


def check_trace(program: Program, network: nn.Module, points: Tensor, trace: SegmentTrace) -> None:
    """Compare a trace with the network itself, at both ends and inside a few regions.

    Parameters
    ----------
    program : nlbench.probes.program.Program
        Of the network.
    network : torch.nn.Module
        In the dtype of the points.
    points : tensor of shape (2, *input)
        The segment's ends.
    trace : nlbench.probes.segment.SegmentTrace

    Raises
    ------
    nlbench.UnsupportedOperation
        If the network gives other values.
    """
    spread = torch.arange(CHECKED) * trace.regions // CHECKED + trace.regions // (2 * CHECKED)
    widest = trace.t.diff().argmax().reshape(1)
    left = torch.unique(torch.cat([spread.to(widest.device), widest]))
    # Between sampled breakpoints the network is not the line through its values.
    right = left if trace.method == "sampling" else left + 1
    t = torch.cat([trace.t[[0, -1]], (trace.t[left] + trace.t[right]) / 2])
    values = torch.cat([trace.values[[0, -1]], (trace.values[left] + trace.values[right]) / 2])
    weight = t.reshape(-1, *[1] * (points.ndim - 1)).to(points.dtype)
    inputs = torch.lerp(points[:1], points[1:], weight)
    check_values(program, network, inputs, values, trace.values, slack=_slack(trace))


def _slack(trace: SegmentTrace) -> float:
    """How far a walk's values may be off: by its t, and by what it passed over."""
    if trace.method != "adaptive":
        return 0.0
    steepest = float((trace.values.diff(dim=0) / trace.t.diff()[:, None]).abs().max())
    passed = trace.notes["sensitivity"] if trace.notes["shorter_than_sensitivity"] else 0.0
    return (2 * passed + 16 * trace.precision) * steepest
