"""The pass of the probe `sites`: batches through the network, every activation to all measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nlbench.errors import Undefined
from nlbench.probes.sites import Site, SiteLook, look_at_sites, remark_on_channels
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
    """Show every activation call of a subject, batch by batch."""
    sites: dict[str, Site] = {}

    def on_look(look: SiteLook) -> None:
        sites.setdefault(look.place, look.site)
        for listener in listeners:
            listener.update(look)

    def batches() -> Iterator[Tensor]:
        # Of nearly equal size: a last batch of a few samples would weigh as much as a full one.
        parts = steps(len(subject.inputs), settings)
        for batch in torch.tensor_split(subject.inputs, parts):
            yield batch.to(means.device)
            step()

    shown["samples"] = look_at_sites(
        subject.model, batches(), on_look, reduction=str(settings["reduction"])
    )
    shown["sites"] = len(sites)
    remarks = {name: remark_on_channels([site]) for name, site in sites.items() if site.assumed}
    if remarks and settings["reduction"] == "spatial":
        shown["remarks"] = remarks
    if not sites:
        raise Undefined("the model calls no activation function that is known as one")
