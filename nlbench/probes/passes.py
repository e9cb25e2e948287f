"""The passes: one module a probe, which takes a subject and shows it to measures.

Each has ``steps(size, settings)``, how many steps a pass over that many samples will
count, and ``show(subject, listeners, settings, means, step, shown)``, which looks once
and tells every listener; what it looked at goes into ``shown``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from nlbench.options import OptionValue

__all__ = ["Listener", "ProbeSettings", "Resources", "Step"]


ProbeSettings = Mapping[str, OptionValue]


class Listener(Protocol):
    """A measure, as a pass sees it: what it raises is kept from the pass."""

    def update(self, observation: object) -> None:
        """Take in one look."""


class Step(Protocol):
    """Told after each batch or segment, for progress."""

    def __call__(self) -> None:
        """Count one more."""


@dataclass(frozen=True)
class Resources:
    """What a pass may use; none of it changes a number.

    Parameters
    ----------
    device : torch.device
    memory : int or None
        Bytes that the pass may use beside the model; None: a sensible share of what is free.
    found : dict of str to int
        Sizes that were found to fit, by what they are of; kept for the next passes of the run.
    """

    device: torch.device
    memory: int | None = None
    found: dict[str, int] = field(default_factory=dict)
