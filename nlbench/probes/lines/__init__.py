"""The probe `lines`: the network restricted to straight segments in input space.

`recording` converts a network into a program, and `rules` defines how operations act on segments.
`exact` finds all breakpoints, `estimation` counts crossings on grids, and `quadrature` integrates
networks without breakpoints. `api` is the Python interface, and `paths` constructs the segments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nlbench.lazy import lazy_imports

from .lines_probe import LINES as LINES

if TYPE_CHECKING:
    # Imported lazily, since planning a run does not require PyTorch.
    from .api import estimate_segment as estimate_segment
    from .api import observe_paths as observe_paths
    from .api import trace_segment as trace_segment
    from .api import trace_segments as trace_segments
    from .chord import ChordParts as ChordParts
    from .chord import chord_parts as chord_parts
    from .planes import Plane as Plane
    from .planes import plane as plane
    from .recording.recorder import untraceable_reason as untraceable_reason
    from .trace import SegmentEstimate as SegmentEstimate
    from .trace import SegmentTrace as SegmentTrace
    from .trace import TracedSegment as TracedSegment
    from .trace import find_breakpoints as find_breakpoints
    from .trace import rounding as rounding
    from .trace import slope_changes as slope_changes

__getattr__, __dir__, __all__ = lazy_imports(__name__)
