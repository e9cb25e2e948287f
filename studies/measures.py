"""The benchmark of measures: which measures see planted nonlinearity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy import stats

from nlbench import registry
from nlbench.citation import Source
from nlbench.errors import NlbenchError
from nlbench.plugins import load_measure
from nlbench.reports.agreement import within_groups
from nlbench.reports.leaderboard import CONFIDENCE, sense_of
from nlbench.request import ExecutionOptions, Request
from nlbench.serialization.fields import to_plain

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import page_figure
from .framework.verdicts import above, within
from .shared.ladders import LADDERS, RELU_RUNG, SEEDS, TWIN_LADDER, Ladder, weights_of
from .shared.orders import MIN_TAU, Order, is_constant, order_of, round_digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from nlbench.store.record import Record


SAMPLES = 256
NORMALIZED = ("range", "chord")
BATCHES = {f"{probe}.batch": 32 for probe in ("sites", "function", "outputs", "graph")}
MAX_DEPARTURE = 1e-6
"""Relative departure of values on affine networks that counts as exact."""
MAX_CHANGE = 1e-3
"""Relative change of a value that counts as invariance."""
MIN_TRAIN_ACCURACY = 0.95
"""Training accuracy from which labels count as learnt."""
LEAST_OF_THREE = ((1 - CONFIDENCE) / 2) ** (1 / 3)
"""Lower bound on the share of all seeds that agree if three of three do."""
FITS = "How well the trained networks fit"


class Measures(Study):
    """Every measure on ladders of networks whose order is known in advance."""

    question = "Which measures see nonlinearity that was planted, and what does it cost?"
    source = Source("", "ours; ladders and criteria are in docs/benchmark.md")
    needs = "trains about 60 small networks"
    minutes, quick_minutes = 12.0, 3.0
    takes = ("seeds", "measures")

    def measure(self, context: Context) -> Runs:
        """Measure every rung of every ladder, one run per ladder."""
        names = context.measures or tuple(registry.entries("measures"))
        requests = {
            name: list(_request_fields(context, ladder))
            for name, ladder in (*LADDERS.items(), (TWIN_LADDER.name, TWIN_LADDER))
            if not (context.quick and ladder.only_full)
        }
        context.train_pending()
        # Costs are compared in seconds, so that measures run one at a time.
        context = replace(context, execution=ExecutionOptions(threads=1))
        runs = {}

        def run(part: str, names: Iterable[str], fields: dict[str, Any]) -> None:
            measures = tuple(dict.fromkeys(names))
            settings = _applicable(fields["settings"], measures, fields["data"][0])
            request = Request(measures, **{**fields, "settings": settings})
            runs[part] = context.run(request, part)

        twins = requests.pop(TWIN_LADDER.name)
        for name, ladder_requests in requests.items():
            for fields in ladder_requests:
                # The cost of accuracy, one forward pass over the samples, is the unit of costs.
                run(name, (*names, "accuracy"), fields)
        for fields in twins:
            settings, half = fields["settings"], fields["samples"] // 2
            run("twins", names, fields)
            run("twins.batches", names, {**fields, "settings": {**settings, **BATCHES}})
            fewer = {"samples": half, "settings": {**settings, "lines.number": 4}}
            run("twins.half", names, {**fields, **fewer})
        return runs

    def analyse(self, runs: Runs) -> Findings:
        """Judge order, exactness, invariance, reliability, agreement and cost."""
        cells = cells_of(runs)
        descriptions = _descriptions(runs)
        orders = {
            (str(measure), ladder): order_of(rows, descriptions[str(measure)])
            for ladder in LADDERS
            for measure, rows in cells[cells.ladder == ladder].groupby("measure", sort=True)
        }
        costs = _costs(runs)
        names = [name for name in descriptions if any(m == name for m, _ in orders)]
        exact = _exactness(cells, descriptions)
        tables = {
            "Order: Kendall's tau by ladder": _order_table(names, orders),
            "Value on each rung: mean over seeds": _rung_table(cells),
            "Exactness at the affine end": exact,
            "Invariance to what should not matter": _invariance(cells, descriptions),
            "Invariances by nlbench check-measure": _declared(names),
            "Reliability: intraclass correlation by ladder": _reliability(names, orders),
            "Agreement: correlation of ranks within ladder and seed": _agreement(
                cells, descriptions
            ),
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


def _request_fields(context: Context, ladder: Ladder) -> Iterable[dict[str, Any]]:
    """Yield the fields of a ladder's requests, one per seed if networks are trained."""
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
        weights = (weights_of(context, rung, each[0]) for rung in rungs)
        yield {
            "models": models,
            "data": (ladder.data,),
            "weights": tuple(dict.fromkeys(weights)),
            "seeds": tuple(each),
            "samples": SAMPLES,
            "settings": settings,
        }


def _applicable(settings: Mapping[str, Any], measures: Sequence[str], data: str) -> dict[str, Any]:
    """Select the settings that a run of these measures on this dataset has."""
    loaded = (load_measure(name) for name in measures)
    owners = {data, *(measure.probe for measure in loaded)}
    return {name: value for name, value in settings.items() if name.partition(".")[0] in owners}


def _judged_values(record: Record) -> Iterable[tuple[str, float]]:
    """Yield the name and value of each judged number of a cell, normalised deviations included."""
    name, summary = record.measure.name, record.result.summary
    yield name, summary.get("value", math.nan)
    if name == "absdev":
        for kind in NORMALIZED:
            yield f"{name} {kind}", summary.get(f"over_{kind}", math.nan)


def cells_of(runs: Runs) -> pd.DataFrame:
    """Return the cells of all ladders as a table.

    Parts are named by the ladder, with a variant after a dot. Rungs count from 0 for the least
    nonlinear.
    """
    ladders = {**LADDERS, TWIN_LADDER.name: TWIN_LADDER}
    rows = []
    for part, run in runs.items():
        name, _, variant = part.partition(".")
        for record in run.records:
            rung, seed = ladders[name].rung_of(record.subject), record.subject.seed
            for measure, value in _judged_values(record):
                status, reason = record.result.status, record.result.reason
                if status == "ok" and math.isnan(value):
                    status, reason = "undefined", "nothing to divide by"
                shown = value if status == "ok" else math.nan
                rows.append((name, variant, rung, seed, measure, shown, status, reason))
    columns = ["ladder", "part", "rung", "seed", "measure", "value", "status", "reason"]
    return pd.DataFrame(rows, columns=columns)


def _descriptions(runs: Runs) -> dict[str, Mapping[str, Any]]:
    """Return the recorded description of each measure; variants share that of their measure."""
    descriptions: dict[str, Mapping[str, Any]] = {}
    for run in runs.values():
        for record in run.records:
            names = (name for name, _ in _judged_values(record))
            descriptions |= dict.fromkeys(names, to_plain(record.measure))
    return dict(sorted(descriptions.items()))


def _order_table(names: Sequence[str], orders: Mapping[tuple[str, str], Order]) -> pd.DataFrame:
    rows = [
        (measure, ladder, order.tau, order.low, order.high, order.seeds, order.word)
        for measure in names
        for ladder in LADDERS
        if (order := orders.get((measure, ladder)))
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
        known = cells[(cells.ladder == ladder.name) & (cells.status == "ok")]
        for (measure, rung), group in known.groupby(["measure", "rung"]):
            label, value = ladder.rungs[int(str(rung))].label, group.value
            rows.append((ladder.name, measure, label, value.mean(), value.std(), len(value)))
    return pd.DataFrame(rows, columns=["ladder", "measure", "rung", "mean", "±seeds", "seeds"])


def _exactness(cells: pd.DataFrame, descriptions: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Compare the values of each measure on affine networks."""
    ends = [name for name, ladder in LADDERS.items() if ladder.is_affine]
    affine = cells[cells.ladder.isin(ends) & (cells.rung == 0)]
    rows = []
    for measure, group in affine.groupby("measure", sort=True):
        values = group.value[group.status == "ok"]
        if not len(values):
            continue
        value = float(values.median())
        departure = float((values - value).abs().max()) / max(1.0, abs(value))
        sense = sense_of(descriptions[str(measure)])
        bound = _affine_bound(descriptions[str(measure)], sense)
        is_exact = ("yes" if departure <= MAX_DEPARTURE else "no") if sense else "no direction"
        at_bound = ""
        if bound is not None:
            at_bound = "yes" if abs(value - bound) <= MAX_DEPARTURE else f"no: {bound:g}"
        rows.append((measure, value, departure, len(values), is_exact, at_bound))
    columns = ["measure", "value", "largest departure", "networks", "exact", "at its bound"]
    return pd.DataFrame(rows, columns=columns)


def _affine_bound(description: Mapping[str, Any], sense: int) -> float | None:
    """Return the bound on the less nonlinear side if it is finite."""
    bounds = description.get("bounds") or [None, None]
    bound = bounds[0] if sense > 0 else bounds[1] if sense < 0 else None
    return float(bound) if isinstance(bound, int | float) and math.isfinite(bound) else None


def _invariance(cells: pd.DataFrame, measures: Iterable[str]) -> pd.DataFrame:
    """Compare values on variants of one function and with other samples."""
    twins = cells[cells.ladder == TWIN_LADDER.name]
    kinds = [rung.label for rung in TWIN_LADDER.rungs[1:]]
    rows = []
    for measure in measures:
        measured = twins[twins.measure == measure]
        variants = measured[~measured.part.isin(["batches", "half"])]
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
    """Report whether values are kept, and by how much they change."""
    both = pd.concat([plain, other], axis=1, keys=["plain", "other"]).dropna()
    if not len(both):
        return ""
    change = (both.other - both.plain).abs()
    scale = both.plain.abs().clip(lower=1e-12)
    share = float((change / scale).max()) if float(change.max()) > 1e-9 else 0.0
    is_kept = share <= MAX_CHANGE or bool((change <= allowed).all())
    return f"{'kept' if is_kept else 'broken'} ({share:.1%})" if share else "kept"


def _declared(names: Sequence[str]) -> pd.DataFrame:
    """Return the invariance checks of `check_measure` for the installed measures."""
    from nlbench.conformance import check_measure

    head, rows = "invariant to ", []
    for name in names:
        plain, _, normalize = name.partition(" ")
        settings = {f"{plain}.normalize": normalize} if normalize else {}
        try:
            checks = check_measure(registry.load("measures", plain), settings)
        except NlbenchError:
            continue
        verdicts = {c.name.removeprefix(head): c.verdict for c in checks if c.name.startswith(head)}
        rows.append({"measure": name, **verdicts})
    return pd.DataFrame(rows).fillna("")


def _agreement(cells: pd.DataFrame, descriptions: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Correlate ranks of each pair of measures with a direction, within ladder and seed."""
    known = cells[cells.ladder.isin(LADDERS) & (cells.status == "ok")]
    all_senses = {name: sense_of(description) for name, description in descriptions.items()}
    senses = {name: sense for name, sense in all_senses.items() if sense}
    wide = known[known.measure.isin(senses)].pivot_table(
        index=["ladder", "seed", "rung"], columns="measure", values="value"
    )
    wide = wide.map(round_digits) * pd.Series(senses)
    groups = [group for _, group in wide.groupby(level=["ladder", "seed"])]
    rows = []
    for a in wide.columns:
        row: dict[str, Any] = {"measure": a}
        for b in wide.columns:
            pairs = []
            for group in groups:
                both = group[[a, b]].dropna() if a != b else group[[a]].dropna()
                if len(both) > 2 and not any(is_constant(both[name]) for name in both):
                    ranks = both.rank()
                    pairs.append((ranks[a].to_numpy(), ranks[b].to_numpy()))
            row[b] = within_groups(pairs).value
        rows.append(row)
    return pd.DataFrame(rows)


def _costs(runs: Runs) -> dict[str, tuple[float, float]]:
    """Compute the cost of each measure on one network of `slope`, in seconds and forward passes."""
    seconds: dict[str, list[float]] = {}
    for run in [runs["slope"]] if "slope" in runs else []:
        records = [r for r in run.records if LADDERS["slope"].rung_of(r.subject) == RELU_RUNG]
        by_pass: dict[tuple[str, str], float] = {}
        for r in records:
            key = str(r.subject.key), r.probe.name
            by_pass[key] = by_pass.get(key, 0.0) + r.seconds
        for r in records:
            shared = r.costs.get("wall_seconds", math.nan)
            shared -= by_pass[str(r.subject.key), r.probe.name]
            for measure, _ in _judged_values(r):
                seconds.setdefault(measure, []).append(r.seconds + max(0.0, shared))
    medians = {name: float(np.median(values)) for name, values in seconds.items()}
    one_pass = medians.get("accuracy", math.nan)
    return {
        name: (median, median / one_pass if one_pass > 0 else math.nan)
        for name, median in medians.items()
    }


def _cost_table(names: Sequence[str], costs: Mapping[str, tuple[float, float]]) -> pd.DataFrame:
    rows = [(name, *costs[name]) for name in names if name in costs]
    return pd.DataFrame(rows, columns=["measure", "seconds", "as forward passes"])


def _fits(runs: Runs) -> pd.DataFrame:
    """Return the explained variance of fitted networks and the accuracies of trained ones."""
    rows: dict[tuple[str, int, int], tuple[Any, ...]] = {}
    for part, run in runs.items():
        ladder = LADDERS.get(part)
        for record in run.records if ladder else ():
            header = record.subject.weights_metadata or {}
            if ladder is None or "train_accuracy" not in header:
                continue
            rung, seed = ladder.rung_of(record.subject), record.subject.seed
            rows[part, rung, seed] = (
                part,
                ladder.rungs[rung].label,
                *(
                    float(header.get(name, "nan"))
                    for name in ("train_accuracy", "test_accuracy", "explained", "linear_share")
                ),
            )
    columns = ["ladder", "rung", "training accuracy", "test accuracy", "explained", "linear share"]
    table = pd.DataFrame(rows.values(), columns=columns)
    return table.groupby(["ladder", "rung"], sort=False).mean().reset_index()


def _exact_verdicts(exact: pd.DataFrame) -> Iterable[Verdict]:
    judged = exact[exact.exact.isin(["yes", "no"])]
    if not len(judged):
        return
    wrong = judged[judged.exact == "no"]
    listed = ", ".join(f"{row.measure} {row.value:.6g}" for row in judged.itertuples())
    broken = "; not exact: " + ", ".join(wrong.measure) if len(wrong) else ""
    yield Verdict(
        "On affine networks a measure has one value, regardless of their weights",
        "",
        listed + broken,
        within(judged["largest departure"], 0, MAX_DEPARTURE),
        "slope 1 and all channels linear: trained networks and draws of samples differ",
    )


def _ladder_verdicts(
    names: Sequence[str], orders: Mapping[tuple[str, str], Order]
) -> Iterable[Verdict]:
    words = ("recovers", "sees", "can't tell", "inverts")
    for name, ladder in LADDERS.items():
        on_ladder = {m: orders[m, name] for m in names if (m, name) in orders}
        judged = {m: order for m, order in on_ladder.items() if not order.mark}
        if not judged:
            continue
        by_word = {word: [m for m, order in judged.items() if order.word == word] for word in words}
        listed = (
            f"{word}: {', '.join(measures)}" for word, measures in by_word.items() if measures
        )
        marked = [f"{m} ({order.mark})" for m, order in on_ladder.items() if order.mark]
        agrees: bool | None = not by_word["inverts"]
        yield Verdict(
            f"Ladder {name}: every measure that looks at it sees "
            + ("the planted order" if ladder.is_planted else "the published order"),
            "",
            "; ".join(listed),
            None if agrees and by_word["can't tell"] else agrees,
            f"order by seed; not judged: {', '.join(marked) or 'none'}",
        )


_SEEDS_REMARK = "every network and its samples from another seed, trained the same number of epochs"
# Measure, ladder, claim, and what was published.
_CLAIMS = (
    (
        "absdev",
        "trained",
        "Absolute deviation is larger after training than before",
        "1.00 of paths (table 2)",
    ),
    (
        "absdev",
        "augmented",
        "Absolute deviation is larger without augmentation",
        "0.98 to 1.00 of paths (table 2)",
    ),
    (
        "affinity",
        "trained",
        "Training enhances nonlinearity, as affinity has it",
        "in words (figure 11: VGG16 on ImageNet)",
    ),
)


def _claims(
    orders: Mapping[tuple[str, str], Order], cells: pd.DataFrame, fits: pd.DataFrame
) -> Iterable[Verdict]:
    """Judge published claims about single measures on the ladders that test them."""
    known = {key: order for key, order in orders.items() if not math.isnan(order.tau)}
    yield from _noise_claims(known, orders, fits)
    for measure, ladder, claim, published in _CLAIMS:
        if order := known.get((measure, ladder)):
            text, interval = f"τ {order.text}", (order.low, order.high)
            yield Verdict(
                claim,
                published,
                text,
                above(interval),
                _SEEDS_REMARK,
            )
    for ladder in ("slope", "slope-vgg8"):
        if order := known.get(("absdev", ladder)):
            normalized = ", ".join(_normalized_orders(orders, ladder, ""))
            yield Verdict(
                f"Absolute deviation follows nonlinearity where ReLUs are made leaky ({ladder})",
                "reliably and consistently (in words, of trained networks)",
                f"τ {order.text}",
                order.low > 0 and order.tau >= MIN_TAU,
                "agrees if it recovers the order; on the same paths, normalised: "
                f"{normalized or 'none'}",
            )
    yield from _against_affine(cells)


def _normalized_orders(
    orders: Mapping[tuple[str, str], Order], ladder: str, prefix: str
) -> Iterable[str]:
    for kind in NORMALIZED:
        if order := orders.get((f"absdev {kind}", ladder)):
            yield f"{prefix}{kind} {order.text}"


def _noise_claims(
    known: Mapping[tuple[str, str], Order],
    orders: Mapping[tuple[str, str], Order],
    fits: pd.DataFrame,
) -> Iterable[Verdict]:
    """Judge claims about wrong labels, which are undecided if the labels are not learnt."""
    learnt = float(fits[fits.ladder == "noise"]["training accuracy"].min())
    is_learnt = not learnt < MIN_TRAIN_ACCURACY
    remark = f"{_SEEDS_REMARK}; at least {learnt:.1%} of the labels, right and wrong, are learnt"
    if order := known.get(("absdev", "noise")):
        normalized = "; ".join(_normalized_orders(orders, "noise", "absdev "))
        yield Verdict(
            "Absolute deviation grows with the share of wrong labels",
            "0.99 to 1.00 of paths (table 2)",
            f"τ {order.text}",
            above((order.low, order.high)) if is_learnt else None,
            f"{remark}; without the logits' scale: {normalized}",
        )
    if order := known.get(("density", "noise")):
        is_decided = is_learnt and not order.low <= 0 <= order.high
        yield Verdict(
            "Density of linear regions does not rank shares of wrong labels",
            "0.00 to 1.00 of paths (table 2)",
            f"τ {order.text}",
            order.high < 0 if is_decided else None,
            f"{remark}; a small network on small images, the paper's are CIFAR's",
        )


def _against_affine(cells: pd.DataFrame) -> Iterable[Verdict]:
    """Test whether nonlinear networks exceed nlc's value of affine networks."""
    known = cells[cells.ladder.isin(["slope", "slope-vgg8"]) & (cells.measure == "nlc")]
    values = known[(known.rung == RELU_RUNG) & (known.status == "ok")].value
    if len(values) < 2:
        return
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * values.std() / len(values) ** 0.5
    low, high = values.mean() - half, values.mean() + half
    yield Verdict(
        "A trained network of ReLUs has a nonlinearity coefficient above the affine value 1",
        "",
        f"{values.mean():.3f} [{low:.3f}, {high:.3f}]",
        above((low, high), 1),
        f"{len(values)} networks and draws; the same networks with slope 1 give 1",
    )


def _remarks(cells: pd.DataFrame) -> list[str]:
    seeds = cells[cells.ladder.isin(LADDERS)].groupby("ladder").seed.nunique()
    failed = cells[cells.status == "failed"]
    few, many = int(seeds.min()), int(seeds.max())
    remarks = [
        "Ladders and criteria are those of docs/benchmark.md, which was written beforehand.",
        f"{few if few == many else f'{few} to {many}'} seeds a ladder. With so few seeds intervals "
        "are wide, unless all seeds agree: then there is none. Three that agree leave it open "
        f"whether {1 - LEAST_OF_THREE:.0%} of all seeds do otherwise (Clopper and Pearson, 95 %).",
        "Seconds depend on the machine and its load.",
    ]
    if len(failed):
        first = failed.iloc[0]
        remarks.append(f"{len(failed)} cells failed, the first of {first.measure}: {first.reason}")
    return remarks


def _figure(
    names: Sequence[str],
    orders: Mapping[tuple[str, str], Order],
    costs: Mapping[str, tuple[float, float]],
) -> Figure:
    ladders = [name for name in LADDERS if any((m, name) in orders for m in names)]
    figure, (left, right) = page_figure(1.7 + 0.27 * len(names), columns=2, width_ratios=(6, 1))
    _draw_orders(figure, left, names, ladders, orders)
    _draw_costs(right, names, costs)
    return figure


# Area in points² of a disc whose interval has no width; one with an interval of all of [-1, 1] has
# a fifth of it.
_DISC_AREA = 130
_SIGNS = {"no direction": "○", "the same on every rung": "·"}


def _draw_orders(
    figure: Figure,
    axes: Axes,
    names: Sequence[str],
    ladders: Sequence[str],
    orders: Mapping[tuple[str, str], Order],
) -> None:
    """Draw a disc per measure and ladder, coloured by tau and sized by its certainty."""
    from matplotlib.lines import Line2D

    places = {
        (m, ladder): (column, row)
        for row, m in enumerate(names)
        for column, ladder in enumerate(ladders)
        if (m, ladder) in orders
    }
    judged = {key: orders[key] for key in places if not orders[key].mark}
    discs = axes.scatter(
        [places[key][0] for key in judged],
        [places[key][1] for key in judged],
        s=[_DISC_AREA * (1 - 0.8 * (order.high - order.low) / 2) for order in judged.values()],
        c=[order.tau for order in judged.values()],
        cmap="RdBu",
        vmin=-1,
        vmax=1,
        edgecolors="0.45",
        linewidths=0.5,
    )
    for key, place in places.items():
        if mark := orders[key].mark:
            axes.text(*place, _SIGNS.get(mark, "×"), ha="center", va="center", color="0.5")
    axes.set_xticks(range(len(ladders)), ladders, rotation=60, ha="right", fontsize=7)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set(xlim=(-0.6, len(ladders) - 0.4), ylim=(len(names) - 0.4, -0.6))
    axes.axvline(sum(LADDERS[name].is_planted for name in ladders) - 0.5, color="0.7", lw=0.8)
    axes.set_title("order recovered: planted | published", fontsize=8)
    bar = figure.colorbar(discs, ax=axes, shrink=0.6, pad=0.01, aspect=30)
    bar.set_label("Kendall's τ", fontsize=7)
    bar.ax.tick_params(labelsize=6)
    disc = {"marker": "o", "mfc": "0.8", "mec": "0.45"}
    signs: dict[str, dict[str, Any]] = {
        "certain": {**disc, "ms": _DISC_AREA**0.5},
        "uncertain": {**disc, "ms": (_DISC_AREA / 5) ** 0.5},
        "declares no direction": {**disc, "ms": 7, "mfc": "none", "mec": "0.5"},
        "same everywhere": {"marker": ".", "ms": 3, "color": "0.5"},
        "no value": {"marker": "x", "ms": 6, "color": "0.5"},
    }
    marks = [Line2D([], [], ls="", **sign) for sign in signs.values()]
    figure.legend(
        marks, list(signs), loc="outside lower center", ncols=5, fontsize=7, frameon=False
    )


def _draw_costs(axes: Axes, names: Sequence[str], costs: Mapping[str, tuple[float, float]]) -> None:
    known = {row: costs[name] for row, name in enumerate(names) if costs.get(name, (0,))[0] > 0}
    axes.barh(list(known), [seconds for seconds, _ in known.values()], color="0.75", height=0.6)
    for row, (seconds, passes) in known.items():
        text = f"{passes:.0f}" if passes >= 9.5 else f"{passes:.1f}"
        axes.text(seconds, row, f" {text}", va="center", fontsize=6.5)
    axes.set_xscale("log")
    axes.set_xlim(right=max((seconds for seconds, _ in known.values()), default=1.0) * 8)
    # Plain numbers, because the page can't render mathematics.
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks([])
    axes.tick_params(labelsize=6.5)
    axes.set_title("seconds (bar)\npasses (number)", fontsize=6.5)
