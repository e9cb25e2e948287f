"""The pass of the probe `function`: the network and its inputs, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nlbench.batches import batch_sizes, rebatched
from nlbench.probes.function import FunctionLook, look_at_function
from nlbench.samples import DrawnBatches
from nlbench.subject import Subject

from . import Listener, Means, ProbeSettings, Step

__all__ = ["show", "steps"]


def steps(size: int, settings: ProbeSettings) -> int:
    """How many batches that many samples make."""
    return -(-size // int(settings["batch"]))


def show(
    subject: Subject,
    listeners: Sequence[Listener],
    settings: ProbeSettings,
    means: Means,
    step: Step,
    shown: dict[str, Any],
) -> None:
    """Show a subject's model as a function, with batches of its samples in a random order."""

    def on_look(look: FunctionLook) -> None:
        for listener in listeners:
            listener.update(look)

    def batches() -> Iterator[Tensor]:
        for batch in _batches(subject, int(settings["batch"])):
            yield batch.to(means.device)
            step()

    shown["samples"] = look_at_function(
        subject.model, batches(), on_look, memory=means.memory, found=means.found
    )


def _batches(subject: Subject, most: int) -> Iterator[Tensor]:
    """Give batches of nearly equal size, as at sites."""
    stream = getattr(subject, "stream", None)
    if isinstance(stream, DrawnBatches):
        # Its samples were drawn in a random order.
        yield from rebatched(stream, most, stream.known_length)
        return
    # Inputs that come sorted, by class say, would make batches unlike the whole. Of a loader
    # that can be gone through only once they are the first samples.
    order = torch.randperm(len(subject.inputs), generator=torch.Generator().manual_seed(0))
    for part in torch.split(order, list(batch_sizes(len(order), most))):
        yield subject.inputs[part.to(subject.inputs.device)]
