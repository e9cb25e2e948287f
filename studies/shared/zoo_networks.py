"""Trained networks from the zoo, each measured on its own data, for studies of signatures."""

from __future__ import annotations

from collections.abc import Sequence

from nlbench.models.zoo.catalogue import MEMBERS
from nlbench.request import Request
from nlbench.store.run import Run
from nlbench.studies.framework import Context, Runs

PART = "zoo"


def measure_zoo(
    context: Context,
    names: Sequence[str],
    measures: Sequence[str] = ("affinity",),
    weights: Sequence[str] = ("trained",),
) -> dict[str, Run]:
    """Measure the networks whose packages are installed, if any, as the part ``zoo``."""
    models = tuple(f"zoo/{name}" for name in names if not MEMBERS[name].problem)
    if not models:
        return {}
    request = Request(tuple(measures), models, weights=tuple(weights), samples=0)
    return {PART: context.run(request, PART)}


def zoo_remarks(runs: Runs, names: Sequence[str]) -> list[str]:
    """Return remarks on the data for the zoo networks and on networks that were not measured."""
    records = runs[PART].records if PART in runs else []
    data = {r.subject.model.removeprefix("zoo/"): r.subject.data for r in records}
    remarks = []
    if data:
        listed = ", ".join(f"{name} on {text}" for name, text in data.items())
        remarks.append(f"Trained networks of the zoo, each on its own data: {listed}.")
    for name in names:
        if name not in data:
            reason = MEMBERS[name].problem or "not part of the quick version"
            remarks.append(f"zoo/{name} was not measured: {reason}.")
    return remarks
