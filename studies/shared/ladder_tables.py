"""Tables for the benchmark of measures, computed from its cells."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import rankdata

from nlbench.reports.tables import MeasureInfo
from nlbench.studies.framework import Runs
from nlbench.studies.framework.trends import RESAMPLES

from .ladder_cells import ALL_LADDERS, REFERENCE
from .ladders import AFFINE_MAPS, LADDERS, QUESTIONS, TWIN_LADDER
from .orders import NO_DIRECTION, SEEN, WORDS, Order, round_digits

Descriptions = Mapping[str, MeasureInfo]
Orders = Mapping[tuple[str, str], Order]

MAX_DEPARTURE = 1e-6
"""Maximum relative deviation of values on affine networks that counts as exact."""
MAX_CHANGE = 1e-3
"""Maximum relative change in a value that counts as invariance."""
TARGET_ERROR = 0.02
"""Standard error at which costs are compared, as a fraction of the ladder's spread."""
ORDER_COLUMNS = [
    *("measure", "ladder", "tau", "low", "high", "seeds", "recovered", "p"),
    *("tau against affine residual", "what it does"),
]
TARGET_SECONDS = f"seconds to {TARGET_ERROR * 100:g} %, extrapolated"
COST_COLUMNS = [TARGET_SECONDS, "error / spread after 1 s"]
PRECISION_COLUMNS = ["measure", "ladder", "seconds", "standard error / spread", *COST_COLUMNS]


def order_table(orders: Orders) -> pd.DataFrame:
    """Return the order of each measure on each ladder, one row per order."""
    rows = []
    for (measure, ladder), o in orders.items():
        tests = (o.seeds, o.recovered, min(o.p_rises, o.p_falls))
        rows.append((measure, ladder, o.tau, o.low, o.high, *tests, o.residual_tau, o.word))
    return pd.DataFrame(rows, columns=ORDER_COLUMNS)


def question_table(order: pd.DataFrame, precision: pd.DataFrame) -> pd.DataFrame:
    """Count the ladders of each question that a measure sees, and add its cost on single ladders.

    The affine residual certifies the ladders and is left out.

    Parameters
    ----------
    order, precision : DataFrame
        Results of `order_table` and `precision_table`, possibly with bundled rows.
    """
    seconds = precision.pivot_table(TARGET_SECONDS, "measure", "ladder", sort=False, dropna=False)
    rows = []
    for measure, group in order[order.measure != REFERENCE].groupby("measure", sort=False):
        row: dict[str, Any] = {"measure": measure}
        for question in QUESTIONS:
            names = [n for n, ladder in LADDERS.items() if ladder.question == question]
            row[question] = _count_text(group[group.ladder.isin(names)]["what it does"])
        rows.append(row)
    seconds = seconds.add_prefix(f"{TARGET_SECONDS}, on ")
    return pd.DataFrame(rows).merge(seconds, "left", left_on="measure", right_index=True)


def _count_text(words: pd.Series[Any]) -> str:
    """Summarise verdicts as text: numbers of ladders seen, recovered, inverted and not judged."""
    has_direction = not words.str.endswith(NO_DIRECTION).any()
    counts = Counter(words.str.removesuffix(NO_DIRECTION))
    total = sum(counts[word] for word in WORDS)
    if not total:
        return "–"
    text = f"{counts['recovers'] + counts['sees']} of {total}"
    for word in ("recovers", "inverts"):
        text += f", {word} {counts[word]}" if counts[word] else ""
    text += "" if has_direction else " (no direction declared)"
    return text + (f"; not judged on {len(words) - total}" if len(words) > total else "")


def ladder_table(cells: pd.DataFrame, orders: Orders) -> pd.DataFrame:
    """Return one row per ladder, with the measured affine residuals of its rungs."""
    rows = []
    for name, ladder in LADDERS.items():
        residual = cells[(cells.ladder == name) & (cells.measure == "affine-residual")]
        known = residual[(residual.part == "") & (residual.status == "ok")]
        means = known.groupby("rung").value.mean()
        if not len(means):
            continue
        rungs = ", ".join(rung.label for rung in ladder.rungs)
        residuals = ", ".join(f"{value:.3f}" for value in means)
        order = orders.get(("affine-residual", name))
        seeds = residual.seed.nunique()
        text = order.text if order else ""
        rows.append((name, ladder.question or ladder.kind, rungs, seeds, residuals, text))
    columns = ["ladder", "question", "rungs", "seeds", "affine residual", "τ of the residual"]
    return pd.DataFrame(rows, columns=columns)


def rung_table(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the mean value of each measure on each rung."""
    known = cells[cells.ladder.isin(LADDERS) & (cells.status == "ok") & (cells.part == "")]
    rows = []
    for (name, measure, rung), group in known.groupby(["ladder", "measure", "rung"], sort=False):
        label = LADDERS[str(name)].rungs[int(str(rung))].label
        value = group.value
        rows.append((name, measure, label, value.mean(), value.std(), len(value)))
    return pd.DataFrame(
        rows, columns=["ladder", "measure", "rung", "mean", "sd over seeds", "seeds"]
    )


def precision_table(cells: pd.DataFrame, order: pd.DataFrame) -> pd.DataFrame:
    """Compare measures by cost at equal precision and by precision at equal cost.

    Standard errors are estimated from networks measured twice on different samples, times from
    runs of a single measure. Costs are extrapolated: errors are assumed to fall with the square
    root of the time.

    Parameters
    ----------
    order : DataFrame
        Result of `order_table`; see `clear_unseen_costs`.
    """
    rows = []
    on_ladders = cells[cells.ladder.isin(LADDERS)]
    for (ladder, measure), group in on_ladders.groupby(["ladder", "measure"], sort=False):
        again = group[group.part != ""].set_index(["seed", "rung"])
        first = group[group.part == ""].set_index(["seed", "rung"]).value
        both = pd.concat([first, again.value], axis=1, keys=["first", "again"]).dropna()
        spread = first.groupby("rung").mean().std()
        if len(both) < 2 or not spread > 0:
            continue
        # The difference between two draws has twice the variance of one.
        error = math.sqrt(((both["first"] - both["again"]) ** 2).mean() / 2) / spread
        seconds = float(again.seconds.median())
        # A measurement isn't cheaper than one pass over the samples.
        target_seconds = max(seconds, seconds * (error / TARGET_ERROR) ** 2)
        rows.append((measure, ladder, seconds, error, target_seconds, error * math.sqrt(seconds)))
    return clear_unseen_costs(pd.DataFrame(rows, columns=PRECISION_COLUMNS), order)


def clear_unseen_costs(precision: pd.DataFrame, order: pd.DataFrame) -> pd.DataFrame:
    """Clear the costs on ladders that a measure doesn't see, where the spread may be noise."""
    words = order["what it does"].str.removesuffix(NO_DIRECTION)
    seen = order[words.isin(SEEN)].set_index(["measure", "ladder"]).index
    is_seen = precision.set_index(["measure", "ladder"]).index.isin(seen)
    costs = {name: precision[name].where(is_seen) for name in COST_COLUMNS}
    return precision.assign(**costs)


def exactness_table(cells: pd.DataFrame, descriptions: Descriptions) -> pd.DataFrame:
    """Compare each measure's values on affine networks and for affine maps as activations."""
    ends = [name for name, ladder in LADDERS.items() if ladder.is_affine]
    known = cells[(cells.status == "ok") & (cells.part == "")]
    all_maps = known[known.ladder == AFFINE_MAPS.name]
    affine = known[known.ladder.isin(ends) & (known.rung == 0)]
    rows = []
    for measure, group in affine.groupby("measure", sort=True):
        description = descriptions[str(measure)]
        sense = description.sense
        value = float(group.value.median())
        departure = float((group.value - value).abs().max()) / max(1.0, abs(value))
        bound = _affine_bound(description)
        is_exact = ("yes" if departure <= MAX_DEPARTURE else "no") if sense else "no direction"
        at_bound = ""
        if bound is not None:
            at_bound = "yes" if abs(value - bound) <= MAX_DEPARTURE else f"no: {bound:g}"
        maps = all_maps[all_maps.measure == measure].groupby("rung").value.mean()
        labels = {n: rung.label for n, rung in enumerate(AFFINE_MAPS.rungs)}
        by_map = {labels[int(str(rung))]: mean for rung, mean in maps.items()}
        row = {"measure": measure, "value": value, "largest departure": departure}
        rows.append(
            {**row, "networks": len(group), "exact": is_exact, "at its bound": at_bound, **by_map}
        )
    return pd.DataFrame(rows)


def _affine_bound(description: MeasureInfo) -> float | None:
    """Return the bound on the less nonlinear side, or None if it isn't finite."""
    low, high = description.bounds
    bound = {1: low, -1: high}.get(description.sense)
    return float(bound) if bound is not None and math.isfinite(bound) else None


def invariance_table(cells: pd.DataFrame, measures: Iterable[str]) -> pd.DataFrame:
    """Compare values across variants of one function, in batches, and on half of the samples."""
    twins = cells[cells.ladder == TWIN_LADDER.name]
    kinds = [rung.label for rung in TWIN_LADDER.rungs[1:]]
    rows = []
    for measure in measures:
        measured = twins[twins.measure == measure]
        variants = measured[measured.part == ""]
        plain = variants[variants.rung == 0].set_index("seed").value
        if not plain.notna().any():
            continue
        row: dict[str, str] = {"measure": measure}
        for rung, kind in enumerate(kinds, start=1):
            row[kind] = _change_text(plain, variants[variants.rung == rung].set_index("seed").value)
        others = measured[measured.rung == 0].set_index("seed")
        row["batches of 32"] = _change_text(plain, others[others.part == "batches"].value)
        noise = 2 * float(plain.std()) if len(plain) > 1 else 0.0
        row["half the samples"] = _change_text(plain, others[others.part == "half"].value, noise)
        rows.append(row)
    return pd.DataFrame(rows).fillna("")


def _change_text(plain: pd.Series[Any], other: pd.Series[Any], allowed: float = 0.0) -> str:
    """Report whether values are preserved, and their maximum relative change."""
    both = pd.concat([plain, other], axis=1, keys=["plain", "other"]).dropna()
    if not len(both):
        return ""
    change = (both.other - both.plain).abs()
    scale = both.plain.abs().clip(lower=1e-12)
    relative = float((change / scale).max()) if float(change.max()) > 1e-9 else 0.0
    is_kept = relative <= MAX_CHANGE or bool((change <= allowed).all())
    return f"{'kept' if is_kept else 'broken'} ({relative:.1%})" if relative else "kept"


def agreement_table(cells: pd.DataFrame, descriptions: Descriptions) -> pd.DataFrame:
    """Correlate the ranks of each pair of measures within ladder and seed, with 95% intervals.

    The bootstrap resamples networks with the same ladder and seed together.
    """
    known = cells[cells.ladder.isin(LADDERS) & (cells.status == "ok") & (cells.part == "")]
    all_senses = {name: description.sense for name, description in descriptions.items()}
    senses = {name: sense for name, sense in all_senses.items() if sense}
    wide = known[known.measure.isin(senses)].pivot_table(
        index=["ladder", "seed", "rung"], columns="measure", values="value"
    )
    wide = wide.map(round_digits) * pd.Series(senses)
    groups = [group.to_numpy() for _, group in wide.groupby(level=["ladder", "seed"])]
    names = [str(name) for name in wide.columns]
    texts = {name: {name: "1"} for name in names}
    for index, a in enumerate(names):
        for other, b in enumerate(names[:index]):
            text = _rank_correlation([group[:, [index, other]] for group in groups])
            texts[a][b] = texts[b][a] = text
    rows = []
    for a in names:
        rows.append([a, *(texts[a][b] for b in names)])
    return pd.DataFrame(rows, columns=["measure", *names])


def _rank_correlation(groups: Iterable[NDArray[np.float64]]) -> str:
    """Format the pooled within-group rank correlation with its interval."""
    moments = []
    for group in groups:
        both = group[~np.isnan(group).any(1)]
        if len(both) > 2 and np.ptp(both, axis=0).all():
            ranks = rankdata(both, axis=0)
            x, y = (ranks - ranks.mean(0)).T
            moments.append((x @ y, x @ x, y @ y))
    if len(moments) < 2:
        return ""
    sums = np.array(moments)
    weights = np.random.default_rng(0).multinomial(
        len(sums), [1 / len(sums)] * len(sums), RESAMPLES
    )
    drawn = weights @ sums
    low, high = np.quantile(drawn[:, 0] / np.sqrt(drawn[:, 1] * drawn[:, 2]), [0.025, 0.975])
    xy, xx, yy = sums.sum(0)
    return f"{xy / math.sqrt(xx * yy):.2f} ({low:.2f} to {high:.2f})"


def fit_table(runs: Runs) -> pd.DataFrame:
    """Return the explained variance of fitted networks and the accuracy of trained ones."""
    rows: dict[tuple[str, int, int], tuple[Any, ...]] = {}
    names = ("train_accuracy", "test_accuracy", "explained", "linear_share")
    for part, run in runs.items():
        ladder = ALL_LADDERS[part.partition(".")[0]]
        for record in run.records:
            header = record.subject.weights_metadata or {}
            if not {"train_accuracy", "explained"} & set(header):
                continue
            rung = ladder.find_rung(record.subject)
            seed = record.subject.seed
            numbers = (float(header.get(name, "nan")) for name in names)
            rows[ladder.name, rung, seed] = (ladder.name, ladder.rungs[rung].label, *numbers)
    columns = ["ladder", "rung", "training accuracy", "test accuracy", "explained", "linear share"]
    table = pd.DataFrame(rows.values(), columns=columns)
    return table.groupby(["ladder", "rung"], sort=False).mean().reset_index()
