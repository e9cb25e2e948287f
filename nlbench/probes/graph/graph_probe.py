"""The probe `graph` and its options, without PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from nlbench.options import Option
from nlbench.probes import LazyProbe


class Graph(LazyProbe):
    """The probe `graph`."""

    name = "graph"
    runs_samples = False
    needs_one_type = True
    description = "the channel graph from input to output"
    home = "nlbench.probes.graph.graph_observation"
    options: ClassVar[Mapping[str, Option]] = {
        "batch": Option(
            64, "samples per batch, for measures that run samples", minimum=1, maximum=1e9
        )
    }


GRAPH = Graph()
"""The channel graph, from input to output."""
