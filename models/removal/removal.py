"""Remove calls of a subject under a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from nlbench.errors import RequestError
from nlbench.options import OptionValue
from nlbench.probes.replacement import find_calls
from nlbench.serialization.files import write_atomically
from nlbench.subjects.subject import Subject

from .criteria import removal_order
from .curve import SHARES, Removal, Step
from .network import removed_network, transform_metadata

SHARE_TOLERANCE = 1e-9
"""Rounding error of a share, which is computed as a sum."""


@dataclass(frozen=True)
class RemovalResult:
    """The curve of a removal and the network that is left.

    Parameters
    ----------
    order : sequence of str
        Names of all calls in order of removal.
    steps : sequence of Step
        From the whole network to the one without any of the calls; without a curve, the whole
        network and the one that is left.
    removed : sequence of str
        Names of the calls removed from the network.
    metadata : mapping of str to str
        For the header of the network's checkpoint.
    """

    order: Sequence[str]
    steps: Sequence[Step]
    removed: Sequence[str]
    network: nn.Module
    metadata: Mapping[str, str]

    @property
    def left(self) -> int:
        """Number of calls that are left."""
        return len(self.order) - len(self.removed)

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per step."""
        return [
            {
                "removed": step.removed,
                **{f"left_{share}": round(step.left[share], 6) for share in SHARES},
                **{
                    name: round(value, 6)
                    for name in ("accuracy", "loss", "kl")
                    if (value := getattr(step, name)) is not None
                },
            }
            for step in self.steps
        ]

    def write_curve(self, file: Path) -> None:
        """Write the rows as CSV."""
        import pandas as pd

        write_atomically(file, pd.DataFrame(self.rows()).to_csv(index=False))


def run_removal(
    train: Subject,
    test: Subject,
    criterion: str,
    *,
    keep: float,
    share: str,
    is_reversed: bool,
    seed: int,
    settings: Mapping[str, OptionValue | str],
    of: str,
    has_curve: bool,
) -> RemovalResult:
    """Remove a subject's calls one after another.

    Parameters
    ----------
    train, test : Subject
        The same network with samples for ranking and fitting, and with samples to measure on.
    criterion : str
        See `nlbench.models.removal.criteria.removal_order`.
    keep : float
        Share of the network to keep.
    share : {"calls", "units", "flops"}
        Weight of the calls in the share.
    is_reversed : bool
        Remove in the opposite order.
    seed : int
        Seed of a random order.
    settings : mapping of str to value
        Options of the criterion.
    of : str
        Kind of places, as for ``sites.of``.
    has_curve : bool
        Measure the network after each removal, including those beyond the requested share.

    Raises
    ------
    nlbench.RequestError
        If the network is transformed already, has no such calls, or the criterion does not rank
        them.
    """
    if transform := (train.facts.weights_metadata or {}).get("transform"):
        raise RequestError(
            f"the network is already transformed ({transform}); remove calls from the original"
        )
    model = train.model
    device = next(model.parameters(), train.inputs).device
    fitting, inputs = train.inputs.to(device), test.inputs.to(device)
    example = fitting[:2]
    calls, is_full = find_calls(model, example, of=of), of != "activations"
    if not calls:
        raise RequestError("the network calls no known activation function")
    order = removal_order(
        criterion,
        model,
        calls,
        train.inputs,
        train.labels,
        seed=seed,
        settings={"sites.of": of, **settings},
    )
    order = order[::-1] if is_reversed else order
    labels = test.labels
    labels = None if labels is None or labels.is_floating_point() else labels.to(device)
    removal = Removal(model, calls, fitting, inputs, labels, is_full=is_full)
    limit = keep + SHARE_TOLERANCE
    counts = range(len(order) + 1)
    count = next(n for n in counts if removal.left(order[:n])[share] <= limit)
    removed = order[:count]
    steps = removal.curve(order) if has_curve else [removal.step(names) for names in ([], removed)]
    maps = removal.maps(removed)
    metadata = {**(train.facts.weights_metadata or {}), "removed_by": criterion}
    if removed:
        metadata |= transform_metadata(list(maps), of)
    network = removed_network(model, maps, example, of)
    return RemovalResult(order, steps, removed, network, metadata)
