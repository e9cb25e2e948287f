"""The probe `graph`: the channel graph from input to output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from nlbench import lazy_exports
from nlbench.options import Option
from nlbench.probes import LazyProbe

if TYPE_CHECKING:
    from .channel_graph import ChannelGraph, counted_lengths, walked_length

__all__ = ["GRAPH", "ChannelGraph", "Graph", "counted_lengths", "walked_length"]


class Graph(LazyProbe):
    """The probe `graph`."""

    name = "graph"
    description = "the channel graph from input to output"
    home = "nlbench.probes.graph.probe"
    options: ClassVar[Mapping[str, Option]] = {
        "batch": Option(
            64, "samples a batch, where a measure asks for samples", minimum=1, maximum=1e9
        )
    }


GRAPH = Graph()
"""The channel graph from input to output."""

# Planning a run reads the options above without PyTorch.
_NAMES = ("ChannelGraph", "counted_lengths", "walked_length")
__getattr__ = lazy_exports(__name__, dict.fromkeys(_NAMES, "channel_graph"))
