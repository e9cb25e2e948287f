"""What measures say of each site, read from a run's records for the studies of signatures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from nlbench.citation import Source

if TYPE_CHECKING:
    from nlbench.store.run_folder import Run
    from nlbench.subjects.facts import SubjectFacts

__all__ = ["AFFINITY", "signatures", "site_scores"]


AFFINITY = Source(
    citation="Q. Bouniot, I. Redko, A. Mallasto, C. Laclau, O. Struckmeier, K. Arndt, "
    "M. Heinonen, V. Kyrki, S. Kaski. From Alexnet to Transformers: Measuring the Non-linearity "
    "of Deep Neural Networks with Affine Optimal Transport. CVPR, 2025; paper and slides.",
)

_DRAWN = ("init", "calibrated")
"""Weights that nobody trained."""


def site_scores(run: Run, measure: str = "affinity", statistic: str = "value") -> pd.DataFrame:
    """Read a statistic of a measure at every site of every subject.

    Parameters
    ----------
    run : Run
    measure, statistic : str

    Returns
    -------
    DataFrame
        One row a site, in the order of subjects and of call, with the columns ``model``,
        ``weights``, ``state`` (``drawn`` or ``trained``), ``data``, ``seed`` (of the training,
        where there was one that says so), ``draw`` (the seed that drew the samples), ``kind`` (of
        the activation), ``place`` and ``value`` (NaN where the measure is undefined).
    """
    rows = [
        (*subject, record.probe.facts.get("kinds", {}).get(one.place, ""), one.place, value)
        for record in run.records
        if record.measure.name == measure
        for subject in [_named(record.subject)]
        for one in record.result.values
        for value in [one.statistics.get(statistic, math.nan)]
    ]
    columns = ["model", "weights", "state", "data", "seed", "draw", "kind", "place", "value"]
    return pd.DataFrame(rows, columns=columns)


def _named(subject: SubjectFacts) -> tuple[str, str, str, str, int, int]:
    weights, told = subject.weights, subject.weights_metadata or {}
    seed = int(told.get("seed", subject.seed))
    state = "drawn" if weights in _DRAWN else "trained"
    return subject.model, weights, state, subject.data, seed, subject.seed


def signatures(
    table: pd.DataFrame, by: str | list[str]
) -> Iterator[tuple[Any, NDArray[np.float64]]]:
    """Give the signature of each subject: its sites' values in order, without undefined ones.

    Parameters
    ----------
    table : DataFrame
        Of `site_scores`.
    by : str or list of str
        Columns that name a subject.

    Examples
    --------
    >>> table = pd.DataFrame({"model": ["a", "a", "b"], "value": [0.5, math.nan, 1.0]})
    >>> [(name, values.tolist()) for name, values in signatures(table, "model")]
    [('a', [0.5]), ('b', [1.0])]
    """
    for name, rows in table.groupby(by, sort=False):
        values = rows.value.to_numpy(dtype=np.float64)
        values = values[np.isfinite(values)]
        if len(values):
            yield name, values
