"""Measures that reports derive from others, so that networks can be compared.

Absolute deviation grows with the logits. Divided by the range of the logits it doesn't, so networks
and checkpoints are compared by ``absdev.relative``: the statistic ``over_range`` of absdev.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nlbench.measure.replicates import group_index

if TYPE_CHECKING:
    from .tables import Score

RELATIVE = {"absdev.relative": ("absdev", "over_range")}
"""Base measure and statistic of each derived measure."""


def with_relative(measures: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Add the metadata of derived measures before those that they are computed from."""
    bases = {base: name for name, (base, _) in RELATIVE.items()}
    known: dict[str, Mapping[str, Any]] = {}
    for name, info in measures.items():
        options = info.get("options") or {}
        if name in bases and options.get("normalize", "none") == "none":
            known[bases[name]] = {
                **info,
                "description": f"{name} divided by the range of the logits on each path.",
                "bounds": [0.0, 1.0],
                "scale": "",
                "base": name,
            }
            info = {"scale": "grows with the logits", **info}
        known[name] = info
    return known


def has_relative(name: str, measures: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return True if another measure replaces this one in comparisons."""
    return any(base == name and derived in measures for derived, (base, _) in RELATIVE.items())


def relative_score(score: Score, statistic: str) -> Score:
    """Return a score in which a statistic of paths is the value.

    Its replicates are means over paths without one group each, as those of the value.
    """
    places = tuple(_with_value(place, statistic) for place in score.places)
    relative = replace(_with_value(score, statistic), places=places)
    if relative.status != "ok":
        return relative
    values = [place.value for place in places]
    finite = [value for value in values if math.isfinite(value)]
    ends = {"min": min(finite), "max": max(finite)} if finite else {}
    return replace(
        relative,
        statistics={**relative.statistics, **ends},
        replicates=_leave_groups_out(values) if score.replicates else (),
    )


def _with_value(score: Score, statistic: str) -> Score:
    """Return a score without places whose value is a statistic, without replicates."""
    number = score.statistics.get(statistic, math.nan)
    bare = replace(score, statistics={}, replicates=(), numerical_error=0.0)
    if score.status == "ok" and math.isfinite(number):
        return replace(bare, value=number, statistics={"value": number})
    status = score.status if score.status != "ok" else "undefined"
    reason = score.reason or f"without the statistic {statistic}"
    return replace(bare, value=math.nan, status=status, reason=reason)


def _leave_groups_out(values: list[float]) -> tuple[float, ...]:
    """Return the means of values without one group each, if there are several groups."""
    numbers = np.array(values)
    groups = group_index(np.arange(len(numbers)))
    kept = [numbers[(groups != group) & np.isfinite(numbers)] for group in np.unique(groups)]
    return tuple(float(each.mean()) for each in kept) if all(map(len, kept)) else ()
