"""The probe `lines`: the network restricted to straight segments of input space."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lines import trace_segment, trace_segments
    from .trace import SegmentTrace

__all__ = ["SegmentTrace", "trace_segment", "trace_segments"]

_HOMES = {"SegmentTrace": "trace", "trace_segment": "lines", "trace_segments": "lines"}


def __getattr__(name: str) -> Any:
    # Planning a run reads this package's options without PyTorch.
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
