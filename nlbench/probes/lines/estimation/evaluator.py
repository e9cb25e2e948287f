"""A network in one precision, evaluated at many points of segments within a memory budget."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from nlbench.errors import NotFinite, UnsupportedOperation
from nlbench.introspection.memory import LiveBytes, usable_memory
from nlbench.introspection.model_copy import typed_copy
from nlbench.probes.lines.recording.agreement import is_same, run_alone
from nlbench.probes.lines.recording.point_memory import PointMemory, share_out
from nlbench.probes.lines.recording.program import ProgramStep
from nlbench.probes.lines.segments import Segment

from .patterns import Margins, Windows
from .piecewise import record_pieces

# Maximum number of points run at a time, and their total memory: enough to keep a device busy.
_MAX_POINTS_CPU = 64
_MAX_POINTS_GPU = 512
_MAX_BYTES_CPU = 2**27
_MAX_BYTES_GPU = 2**30
_MAX_SEGMENTS_CPU = 8
_MAX_SEGMENTS_GPU = 64
SINGLE_THREAD_POINT_BYTES = 2**19
"""Memory for a point below which PyTorch's threads wait longer for each other than they save."""


class Evaluator:
    """A network in one precision, evaluated at points of segments.

    Attributes
    ----------
    batch_points : int
        Number of points to run at a time.
    batch_segments : int
        Number of segments to estimate at a time.
    budget : float
        Available memory in bytes.
    threads : int or None
        Number of PyTorch threads to run it in; None for the current one.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, first: Segment, memory: int | None
    ) -> None:
        ends = torch.stack(first).to(dtype)
        self.network = typed_copy(model, dtype, ends)
        self.dtype = dtype
        self.device = ends.device
        self.piecewise = record_pieces(self.network, ends[:1])
        on_gpu = self.device.type == "cuda"
        max_points, max_bytes = (
            (_MAX_POINTS_GPU, _MAX_BYTES_GPU) if on_gpu else (_MAX_POINTS_CPU, _MAX_BYTES_CPU)
        )
        point_bytes = self._bytes_per_point(ends[:1])
        is_small = not on_gpu and point_bytes < SINGLE_THREAD_POINT_BYTES
        self.threads = 1 if is_small else None
        points = min(max_points, max_bytes // point_bytes)
        # Half of the memory is reserved for patterns.
        needs = PointMemory(point_bytes, point_bytes, 0, 0).times(2)
        _, self.batch_points = share_out(needs, self.device, memory, max(1, points))
        self.budget = usable_memory(self.device, memory)
        # No pattern is stored yet, so if one point fits, two do.
        self._check(torch.cat([ends, ends.mean(0, keepdim=True)])[: max(2, self.batch_points)])
        self.batch_segments = (
            _MAX_SEGMENTS_GPU if on_gpu else max(1, min(_MAX_SEGMENTS_CPU, self.batch_points // 4))
        )

    @torch.inference_mode()
    def _bytes_per_point(self, point: Tensor) -> int:
        """Measure the peak memory for running a point (1, *input) and computing its patterns."""

        def callback(step: ProgramStep, kink: int, pattern: Margins | Windows) -> None:
            if isinstance(pattern, Margins):
                _ = pattern.state, pattern.resting

        with LiveBytes() as live:
            self.piecewise.run(point.clone(), callback)
        peak: int = live.peak
        return max(1, peak)

    def _check(self, points: Tensor) -> None:
        with torch.inference_mode():
            together = self.piecewise.run(points)
        alone = run_alone(self.network, points).reshape(len(points), -1)
        if not is_same(together, alone, self.dtype):
            raise UnsupportedOperation(
                "forward", "the network", "the recorded program does not reproduce its output"
            )

    def outputs(self, segments: Sequence[Segment], t: Sequence[Tensor]) -> list[Tensor]:
        """Return the network's outputs (m, k) at positions (m,) on each segment, in float64."""
        counts = [len(x) for x in t]
        segment_index = torch.arange(len(t)).repeat_interleave(torch.tensor(counts)).to(self.device)
        starts, ends = (torch.stack(x) for x in zip(*segments, strict=True))
        values = self.along(starts, ends, segment_index, torch.cat(list(t)).to(self.device))
        return list(torch.split(values, counts))

    def along(
        self,
        starts: Tensor,
        ends: Tensor,
        segment_index: Tensor,
        t: Tensor,
        callback: Callable[..., None] | None = None,
        rounding: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Run the network at positions t (P,) on the segments (s, *input) with given indices (P,).

        Parameters
        ----------
        callback : callable, optional
            Called with the slice of positions being run and the arguments of a `PatternCallback`.
        rounding : sequence of tensor, optional
            `min_tolerance` and `is_coarse` for each segment, (s, n); see `MeasuredRounding`.

        Returns
        -------
        float64 tensor of shape (P, k)
        """
        outputs = []
        for first in range(0, len(segment_index), self.batch_points):
            rows = slice(first, min(first + self.batch_points, len(segment_index)))
            weight = t[rows].double().to(starts.dtype).reshape(-1, *[1] * (starts.ndim - 1))
            inputs = torch.lerp(starts[segment_index[rows]], ends[segment_index[rows]], weight)
            on_rows = None if callback is None else functools.partial(callback, rows)
            point_rounding = (
                None if rounding is None else [x[segment_index[rows]] for x in rounding]
            )
            output = self.piecewise.run(inputs, on_rows, point_rounding).double()
            if not torch.isfinite(output).all():
                raise NotFinite("the network's output is not finite on the segment")
            outputs.append(output)
        return torch.cat(outputs)
