"""The probe `graph`: the channel graph from input to output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from nlbench.options import Option
from nlbench.probes import Listener, Probe, ProbeOptions, Resources, Samples, Step

if TYPE_CHECKING:
    from torch import nn

__all__ = ["GRAPH", "Graph"]


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
