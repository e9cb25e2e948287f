"""Remove calls from a subject's network to meet a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from nlbench.errors import RequestError
from nlbench.options import OptionValue
from nlbench.probes.replacement import find_calls
from nlbench.subjects.subject import Subject

from .criteria import removal_order, removal_samples
from .curve import CALL_WEIGHTS, Removal, Step
from .network import network_with_maps, transform_metadata

ROUNDING_TOLERANCE = 1e-9
"""Tolerance for rounding error in a fraction that is computed as a sum."""


@dataclass(frozen=True)
class RemovalResult:
    """The result of a removal: the curve and the remaining network.

    Parameters
    ----------
    order : sequence of str
        Names of all calls in order of removal.
    steps : sequence of Step
        From the original network to the one with every call removed; if no curve was requested,
        only the original and the remaining network.
    removed : sequence of str
        Names of the calls removed from `network`.
    metadata : mapping of str to str
        For the header of the network's checkpoint.
    positions : int
        Number of values per sample that all calls of the original network compute.
    """

    order: Sequence[str]
    steps: Sequence[Step]
    removed: Sequence[str]
    network: nn.Module
    metadata: Mapping[str, str]
    positions: int

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per step."""
        return [
            {
                "removed": step.removed,
                "positions": round(step.remaining["positions"] * self.positions),
                **{f"left_{share}": round(step.remaining[share], 6) for share in CALL_WEIGHTS},
                **{
                    name: round(value, 6)
                    for name in ("accuracy", "loss", "kl")
                    if (value := getattr(step, name)) is not None
                },
            }
            for step in self.steps
        ]


def run_removal(
    train: Subject,
    test: Subject,
    criterion: str,
    *,
    keep: float,
    share: str,
    reverse: bool,
    seed: int,
    settings: Mapping[str, OptionValue | str],
    of: str,
    compute_curve: bool,
    keep_relus: int | None = None,
) -> RemovalResult:
    """Remove calls from a subject's network, one at a time.

    Parameters
    ----------
    train, test : Subject
        The same network with samples for ranking and fitting, and with samples for evaluation.
    criterion : str
        See `nlbench.models.removal.criteria.removal_order`.
    keep : float
        Fraction of the network to keep.
    share : {"calls", "units", "positions", "flops"}
        What `keep` is a fraction of.
    reverse : bool
        Remove in the opposite order.
    seed : int
        Seed for the random order.
    settings : mapping of str to value
        Options of the criterion.
    of : str
        What the calls refer to; same values as ``sites.of``.
    compute_curve : bool
        Evaluate the network after each removal, including those beyond the requested fraction.
    keep_relus : int, optional
        Maximum number of positions to keep, in place of `keep` and `share`.

    Raises
    ------
    nlbench.RequestError
        If the network is already transformed or has none of these calls, or if the criterion
        can't rank them.
    """
    if transform := (train.facts.weights_metadata or {}).get("transform"):
        raise RequestError(
            f"the network is already transformed ({transform}); remove calls from the original"
        )
    model = train.model
    fitting, inputs, labels = removal_samples(train, test)
    example = fitting[:2]
    calls = find_calls(model, example, of=of)
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
        reverse=reverse,
    )
    removal = Removal(model, calls, fitting, inputs, labels, is_full=of != "activations")
    positions = removal.total("positions")
    if keep_relus is not None:
        share = "positions"
        keep = keep_relus / (positions or 1.0)
    limit = keep + ROUNDING_TOLERANCE
    counts = range(len(order) + 1)
    count = next(n for n in counts if removal.remaining(order[:n])[share] <= limit)
    removed = order[:count]
    steps = removal.curve(order) if compute_curve else [removal.step(n) for n in ([], removed)]
    maps = removal.maps(removed)
    metadata = {**(train.facts.weights_metadata or {}), "removed_by": criterion}
    if removed:
        metadata |= transform_metadata(list(maps), of)
    network = network_with_maps(model, maps, example, of)
    return RemovalResult(order, steps, removed, network, metadata, int(positions))
