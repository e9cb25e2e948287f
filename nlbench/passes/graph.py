"""The pass of the probe `graph`: one channel graph a subject."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nlbench.probes.activity import unit_activity
from nlbench.probes.graph import GraphLook, channel_graph
from nlbench.subject import Subject

from . import Listener, Means, ProbeSettings, Step

__all__ = ["show", "steps"]


def steps(size: int, settings: ProbeSettings) -> int:
    """One, whatever the number of samples: the graph needs none."""
    return 1


def show(
    subject: Subject,
    listeners: Sequence[Listener],
    settings: ProbeSettings,
    means: Means,
    step: Step,
    shown: dict[str, Any],
) -> None:
    """Show the channel graph of a subject.

    The samples are run only if a measure asks how active the units are, once for all.
    """
    graph = channel_graph(subject.model, subject.inputs[:1].to(means.device))
    shown |= {"nodes": graph.nodes, "activation_calls": len(graph.units)}
    found: list[Mapping[str, Tensor]] = []

    def activity() -> Mapping[str, Tensor]:
        if not found:
            parts = -(-len(subject.inputs) // int(settings["batch"]))
            batches = torch.tensor_split(subject.inputs, parts)
            on_device = (batch.to(means.device) for batch in batches)
            found.append(unit_activity(subject.model, graph, on_device))
        return found[0]

    look = GraphLook(graph, activity, len(subject.inputs))
    for listener in listeners:
        listener.update(look)
    step()
