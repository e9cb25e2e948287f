"""The benchmark of measures: which of them see nonlinearity that was planted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy import stats

from nlbench import registry
from nlbench.citation import Source
from nlbench.errors import NlbenchError
from nlbench.plan import load_measure
from nlbench.reports.agreement import within_groups
from nlbench.reports.leaderboard import CONFIDENCE, sense_of
from nlbench.request import ExecutionOptions, Request
from nlbench.serialization.fields import written

from .drawing import page_figure
from .ladders import LADDERS, SEEDS, TWIN_LADDER, WHOLE, Ladder, weights_of
from .study import Context, Findings, Study, Verdict, above

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

    from nlbench.store.record import Record
    from nlbench.store.run_folder import Run

__all__ = ["Measures", "Order", "cells_of", "intraclass", "order_of"]


SAMPLES = 256
NORMALIZED = ("range", "chord")
BATCHES = {f"{probe}.batch": 32 for probe in ("sites", "function", "outputs", "graph")}
RECOVERED, EXACT, KEPT, DIGITS = 0.9, 1e-6, 1e-3, 9
LEAST_OF_THREE = ((1 - CONFIDENCE) / 2) ** (1 / 3)
"""Share of all seeds that agree, at least, where three of three do."""
FITS, LEARNT = "How well the trained networks fit", 0.95


class Measures(Study):
    """Every measure on ladders of networks whose order is known beforehand."""

    question = "Which measures see nonlinearity that was planted, and what does it cost?"
    source = Source("", "ours; ladders and criteria are in docs/benchmark.md")
    needs = "trains some 60 small networks"
    minutes, quick_minutes = 12.0, 3.0
    takes = ("seeds", "measures")

    def measure(self, context: Context) -> Mapping[str, Run]:
        """Every rung of every ladder, a run a ladder; beside it absolute deviation normalised."""
        names = context.measures or tuple(registry.entries("measures"))
        asked = {
            name: list(_subjects(context, ladder))
            for name, ladder in (*LADDERS.items(), (TWIN_LADDER.name, TWIN_LADDER))
            if not (context.quick and ladder.only_full)
        }
        context.train()
        # Their costs are compared in seconds: one at a time.
        context = replace(context, execution=ExecutionOptions(threads=1))
        runs: dict[str, Run] = {}

        def carry_out(part: str, names: Iterable[str], given: dict[str, Any]) -> None:
            measures = tuple(dict.fromkeys(names))
            settings = _fitting(given["settings"], measures, given["data"][0])
            request = Request(measures, **{**given, "settings": settings})
            runs[part] = context.run(request, part)

        twins = asked.pop(TWIN_LADDER.name)
        for name, requests in asked.items():
            for given in requests:
                # One pass of the network over the samples, to count costs in.
                carry_out(name, (*names, "accuracy"), given)
        for given in twins:
            settings, half = given["settings"], given["samples"] // 2
            carry_out("twins", names, given)
            carry_out("twins.batches", names, {**given, "settings": {**settings, **BATCHES}})
            fewer = {"samples": half, "settings": {**settings, "lines.number": 4}}
            carry_out("twins.half", names, {**given, **fewer})
        return runs

    def analyse(self, runs: Mapping[str, Run]) -> Findings:
        """Order, exactness, invariance, reliability, agreement and cost, from recorded cells."""
        cells = cells_of(runs)
        about = _about(runs)
        orders = {
            (measure, ladder.name): order_of(of, about[measure], ladder)
            for ladder in LADDERS.values()
            for measure, of in _by_measure(cells, ladder.name)
        }
        costs = _costs(runs)
        names = [name for name in about if any(m == name for m, _ in orders)]
        exact = _exactness(cells, about)
        tables = {
            "Order: Kendall's tau by ladder": _order_table(names, orders),
            "Value on each rung: mean over seeds": _rung_table(cells),
            "Exactness at the affine end": exact,
            "Invariance to what should not matter": _invariance(cells, about),
            "What nlbench check-measure says of invariances": _declared(names),
            "Reliability: intraclass correlation by ladder": _reliability(names, orders),
            "Agreement: correlation of ranks within ladder and seed": _agreement(cells, about),
            "Cost of one network": _cost_table(names, costs),
            FITS: _fits(runs),
        }
        verdicts = [*_exact_verdicts(exact), *_ladder_verdicts(names, orders)]
        verdicts += _claims(orders, cells, tables[FITS])
        return Findings(
            verdicts,
            {title: table for title, table in tables.items() if len(table)},
            {"Measures by ladders": _figure(names, orders, costs)},
            _remarks(cells),
        )


def _subjects(context: Context, ladder: Ladder) -> Iterable[dict[str, Any]]:
    """What requests are given for a ladder, one a seed where networks are trained."""
    rungs = ladder.chosen(quick=context.quick)
    models = tuple(dict.fromkeys(rung.model for rung in rungs))
    settings = {"lines.tolerance": 0.01, **ladder.settings}
    if ladder.data == "digits":
        settings["lines.number"] = 1 if context.quick else 2
    else:
        settings |= {"lines.paths": "pairs", "lines.number": 8}
    seeds = context.seeds or ladder.seeds[: len(SEEDS) if context.quick else None]
    is_drawn = all(rung.weights in ("init", "trained") for rung in rungs)
    for each in [seeds] if is_drawn else [(seed,) for seed in seeds]:
        found = (weights_of(context, ladder, rung, each[0]) for rung in rungs)
        weights = tuple(dict.fromkeys(found))
        yield {
            "models": models,
            "data": (ladder.data,),
            "weights": weights,
            "seeds": tuple(each),
            "samples": SAMPLES,
            "settings": settings,
        }


def _fitting(settings: Mapping[str, Any], measures: Sequence[str], data: str) -> dict[str, Any]:
    """Those of the settings that a run of these measures on this dataset has."""
    loaded = (load_measure(name) for name in measures)
    owners = {data, *(measure.probe for measure in loaded)}
    return {name: value for name, value in settings.items() if name.partition(".")[0] in owners}


def _judged(record: Record) -> Iterable[tuple[str, float]]:
    """What is judged of a cell, by name: its value, and of absolute deviation what has no units."""
    name, summary = record.measure.name, record.result.summary
    yield name, summary.get("value", math.nan)
    if name == "absdev":
        for kind in NORMALIZED:
            yield f"{name} {kind}", summary.get(f"over_{kind}", math.nan)


def cells_of(runs: Mapping[str, Run]) -> pd.DataFrame:
    """Give the cells of all ladders as a table.

    Parameters
    ----------
    runs : mapping of str to Run
        By the ladder's name, with a variant after a dot.

    Returns
    -------
    DataFrame
        Columns ``ladder, part, rung, seed, measure, value, status, reason``; `rung` counts from
        0 for the least nonlinear.
    """
    ladders = {**LADDERS, TWIN_LADDER.name: TWIN_LADDER}
    rows = []
    for part, run in runs.items():
        name, _, variant = part.partition(".")
        for record in run.records:
            rung, seed = ladders[name].rung_of(record.subject), record.subject.seed
            for measure, value in _judged(record):
                status, reason = record.result.status, record.result.reason
                if status == "ok" and math.isnan(value):
                    status, reason = "undefined", "nothing to divide by"
                shown = value if status == "ok" else math.nan
                rows.append((name, variant, rung, seed, measure, shown, status, reason))
    columns = ["ladder", "part", "rung", "seed", "measure", "value", "status", "reason"]
    return pd.DataFrame(rows, columns=columns)


def _about(runs: Mapping[str, Run]) -> dict[str, Mapping[str, Any]]:
    """What is recorded of each measure, a variant behind the measure itself."""
    found: dict[str, Mapping[str, Any]] = {}
    for run in runs.values():
        for record in run.records:
            found |= dict.fromkeys((m for m, _ in _judged(record)), written(record.measure))
    return dict(sorted(found.items()))


def _by_measure(cells: pd.DataFrame, ladder: str) -> Iterable[tuple[str, pd.DataFrame]]:
    for measure, of in cells[cells.ladder == ladder].groupby("measure", sort=True):
        yield str(measure), of


@dataclass(frozen=True)
class Order:
    """How a measure orders a ladder.

    Parameters
    ----------
    tau : float
        Kendall's tau-b between rung and value, the mean over seeds; NaN where there is none.
    low, high : float
        Its 95 % interval.
    seeds : int
    icc : float
        Intraclass correlation of values: rungs against seeds.
    mark : str
        Why it is not judged; empty if it is.

    Examples
    --------
    >>> Order(0.95, 0.8, 1.0, 3, 0.9).word, Order(0.0, -0.4, 0.4, 3, 0.1).word
    ('recovers', "can't tell")
    """

    tau: float
    low: float
    high: float
    seeds: int
    icc: float
    mark: str = ""

    @property
    def word(self) -> str:
        """What it does: recovers, sees or inverts the order, can't tell, or why not judged."""
        if self.mark:
            return self.mark
        if self.low > 0:
            return "recovers" if self.tau >= RECOVERED else "sees"
        return "inverts" if self.high < 0 else "can't tell"

    @property
    def text(self) -> str:
        """The numbers; seeds that agree exactly leave no spread to make an interval of.

        Examples
        --------
        >>> Order(0.95, 0.8, 1.0, 3, 0.9).text, Order(1.0, 1.0, 1.0, 3, 0.9).text
        ('0.95 [0.80, 1.00]', '1.00 in each of 3 seeds')
        """
        if math.isnan(self.tau):
            return "–"
        if self.low == self.high:
            return f"{self.tau:.2f} in each of {self.seeds} seeds"
        return f"{self.tau:.2f} [{self.low:.2f}, {self.high:.2f}]"


def order_of(cells: pd.DataFrame, about: Mapping[str, Any], ladder: Ladder) -> Order:
    """Say how one measure orders one ladder.

    Parameters
    ----------
    cells : DataFrame
        The measure's on the ladder, see `cells_of`.
    about : mapping
        The measure, as it is recorded.
    ladder : Ladder

    Examples
    --------
    >>> cells = pd.DataFrame({"rung": [0, 1, 2] * 2, "seed": [0] * 3 + [1] * 3, "status": "ok",
    ...     "value": [3.0, 2.0, 1.0, 5.0, 3.0, 4.0], "reason": ""})
    >>> order = order_of(cells, {"more_means": "less nonlinear"}, LADDERS["slope"])
    >>> round(order.tau, 3), order.seeds
    (0.667, 2)
    """
    known = cells[(cells.status == "ok") & np.isfinite(cells.value)]
    rungs = cells.rung.nunique()
    if known.rung.nunique() < max(2, rungs / 2):
        reasons = [reason for reason in cells.reason[cells.status != "ok"] if reason]
        return Order(math.nan, math.nan, math.nan, 0, math.nan, _short(reasons))
    values = known.value.map(_rounded)
    if _is_constant(values):
        return Order(math.nan, math.nan, math.nan, 0, math.nan, "the same on every rung")
    sense = sense_of(about) or 1
    taus = [
        _tau(of.rung, sense * values[of.index]) for _, of in known.groupby("seed") if len(of) > 1
    ]
    tau = float(np.mean(taus))
    low, high = _interval(taus)
    table = known.pivot_table(index="rung", columns="seed", values="value")
    mark = "" if sense_of(about) else "no direction"
    return Order(tau, low, high, len(taus), intraclass(table.dropna().to_numpy()), mark)


def _short(reasons: Sequence[str]) -> str:
    return (max(set(reasons), key=reasons.count) if reasons else "no value")[:90]


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}") if abs(value) > 10.0**-DIGITS else 0.0


def _is_constant(values: pd.Series[Any]) -> bool:
    return bool((values == values.iloc[0]).all())


def _tau(rungs: pd.Series[Any], values: pd.Series[Any]) -> float:
    """Kendall's tau-b; 0 where a seed has one value on all rungs."""
    if _is_constant(values):
        return 0.0
    return float(stats.kendalltau(rungs, values).statistic)


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's interval of a mean of correlations, cut to [-1, 1]."""
    n = len(values)
    if n < 2:
        return -1.0, 1.0
    half = stats.t.ppf((1 + CONFIDENCE) / 2, n - 1) * np.std(values, ddof=1) / math.sqrt(n)
    middle = float(np.mean(values))
    return max(-1.0, middle - float(half)), min(1.0, middle + float(half))


def intraclass(table: ArrayLike) -> float:
    """Intraclass correlation ICC(1): the share of variance that is between groups.

    Parameters
    ----------
    table : array of shape (groups, k)
        k values a group.

    Returns
    -------
    float
        At most 1; below 0 where groups differ less than their members; NaN where nothing varies
        or there is one member a group.

    References
    ----------
    P. E. Shrout, J. L. Fleiss. Intraclass Correlations: Uses in Assessing Rater Reliability.
    Psychological Bulletin 86, 1979: ICC(1, 1).

    Examples
    --------
    >>> intraclass([[1, 1], [2, 2]]), intraclass([[0, 2], [0, 2]])
    (1.0, -1.0)
    """
    values = np.asarray(table, dtype=np.float64)
    if values.ndim != 2 or min(values.shape) < 2:
        return math.nan
    groups, k = values.shape
    means = values.mean(1)
    between = k * means.var(ddof=1)
    within = ((values - means[:, None]) ** 2).sum() / (groups * (k - 1))
    total = between + (k - 1) * within
    return float((between - within) / total) if total > 0 else math.nan


def _order_table(names: Sequence[str], orders: Mapping[tuple[str, str], Order]) -> pd.DataFrame:
    rows = [
        (measure, ladder, one.tau, one.low, one.high, one.seeds, one.word)
        for measure in names
        for ladder in LADDERS
        if (one := orders.get((measure, ladder)))
    ]
    return pd.DataFrame(
        rows, columns=["measure", "ladder", "tau", "low", "high", "seeds", "what it does"]
    )


def _reliability(names: Sequence[str], orders: Mapping[tuple[str, str], Order]) -> pd.DataFrame:
    rows = [
        (m, *(orders[m, ladder].icc if (m, ladder) in orders else math.nan for ladder in LADDERS))
        for m in names
    ]
    return pd.DataFrame(rows, columns=["measure", *LADDERS])


def _rung_table(cells: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for ladder in LADDERS.values():
        of = cells[(cells.ladder == ladder.name) & (cells.status == "ok")]
        for (measure, rung), group in of.groupby(["measure", "rung"]):
            label, value = ladder.rungs[int(str(rung))].label, group.value
            rows.append((ladder.name, measure, label, value.mean(), value.std(), len(value)))
    return pd.DataFrame(rows, columns=["ladder", "measure", "rung", "mean", "±seeds", "seeds"])


def _exactness(cells: pd.DataFrame, about: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """What measures say of affine networks."""
    ends = [name for name, ladder in LADDERS.items() if ladder.is_affine]
    of = cells[cells.ladder.isin(ends) & (cells.rung == 0)]
    rows = []
    for measure, group in of.groupby("measure", sort=True):
        found = group.value[group.status == "ok"]
        if not len(found):
            continue
        value = float(found.median())
        departure = float((found - value).abs().max()) / max(1.0, abs(value))
        sense = sense_of(about[str(measure)])
        bound = _end(about[str(measure)], sense)
        judged = ("yes" if departure <= EXACT else "no") if sense else "no direction"
        at_bound = (
            "" if bound is None else "yes" if abs(value - bound) <= EXACT else f"no: {bound:g}"
        )
        rows.append((measure, value, departure, len(found), judged, at_bound))
    columns = ["measure", "value", "largest departure", "networks", "exact", "at its bound"]
    return pd.DataFrame(rows, columns=columns)


def _end(about: Mapping[str, Any], sense: int) -> float | None:
    """The finite bound on the less nonlinear side."""
    bounds = about.get("bounds") or [None, None]
    bound = bounds[0] if sense > 0 else bounds[1] if sense < 0 else None
    return float(bound) if isinstance(bound, int | float) and math.isfinite(bound) else None


def _invariance(cells: pd.DataFrame, about: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """How far values move on networks that are one function, and with other samples."""
    twins = cells[cells.ladder == TWIN_LADDER.name]
    kinds = [rung.label for rung in TWIN_LADDER.rungs[1:]]
    rows = []
    for measure in about:
        of = twins[twins.measure == measure]
        own = of[~of.part.isin(["batches", "half"])]
        plain = own[own.rung == 0].set_index("seed").value
        if not plain.notna().any():
            continue
        row: dict[str, str] = {"measure": measure}
        for rung, kind in enumerate(kinds, start=1):
            row[kind] = _moved(plain, own[own.rung == rung].set_index("seed").value)
        others = of[of.rung == 0].set_index("seed")
        row["batches of 32"] = _moved(plain, others[others.part == "batches"].value)
        noise = 2 * float(plain.std()) if len(plain) > 1 else 0.0
        row["half the samples"] = _moved(plain, others[others.part == "half"].value, noise)
        rows.append(row)
    return pd.DataFrame(rows).fillna("")


def _moved(plain: pd.Series[Any], other: pd.Series[Any], allowed: float = 0.0) -> str:
    """Say whether values stay, and by how much they move."""
    both = pd.concat([plain, other], axis=1, keys=["plain", "other"]).dropna()
    if not len(both):
        return ""
    change = (both.other - both.plain).abs()
    scale = both.plain.abs().clip(lower=1e-12)
    share = float((change / scale).max()) if float(change.max()) > 1e-9 else 0.0
    kept = share <= KEPT or bool((change <= allowed).all())
    return f"{'kept' if kept else 'broken'} ({share:.1%})" if share else "kept"


def _declared(names: Sequence[str]) -> pd.DataFrame:
    """What the measures' own checks say, of those that are installed here."""
    from nlbench.conformance import check_measure

    head, rows = "invariant to ", []
    for name in names:
        plain, _, normalize = name.partition(" ")
        settings = {f"{plain}.normalize": normalize} if normalize else {}
        try:
            checks = check_measure(registry.load("measures", plain), settings)
        except NlbenchError:
            continue
        found = {c.name.removeprefix(head): c.verdict for c in checks if c.name.startswith(head)}
        rows.append({"measure": name, **found})
    return pd.DataFrame(rows).fillna("")


def _agreement(cells: pd.DataFrame, about: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Correlate ranks of each pair of measures that have a direction, within ladder and seed."""
    of = cells[cells.ladder.isin(LADDERS) & (cells.status == "ok")]
    senses = {name: sense for name, one in about.items() if (sense := sense_of(one))}
    wide = of[of.measure.isin(senses)].pivot_table(
        index=["ladder", "seed", "rung"], columns="measure", values="value"
    )
    wide = wide.map(_rounded) * pd.Series(senses)
    groups = [group for _, group in wide.groupby(level=["ladder", "seed"])]
    rows = []
    for a in wide.columns:
        row: dict[str, Any] = {"measure": a}
        for b in wide.columns:
            pairs = []
            for group in groups:
                both = group[[a, b]].dropna() if a != b else group[[a]].dropna()
                if len(both) > 2 and not any(_is_constant(both[name]) for name in both):
                    ranks = both.rank()
                    pairs.append((ranks[a].to_numpy(), ranks[b].to_numpy()))
            row[b] = within_groups(pairs).value
        rows.append(row)
    return pd.DataFrame(rows)


def _costs(runs: Mapping[str, Run]) -> dict[str, tuple[float, float]]:
    """Seconds of a measure on one network of `slope`, and as many forward passes as take them."""
    seconds: dict[str, list[float]] = {}
    for run in [runs["slope"]] if "slope" in runs else []:
        records = [r for r in run.records if LADDERS["slope"].rung_of(r.subject) == WHOLE]
        own: dict[tuple[str, str], float] = {}
        for r in records:
            key = str(r.subject.key), r.probe.name
            own[key] = own.get(key, 0.0) + r.seconds
        for r in records:
            shared = r.costs.get("wall_seconds", math.nan)
            shared -= own[str(r.subject.key), r.probe.name]
            for measure, _ in _judged(r):
                seconds.setdefault(measure, []).append(r.seconds + max(0.0, shared))
    medians = {name: float(np.median(found)) for name, found in seconds.items()}
    one = medians.get("accuracy", math.nan)
    return {name: (found, found / one if one > 0 else math.nan) for name, found in medians.items()}


def _cost_table(names: Sequence[str], costs: Mapping[str, tuple[float, float]]) -> pd.DataFrame:
    rows = [(name, *costs[name]) for name in names if name in costs]
    return pd.DataFrame(rows, columns=["measure", "seconds", "as forward passes"])


def _fits(runs: Mapping[str, Run]) -> pd.DataFrame:
    """Share of the target's variance that fitted networks explain; accuracies of trained ones."""
    found: dict[tuple[str, int, int], tuple[Any, ...]] = {}
    for part, run in runs.items():
        ladder = LADDERS.get(part)
        for record in run.records if ladder else ():
            header = record.subject.weights_metadata or {}
            if ladder is None or "train_accuracy" not in header:
                continue
            rung, seed = ladder.rung_of(record.subject), record.subject.seed
            found[part, rung, seed] = (
                part,
                ladder.rungs[rung].label,
                *(
                    float(header.get(name, "nan"))
                    for name in ("train_accuracy", "test_accuracy", "explained", "linear_share")
                ),
            )
    columns = ["ladder", "rung", "training accuracy", "test accuracy", "explained", "linear share"]
    table = pd.DataFrame(found.values(), columns=columns)
    return table.groupby(["ladder", "rung"], sort=False).mean().reset_index()


def _exact_verdicts(exact: pd.DataFrame) -> Iterable[Verdict]:
    judged = exact[exact.exact.isin(["yes", "no"])]
    if not len(judged):
        return
    wrong = judged[judged.exact == "no"]
    said = ", ".join(f"{r.measure} {r.value:.6g}" for r in judged.itertuples())
    broken = "; not exact: " + ", ".join(wrong.measure) if len(wrong) else ""
    yield Verdict(
        "On affine networks a measure has one value, whatever their weights",
        "",
        said + broken,
        not len(wrong),
        "slope 1 and all channels linear: trained networks and draws of samples differ",
    )


def _ladder_verdicts(
    names: Sequence[str], orders: Mapping[tuple[str, str], Order]
) -> Iterable[Verdict]:
    words = ("recovers", "sees", "can't tell", "inverts")
    for name, ladder in LADDERS.items():
        found = {m: orders[m, name] for m in names if (m, name) in orders}
        judged = {m: one for m, one in found.items() if not one.mark}
        if not judged:
            continue
        said = {word: [m for m, one in judged.items() if one.word == word] for word in words}
        ours = "; ".join(f"{word}: {', '.join(which)}" for word, which in said.items() if which)
        unsure = bool(said["can't tell"])
        agrees = None if unsure and not said["inverts"] else not said["inverts"]
        yield Verdict(
            f"Ladder {name}: every measure that looks at it sees "
            + ("the planted order" if ladder.is_planted else "the published order"),
            "",
            ours,
            agrees,
            "order by seed; not judged: "
            + (", ".join(f"{m} ({o.mark})" for m, o in found.items() if o.mark) or "none"),
        )


def _claims(
    orders: Mapping[tuple[str, str], Order], cells: pd.DataFrame, fits: pd.DataFrame
) -> Iterable[Verdict]:
    """What was published of single measures, on the ladders that can tell."""
    learnt = float(fits[fits.ladder == "noise"]["training accuracy"].min())

    def sees(measure: str, ladder: str, claim: str, published: str, remark: str) -> list[Verdict]:
        one = orders.get((measure, ladder))
        if one is None or math.isnan(one.tau):
            return []
        agrees = above(one.low, one.high)
        return [Verdict(claim, published, f"τ {one.text}", agrees, remark)]

    seeds = "every network and its samples from another seed, trained the same number of epochs"
    by_heart = f"at least {learnt:.1%} of the labels, right and wrong, are learnt"
    beside = "; ".join(
        f"absdev {kind} {orders[f'absdev {kind}', 'noise'].text}"
        for kind in NORMALIZED
        if (f"absdev {kind}", "noise") in orders
    )
    for verdict in sees(
        "absdev",
        "noise",
        "Absolute deviation grows with the share of wrong labels",
        "0.99 to 1.00 of paths (table 2)",
        f"{seeds}; {by_heart}; without the logits' scale: {beside}",
    ):
        # Labels that are not learnt make no network of another kind.
        yield replace(verdict, agrees=None) if learnt < LEARNT else verdict
    density = orders.get(("density", "noise"))
    if density is not None and not math.isnan(density.tau):
        yield Verdict(
            "Density of linear regions does not rank shares of wrong labels",
            "0.00 to 1.00 of paths (table 2)",
            f"τ {density.text}",
            None if learnt < LEARNT or density.low <= 0 <= density.high else density.high < 0,
            f"{seeds}; {by_heart}; a small network on small images, the paper's are CIFAR's",
        )
    yield from sees(
        "absdev",
        "trained",
        "Absolute deviation is larger after training than before",
        "1.00 of paths (table 2)",
        seeds,
    )
    yield from sees(
        "absdev",
        "augmented",
        "Absolute deviation is larger without augmentation",
        "0.98 to 1.00 of paths (table 2)",
        seeds,
    )
    yield from sees(
        "affinity",
        "trained",
        "Training enhances nonlinearity, as affinity has it",
        "in words (figure 11: VGG16 on ImageNet)",
        seeds,
    )
    for ladder in ("slope", "slope-vgg8"):
        one = orders.get(("absdev", ladder))
        if one is None or math.isnan(one.tau):
            continue
        others = ", ".join(
            f"{kind} {orders[f'absdev {kind}', ladder].text}"
            for kind in NORMALIZED
            if (f"absdev {kind}", ladder) in orders
        )
        yield Verdict(
            f"Absolute deviation follows nonlinearity where ReLUs are made leaky ({ladder})",
            "reliably and consistently (in words, of trained networks)",
            f"τ {one.text}",
            one.low > 0 and one.tau >= RECOVERED,
            f"agrees if it recovers the order; on the same paths, normalised: {others or 'none'}",
        )
    yield from _against_affine(cells)


def _against_affine(cells: pd.DataFrame) -> Iterable[Verdict]:
    """Whether a nonlinear network lies on the more nonlinear side of nlc's affine value."""
    of = cells[cells.ladder.isin(["slope", "slope-vgg8"]) & (cells.measure == "nlc")]
    values = of[(of.rung == WHOLE) & (of.status == "ok")].value
    if len(values) < 2:
        return
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * values.std() / len(values) ** 0.5
    low, high = values.mean() - half, values.mean() + half
    yield Verdict(
        "A trained network of ReLUs has a nonlinearity coefficient above the affine value 1",
        "",
        f"{values.mean():.3f} [{low:.3f}, {high:.3f}]",
        bool(low > 1) if low > 1 or high < 1 else None,
        f"{len(values)} networks and draws; the same networks with slope 1 give 1",
    )


def _remarks(cells: pd.DataFrame) -> list[str]:
    seeds = cells[cells.ladder.isin(LADDERS)].groupby("ladder").seed.nunique()
    missing = cells[cells.status == "failed"]
    few, many = int(seeds.min()), int(seeds.max())
    said = [
        "Ladders and criteria are those of docs/benchmark.md, which was written beforehand.",
        f"{few if few == many else f'{few} to {many}'} seeds a ladder; with so few an interval is "
        "wide, unless all seeds agree: there is none then. Three that agree leave it open whether "
        f"{1 - LEAST_OF_THREE:.0%} of all seeds do otherwise (Clopper and Pearson, 95 %).",
        "Seconds depend on the machine and on what else it does.",
    ]
    if len(missing):
        first = missing.iloc[0]
        said.append(f"{len(missing)} cells failed, the first of {first.measure}: {first.reason}")
    return said


def _figure(
    names: Sequence[str],
    orders: Mapping[tuple[str, str], Order],
    costs: Mapping[str, tuple[float, float]],
) -> Figure:
    from matplotlib.lines import Line2D

    ladders = [name for name in LADDERS if any((m, name) in orders for m in names)]
    planted = sum(LADDERS[name].is_planted for name in ladders)
    figure, (axes, beside) = page_figure(1.7 + 0.27 * len(names), columns=2, width_ratios=(6, 1))
    found = [(m, ladder, one) for (m, ladder), one in orders.items() if m in names]
    rows, columns = {m: i for i, m in enumerate(names)}, {name: i for i, name in enumerate(ladders)}
    shown = [(columns[name], rows[m], o) for m, name, o in found if not o.mark]
    # A disc of full size has an interval without width, one of a fifth spans all.
    sizes = [130 * (1 - 0.8 * (o.high - o.low) / 2) for *_, o in shown]
    discs = axes.scatter(
        [x for x, *_ in shown],
        [y for _, y, _ in shown],
        s=sizes,
        c=[o.tau for *_, o in shown],
        cmap="RdBu",
        vmin=-1,
        vmax=1,
        edgecolors="0.45",
        linewidths=0.5,
    )
    for measure, name, one in found:
        if one.mark:
            sign = {"no direction": "○", "the same on every rung": "·"}.get(one.mark, "×")
            axes.text(columns[name], rows[measure], sign, ha="center", va="center", color="0.5")
    axes.set_xticks(range(len(ladders)), ladders, rotation=60, ha="right", fontsize=7)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xlim(-0.6, len(ladders) - 0.4)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.axvline(planted - 0.5, color="0.7", lw=0.8)
    axes.set_title("order recovered: planted | published", fontsize=8)
    bar = figure.colorbar(discs, ax=axes, shrink=0.6, pad=0.01, aspect=30)
    bar.set_label("Kendall's τ", fontsize=7)
    bar.ax.tick_params(labelsize=6)
    signs: dict[str, dict[str, Any]] = {
        "certain": {"marker": "o", "ms": 130**0.5, "mfc": "0.8", "mec": "0.45"},
        "uncertain": {"marker": "o", "ms": 26**0.5, "mfc": "0.8", "mec": "0.45"},
        "declares no direction": {"marker": "o", "ms": 7, "mfc": "none", "mec": "0.5"},
        "same everywhere": {"marker": ".", "ms": 3, "color": "0.5"},
        "no value": {"marker": "x", "ms": 6, "color": "0.5"},
    }
    marks = [Line2D([], [], ls="", **sign) for sign in signs.values()]
    figure.legend(
        marks, list(signs), loc="outside lower center", ncols=5, fontsize=7, frameon=False
    )
    known = [name for name in names if name in costs and costs[name][0] > 0]
    beside.barh([rows[n] for n in known], [costs[n][0] for n in known], color="0.75", height=0.6)
    for name in known:
        passes = costs[name][1]
        text = f"{passes:.0f}" if passes >= 9.5 else f"{passes:.1f}"
        beside.text(costs[name][0], rows[name], f" {text}", va="center", fontsize=6.5)
    beside.set_xscale("log")
    beside.set_xlim(right=max((costs[n][0] for n in known), default=1.0) * 8)
    # Plain numbers: pages read no mathematics.
    beside.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    beside.xaxis.set_minor_formatter(lambda value, _: "")
    beside.set_ylim(len(names) - 0.4, -0.6)
    beside.set_yticks([])
    beside.tick_params(labelsize=6.5)
    beside.set_title("seconds (bar)\npasses (number)", fontsize=6.5)
    return figure
