"""Site scores from the records of a run, for studies of signatures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from nlbench.citation import Source
from nlbench.store.run import Run
from nlbench.studies.framework import Verdict
from nlbench.studies.framework.verdicts import in_most_networks
from nlbench.subjects.facts import SubjectFacts

AFFINITY = Source(
    citation="Q. Bouniot, I. Redko, A. Mallasto, C. Laclau, O. Struckmeier, K. Arndt, "
    "M. Heinonen, V. Kyrki, S. Kaski. From Alexnet to Transformers: Measuring the Non-linearity "
    "of Deep Neural Networks with Affine Optimal Transport. CVPR, 2025; paper and slides."
)


def site_scores(run: Run, measure: str = "affinity", statistic: str = "value") -> pd.DataFrame:
    """Read a statistic of a measure at every site of every subject.

    Returns
    -------
    DataFrame
        One row per site, ordered by subject and by call, with the columns ``model``,
        ``weights``, ``state`` (``drawn`` or ``trained``), ``data``, ``seed`` (of training, if
        recorded), ``draw`` (the seed of the samples), ``kind`` (of the activation), ``place``
        and ``value`` (NaN if the measure is undefined).
    """
    rows = []
    for record in run.records:
        if record.measure.name == measure:
            subject = _subject_columns(record.subject)
            kinds = record.probe.facts.get("kinds", {})
            for site in record.result.values:
                value = site.numbers.get(statistic, math.nan)
                rows.append((*subject, kinds.get(site.place, ""), site.place, value))
    columns = ["model", "weights", "state", "data", "seed", "draw", "kind", "place", "value"]
    return pd.DataFrame(rows, columns=columns)


def _subject_columns(subject: SubjectFacts) -> tuple[str, str, str, str, int, int]:
    weights = subject.weights
    metadata = subject.weights_metadata or {}
    seed = int(metadata.get("seed", subject.seed))
    state = "drawn" if weights in ("init", "calibrated") else "trained"
    return subject.model, weights, state, subject.data, seed, subject.seed


def signatures(
    table: pd.DataFrame, by: str | list[str]
) -> Iterator[tuple[Any, NDArray[np.float64]]]:
    """Yield each subject's signature: the defined values at its sites, in order.

    The table comes from `site_scores`; the columns in `by` identify a subject.

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


def nearest_shares_group(
    claim: str,
    published: str,
    groups: Sequence[str],
    distances: NDArray[np.float64],
    remark: str,
    unit: str = "networks",
) -> Verdict:
    """Test whether the nearest other signature is in the same group more often than by chance.

    Groups with one signature are excluded. The remark is a template with the field ``chance``. With
    another unit, such as families, each group counts once.
    """
    others = distances + np.diag(np.full(len(groups), np.inf))
    counted = [i for i, group in enumerate(groups) if groups.count(group) > 1]
    hits = [groups[int(others[i].argmin())] == groups[i] for i in counted]
    shares = [(groups.count(groups[i]) - 1) / (len(groups) - 1) for i in counted]
    chance = float(np.mean(shares)) if shares else math.nan
    independent = len(hits) if unit == "networks" else len({groups[i] for i in counted})
    return Verdict(
        claim,
        published,
        f"{sum(hits)} of {len(hits)} networks",
        in_most_networks(hits, independent, chance, unit) if hits else None,
        remark.format(chance=chance),
    )
