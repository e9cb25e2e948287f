"""The probe `graph`: the channel graph from input to output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from nlbench import lazy_exports
from nlbench.options import Option
from nlbench.probes import Listener, Probe, ProbeOptions, Resources, Samples, Step

if TYPE_CHECKING:
    from torch import nn

    from .channel_graph import ChannelGraph, counted_lengths, walked_length

__all__ = [
    "GRAPH",
    "ChannelGraph",
    "Graph",
    "counted_lengths",
    "walked_length",
]


class Graph(Probe):
    """The probe `graph`."""

    name = "graph"
    description = "the channel graph from input to output"
    options: ClassVar[Mapping[str, Option]] = {
        "batch": Option(
            64, "samples a batch, where a measure asks for samples", minimum=1, maximum=1e9
        )
    }

    def observe(
        self,
        model: nn.Module,
        samples: Samples,
        options: ProbeOptions,
        listeners: Sequence[Listener],
        *,
        resources: Resources,
        step: Step,
        facts: dict[str, Any],
    ) -> None:
        """See `nlbench.probes.Probe.observe`."""
        from .graph import observe

        observe(model, samples, options, listeners, resources, step, facts)


GRAPH = Graph()
"""The channel graph from input to output."""

# Planning a run reads the options above without PyTorch.
__getattr__ = lazy_exports(
    __name__,
    {
        "ChannelGraph": "channel_graph",
        "counted_lengths": "channel_graph",
        "walked_length": "channel_graph",
    },
)
