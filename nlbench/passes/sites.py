"""The pass of the probe `sites`: batches through the network, every activation to all measures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nlbench.batches import Batches, batch_sizes, rebatched
from nlbench.errors import Undefined
from nlbench.probes.capture import Function, Unreduced
from nlbench.probes.selection import Selection
from nlbench.probes.sites import Site, SiteLook, look_at_sites, remark_on_channels
from nlbench.subject import Subject

from . import Listener, Means, ProbeSettings, Step
from .background import Background, overlap_pays, state_of_chance

__all__ = ["show", "steps"]

# Bytes of looks that may wait for the measures.
WAITING = 2**28


def steps(size: int, settings: ProbeSettings) -> int:
    """How many batches that many samples make.

    Raises
    ------
    nlbench.RequestError
        If the choice of sites can't be read.
    """
    Selection.parse(str(settings["select"]))
    return -(-size // int(settings["batch"]))


def show(
    subject: Subject,
    listeners: Sequence[Listener],
    settings: ProbeSettings,
    means: Means,
    step: Step,
    shown: dict[str, Any],
) -> None:
    """Show every activation call of a subject, batch by batch.

    The measures work in a thread of their own, on one look while the network goes on to the
    next; they get the same looks in the same order whether they do so beside or in turn. In the
    first batch they take turns: if the network, or what yields the samples, draws from the
    global random generators, as measures may, they do so to the end.
    """
    sites: dict[str, Site] = {}
    unseen: dict[str, None] = {}
    functions, names = _functions(listeners)

    def tell(look: SiteLook) -> None:
        for listener, wanted in zip(listeners, names, strict=True):
            listener.update(_with(look, wanted))

    def batches(given: Iterable[Tensor], background: Background[SiteLook]) -> Iterator[Tensor]:
        before = state_of_chance(means.device)
        for number, batch in enumerate(given):
            is_quiet = number == 1 and state_of_chance(means.device) == before
            if is_quiet and overlap_pays(means.device):
                background.let_wait(WAITING)
            yield batch.to(means.device)
            step()

    with Background(tell, _bytes, 0, means.device) as background:

        def on_look(look: SiteLook) -> None:
            sites.setdefault(look.place, look.site)
            background.put(look)

        shown["samples"] = look_at_sites(
            subject.model,
            batches(_batches(subject, int(settings["batch"])), background),
            on_look,
            reduction=str(settings["reduction"]),
            select=str(settings["select"]),
            attention=bool(settings["attention"]),
            functions=functions,
            memory=means.memory,
            found=means.found,
            on_unseen=unseen.setdefault,
        )
    shown["sites"] = len(sites)
    if unseen:
        shown["unseen"] = list(unseen)
    remarks = {name: remark_on_channels([site]) for name, site in sites.items() if site.assumed}
    if remarks and settings["reduction"] == "spatial":
        shown["remarks"] = remarks
    if not sites:
        inside = f", but for those inside {', '.join(unseen)}" if unseen else ""
        raise Undefined(f"the model calls no activation function that is known as one{inside}")


def _batches(subject: Subject, most: int) -> Iterable[Tensor]:
    stream = getattr(subject, "stream", None)
    if isinstance(stream, Batches):
        return rebatched(stream, most, stream.known_length)
    return torch.split(subject.inputs, list(batch_sizes(len(subject.inputs), most)))


def _functions(
    listeners: Sequence[Listener],
) -> tuple[Mapping[str, Function], Sequence[Mapping[str, str]]]:
    """Gather what the measures want of whole tensors, each function once.

    Returns the functions by key, and for each listener the keys by its own names.
    """
    keys: dict[Function, str] = {}
    names = []
    for listener in listeners:
        declared: Mapping[str, Function] = getattr(listener, "unreduced", {})
        names.append({name: keys.setdefault(f, str(len(keys))) for name, f in declared.items()})
    return {key: function for function, key in keys.items()}, names


def _with(look: SiteLook, names: Mapping[str, str]) -> SiteLook:
    """Give a look with what a listener declared, by its own names."""
    if not isinstance(look.unreduced, Unreduced):
        return look
    return replace(look, unreduced=look.unreduced.renamed(names))


def _bytes(look: SiteLook) -> int:
    return look.x.nbytes + look.y.nbytes
