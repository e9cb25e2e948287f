"""The benchmark of measures, which tests every measure on planted nonlinearity."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nlbench import registry
from nlbench.citation import Source
from nlbench.measure.contract import load_measure
from nlbench.parsers import unique
from nlbench.reports.tables import MeasureInfo
from nlbench.request import ExecutionOptions, Request
from nlbench.studies.networks.planted import MAPS

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import COLOURS, draw_intervals, legend_below, page_figure
from .framework.trends import network_interval
from .framework.verdicts import Decision, all_hold, mean_above, mean_near, within
from .shared.benchmark_results import shipped_results
from .shared.ladder_cells import (
    NORMALIZED,
    PARAMETERS,
    REFERENCE,
    read_cells,
    read_descriptions,
    read_residuals,
)
from .shared.ladder_tables import (
    MAX_DEPARTURE,
    TARGET_SECONDS,
    Orders,
    agreement_table,
    exactness_table,
    fit_table,
    invariance_table,
    ladder_table,
    order_table,
    precision_table,
    question_table,
    rung_table,
)
from .shared.ladders import (
    AFFINE_MAPS,
    LADDERS,
    MIN_EXPLAINED,
    QUESTIONS,
    QUICK,
    TWIN_LADDER,
    Ladder,
    request_weights,
)
from .shared.orders import SEEN, WORDS, Order, adjusted, compute_order

SAMPLES = 512
PAIRS = 32
IMAGES = 4
"""For each network: samples, pairs of samples joined by a path, and images with a path of eight
segments around each."""
QUICK_SAMPLES = 128
QUICK_PAIRS = 2
SETTINGS = {"lines.tolerance": 0.01, "length-distortion.sites": False, "local-complexity.traced": 0}
"""Settings of all ladders: only values are compared, so that nothing else is measured."""
TIMED = ("relu", "residual", "sine")
"""Ladders on which costs are measured, at most one per question."""
BATCHES = {f"{probe}.batch": 32 for probe in ("sites", "function", "outputs", "graph")}
MIN_TRAIN_ACCURACY = 0.95
"""Minimum training accuracy for the labels to count as learned."""
MAX_TAU_WITHOUT_ORDER = 0.5
"""Largest size of tau, of an interval over networks, for which there is no order."""
BASELINES = (PARAMETERS, "elementwise-residual")
FITS = "How well the trained networks fit"


class Measures(Study):
    """Every measure on ladders of networks whose order is known in advance."""

    question = "Which measures detect planted nonlinearity, and at what cost?"
    source = Source("", "ours; ladders and criteria are in docs/benchmark.md")
    needs = "trains 121 small networks; nothing if quick"
    minutes = 30.0
    quick_minutes = 1.0
    takes = ("seeds", "measures")

    def measure(self, context: Context) -> Runs:
        """Measure every rung of every ladder, one run per ladder."""
        names = context.measures or tuple(registry.entries("measures"))
        # The affine residual checks the order of every ladder.
        names = tuple(unique((*names, "affine-residual")))
        ladders = [
            ladder for ladder in LADDERS.values() if not context.quick or ladder.name in QUICK
        ]
        requests = {ladder.name: list(build_requests(context, ladder)) for ladder in ladders}
        context.train_pending()
        runs = {}

        def run(part: str, names: tuple[str, ...], fields: Mapping[str, Any]) -> None:
            settings = applicable(fields["settings"], names, fields["data"][0])
            runs[part] = context.run(Request(names, **{**fields, "settings": settings}), part)

        for name, ladder_requests in requests.items():
            for fields in ladder_requests:
                run(name, names, fields)
        for fields in build_requests(context, AFFINE_MAPS):
            run("maps", names, fields)
        for fields in build_requests(context, TWIN_LADDER):
            run("twins", names, fields)
            settings = fields["settings"]
            plain = {**fields, "models": fields["models"][:1]}
            run("twins.batches", names, {**plain, "settings": {**settings, **BATCHES}})
            fewer = {"lines.number": settings["lines.number"] // 2}
            half = {"samples": fields["samples"] // 2, "settings": settings | fewer}
            run("twins.half", names, {**plain, **half})
        if not context.quick:
            # A run of a single measure includes all costs of that measure.
            alone = replace(context, execution=ExecutionOptions(threads=1))
            for ladder in TIMED:
                for measure in names:
                    (fields,) = build_requests(context, LADDERS[ladder], (0, 1, 2, 3))
                    family = LADDERS[ladder].data.partition("/")[0]
                    settings = {**fields["settings"], f"{family}.seed": 1}
                    fields |= {"settings": applicable(settings, (measure,), fields["data"][0])}
                    part = f"{ladder}.{measure}"
                    runs[part] = alone.run(Request((measure,), **fields), part)
        return runs

    def analyse(self, runs: Runs) -> Findings:
        """Assess the order, exactness, invariance, agreement and cost of each measure."""
        cells = read_cells(runs)
        descriptions = read_descriptions(runs)
        orders = _orders(cells, descriptions)
        names = unique(measure for measure, _ in orders)
        shipped, shipped_precision = shipped_results(descriptions)
        measured = order_table(orders)
        order = pd.concat([measured, shipped], ignore_index=True)
        precision = precision_table(cells, measured)
        precision = pd.concat([precision, shipped_precision], ignore_index=True)
        precision = precision.drop_duplicates(["measure", "ladder"], ignore_index=True)
        questions = question_table(order, precision)
        questions["from"] = np.where(questions.measure.isin(shipped.measure), "shipped", "this run")
        exact = exactness_table(cells, descriptions)
        tables = {
            "Measures by questions: ladders seen": questions,
            "Order: Kendall's tau by ladder": order,
            "Ladders: the planted order and the affine residual": ladder_table(cells, orders),
            "Precision and cost": precision,
            "Value on each rung: mean over seeds": rung_table(cells),
            "Exactness on affine networks and maps": exact,
            "Invariance to what should not matter": invariance_table(cells, descriptions),
            "Agreement: correlation of ranks within ladder and seed": agreement_table(
                cells, descriptions
            ),
            FITS: fit_table(runs),
        }
        verdicts = [*_exact_verdicts(exact), *_ladder_verdicts(orders)]
        verdicts += _claim_verdicts(orders, cells, tables[FITS])
        is_full = _is_full(runs)
        return Findings(
            verdicts,
            {title: table for title, table in tables.items() if len(table)},
            {"Criteria by measures": _figure(order if is_full else measured, precision, names)},
            _remarks(cells, list(shipped.measure.unique())),
            headline=_headline(order, precision, names) if is_full else [],
        )


def build_requests(
    context: Context, ladder: Ladder, seeds: tuple[int, ...] = ()
) -> Iterable[dict[str, Any]]:
    """Yield the fields of a ladder's requests, one request per seed if networks are trained."""
    settings = {**SETTINGS, **ladder.settings}
    if ladder.data == "digits":
        settings["lines.number"] = IMAGES
    else:
        pairs = QUICK_PAIRS if context.quick else PAIRS
        settings |= {"lines.paths": "pairs", "lines.number": pairs}
    if context.quick:
        settings["local-complexity.samples"] = 16
    seeds = context.seeds or seeds or ladder.seeds[: 2 if context.quick else None]
    for group in [(seed,) for seed in seeds] if ladder.is_trained else [seeds]:
        # A request combines all models with all weights, so trained rungs are grouped by model.
        weights: dict[tuple[str, ...], list[str]] = {}
        for rung in ladder.rungs:
            file = request_weights(context, rung, group[0])
            weights.setdefault((rung.model,) if ladder.is_trained else (), []).append(file)
        for models, files in weights.items():
            yield {
                "models": models or tuple(unique(rung.model for rung in ladder.rungs)),
                "data": (ladder.data,),
                "weights": tuple(unique(files)),
                "seeds": group,
                "samples": QUICK_SAMPLES if context.quick else SAMPLES,
                "settings": settings,
            }


def applicable(settings: Mapping[str, Any], measures: Sequence[str], data: str) -> dict[str, Any]:
    """Select the settings that apply to a run with the given measures and dataset."""
    probes = (load_measure(name).probe for name in measures)
    owners = {data.partition("/")[0], *measures, *probes}
    return {name: value for name, value in settings.items() if name.partition(".")[0] in owners}


def _orders(cells: pd.DataFrame, descriptions: Mapping[str, MeasureInfo]) -> Orders:
    """Compute the order of each measure on each ladder.

    P-values are adjusted over a measure's planted ladders and, separately, its published ones.
    """
    residuals = {name: read_residuals(cells, name) for name in LADDERS}
    known = cells[(cells.part == "") & cells.ladder.isin(LADDERS)]
    orders: dict[tuple[str, str], Order] = {}
    for measure, rows in known.groupby("measure", sort=True):
        description = descriptions[str(measure)]
        by_ladder = {}
        for name in LADDERS:
            on_ladder = rows[rows.ladder == name]
            if len(on_ladder):
                by_ladder[name] = compute_order(on_ladder, description, residuals[name])
        kinds: dict[str, dict[str, Order]] = defaultdict(dict)
        for name, order in by_ladder.items():
            kinds[LADDERS[name].kind][name] = order
        # The order of a regime is not known, so there is nothing to test.
        evaluated = {n: replace(o, mark=o.mark or "regime") for n, o in kinds["regime"].items()}
        evaluated |= adjusted(kinds["planted"]) | adjusted(kinds["published"])
        orders |= {(str(measure), name): evaluated[name] for name in by_ladder}
    return orders


def _is_full(runs: Runs) -> bool:
    """Return True if every ladder was measured with its own seeds and number of samples."""
    for name, ladder in LADDERS.items():
        subjects = [record.subject for record in runs[name].records] if name in runs else []
        networks = {(ladder.find_rung(subject), subject.seed) for subject in subjects}
        if networks != set(itertools.product(range(len(ladder.rungs)), ladder.seeds)):
            return False
        if any(subject.samples != SAMPLES for subject in subjects):
            return False
    return True


def _headline(order: pd.DataFrame, precision: pd.DataFrame, measured: Sequence[str]) -> list[str]:
    """For each question, name the measures with a direction that see the most ladders.

    They are sorted by cost if all were measured here: seconds depend on the machine.
    """
    seen = order[order["what it does"].isin(SEEN) & (order.measure != REFERENCE)]
    lines = []
    for question, words in QUESTIONS.items():
        ladders = [name for name, ladder in LADDERS.items() if ladder.question == question]
        counts = seen[seen.ladder.isin(ladders)].groupby("measure", sort=False).size()
        if not len(counts):
            continue
        best = list(counts.index[counts == counts.max()])
        timed = [name for name in TIMED if name in ladders]
        costs = precision[precision.ladder.isin(timed)].set_index("measure")[TARGET_SECONDS]
        note = ""
        if costs.reindex(best).notna().all() and set(best) <= set(measured):
            best = list(costs.reindex(best).sort_values(kind="stable").index)
            note = f" (cheapest first on {timed[0]}, by estimates without a test)"
        lines.append(
            f"{words} {counts.max()} of {len(ladders)} ladders are seen by {', '.join(best)}"
            f"{note}; others that declare a direction see fewer, or have no value on some."
        )
    return lines


def _exact_verdicts(exact: pd.DataFrame) -> Iterable[Verdict]:
    if not len(exact):
        return
    evaluated = exact[exact.exact.isin(["yes", "no"])]
    wrong = evaluated[evaluated.exact == "no"]
    yield Verdict(
        "On networks of affine units a measure has one value, regardless of their weights",
        "",
        _count_exceptions(evaluated, wrong),
        within(evaluated["largest departure"], 0, MAX_DEPARTURE),
        "first rungs of all ladders whose units are affine there",
    )
    maps = evaluated[[name for name in MAPS if name in evaluated]].dropna()
    if maps.size:
        departure = maps.sub(maps.iloc[:, 0], axis=0).abs().max(axis=1)
        wrong = evaluated.loc[departure[departure > MAX_DEPARTURE].index]
        yield Verdict(
            "Negation, permutation and rotation of channels have the value of the identity",
            "",
            _count_exceptions(evaluated.loc[maps.index], wrong),
            not len(wrong),
            "affine maps as activations of 16 skewed channels; affinity compares the distributions "
            "of input and output, and counts only positive semidefinite maps as affine",
        )


def _count_exceptions(evaluated: pd.DataFrame, wrong: pd.DataFrame) -> str:
    exceptions = f", but {', '.join(wrong.measure)}" if len(wrong) else ""
    return f"{len(evaluated) - len(wrong)} of {len(evaluated)} measures{exceptions}"


def _ladder_verdicts(orders: Orders) -> Iterable[Verdict]:
    """Test each planted order with the affine residual."""
    for name, ladder in LADDERS.items():
        order = orders.get(("affine-residual", name))
        if order and ladder.kind == "planted":
            listed = []
            for word in WORDS:
                measures = [m for (m, on), o in orders.items() if on == name and o.word == word]
                if measures:
                    listed.append(f"{word}: {', '.join(measures)}")
            yield Verdict(
                f"Ladder {name}: the affine residual recovers the planted order",
                "",
                f"τ {order.text}",
                order.recovery,
                "; ".join(listed),
            )


_SEEDS_REMARK = (
    "every network with a different seed, trained for equally many epochs on the same images; "
    "exact trend test over networks, adjusted by Holm's method"
)
# Measure, ladder, claim and published result.
_CLAIMS = (
    (
        "absdev",
        "noise",
        "Absolute deviation grows with the share of wrong labels",
        "0.99 to 1.00 of paths (table 2)",
    ),
    (
        "absdev",
        "trained",
        "Absolute deviation is larger after training than before",
        "1.00 of paths (table 2)",
    ),
    (
        "absdev",
        "augmented",
        "Absolute deviation is larger without augmentation and weight decay",
        "0.98 to 1.00 of paths (table 2)",
    ),
    (
        "affinity",
        "trained",
        "Training enhances nonlinearity, as affinity has it",
        "in words (figure 11: VGG16 on ImageNet)",
    ),
)
_CNN_LADDERS = ("slope", "random", "omega")


def _claim_verdicts(orders: Orders, cells: pd.DataFrame, fits: pd.DataFrame) -> Iterable[Verdict]:
    """Assess published claims about single measures on the ladders that test them."""
    noise_accuracy = float(fits[fits.ladder == "noise"]["training accuracy"].min())
    for measure, ladder, claim, published in _CLAIMS:
        order = orders.get((measure, ladder))
        if order is None or math.isnan(order.tau):
            continue
        others = (
            f"{kind} {orders[f'absdev {kind}', ladder].text}"
            for kind in NORMALIZED
            if measure == "absdev" and (f"absdev {kind}", ladder) in orders
        )
        is_learned = ladder != "noise" or noise_accuracy >= MIN_TRAIN_ACCURACY
        yield Verdict(
            claim,
            published,
            f"τ {order.text}",
            _rises(order) if is_learned else None,
            "; without the logits' scale: ".join(filter(None, (_SEEDS_REMARK, ", ".join(others)))),
        )
    if (order := orders.get(("density", "noise"))) and not math.isnan(order.tau):
        yield Verdict(
            "Density of linear regions does not rank shares of wrong labels",
            "0.00 to 1.00 of paths, by network (table 2)",
            f"τ {order.text}",
            _has_no_order(order),
            f"{_SEEDS_REMARK}; agrees if the interval of τ lies within ±{MAX_TAU_WITHOUT_ORDER:g}",
        )
    yield from _follows_reliably(orders)
    yield from _compare_with_affine(cells)


def _follows_reliably(orders: Orders) -> Iterable[Verdict]:
    """Test whether absolute deviation recovers every ladder of trained CNNs."""
    found = {name: orders[key] for name in _CNN_LADDERS if (key := ("absdev", name)) in orders}
    if found:
        yield Verdict(
            "Absolute deviation follows nonlinearity in trained CNNs whose units are made linear",
            "reliably and consistently (in words, of trained networks)",
            "; ".join(f"{name}: {order.word}, τ {order.text}" for name, order in found.items()),
            all_hold(order.recovery for order in found.values()),
            "agrees if it recovers each ladder of trained CNNs; fails if it inverts one, or if its "
            "order is not monotone",
        )


def _has_no_order(order: Order) -> Decision:
    """Test whether an order is close to random, by its interval."""
    if order.word in ("recovers", "sees", "inverts"):
        return Decision(False)
    return mean_near(order.taus, 0, MAX_TAU_WITHOUT_ORDER)


def _rises(order: Order) -> bool | None:
    return {"recovers": True, "sees": True, "inverts": False}.get(order.word)


def _compare_with_affine(cells: pd.DataFrame) -> Iterable[Verdict]:
    """Test whether nonlinear networks exceed nlc's value for affine networks."""
    known = cells[(cells.ladder == "slope") & (cells.measure == "nlc") & (cells.part == "")]
    values = known[(known.rung == known.rung.max()) & (known.status == "ok")].value
    if not len(values):
        return
    low, high = network_interval(values)
    yield Verdict(
        "A trained network of ReLUs has a nonlinearity coefficient above the affine value 1",
        "",
        f"{values.mean():.3f} ({low:.3f} to {high:.3f})",
        mean_above(values, 1),
        f"{len(values)} networks, 95% t interval; with slope 1, the same networks give 1",
    )


def _remarks(cells: pd.DataFrame, shipped: Sequence[str]) -> list[str]:
    measured = cells[cells.ladder.isin(LADDERS)].groupby("ladder").seed.nunique()
    few = int(measured.min())
    many = int(measured.max())
    remarks = [
        f"The units are networks: {few if few == many else f'{few} to {many}'} seeds per rung. "
        f"Each network is measured on {SAMPLES} samples ({QUICK_SAMPLES} if quick), along {PAIRS} "
        f"segments between pairs of them ({QUICK_PAIRS} if quick), or around {IMAGES} images by 8 "
        "segments each.",
        "Verdicts follow from exact trend tests within seeds, adjusted by Holm's method over a "
        "measure's planted or published ladders; a recovered order requires at least six "
        "networks.",
        "Seconds depend on the machine and its load. Costs at equal precision are extrapolated and "
        "given only on ladders that the measure sees.",
    ]
    if shipped:
        remarks.append(
            f"Not measured in this run, but bundled from a full study: {', '.join(shipped)}."
        )
    if "fitted" in set(cells.ladder):
        remarks.append(f"Fitted networks that explain under {MIN_EXPLAINED:.0%} are excluded.")
    failed = cells[cells.status == "failed"]
    if len(failed):
        first = failed.iloc[0]
        remarks.append(f"{len(failed)} cells failed, the first for {first.measure}: {first.reason}")
    return remarks


def _mean_orders(order: pd.DataFrame, question: str) -> pd.DataFrame:
    """Average each measure's tau over those ladders of a question on which it is judged.

    Returns
    -------
    DataFrame
        Columns ``tau, low, high`` by measure. The half-width is the mean over the ladders, which is
        conservative because ladders share networks and samples.
    """
    names = [name for name, ladder in LADDERS.items() if ladder.question == question]
    judged = order[order.ladder.isin(names) & order["what it does"].isin(WORDS)]
    judged = judged[judged.measure != REFERENCE]
    return judged.groupby("measure")[["tau", "low", "high"]].mean()


def _figure(order: pd.DataFrame, precision: pd.DataFrame, measured: Sequence[str]) -> Figure:
    """Plot each measure's mean tau and its interval for each question, and its cost by ladder.

    Bundled results, for measures that a full study did not run, have hollow markers.
    """
    by_question = {question: _mean_orders(order, question) for question in QUESTIONS}
    taus = pd.DataFrame({question: means.tau for question, means in by_question.items()})
    names = list(taus.fillna(0).sum(axis=1).sort_values(ascending=False, kind="stable").index)
    figure, panels = page_figure(1.1 + 0.22 * len(names), columns=len(QUESTIONS) + 1, sharey=True)
    for axes, (question, means), colour in zip(panels, by_question.items(), COLOURS, strict=False):
        for is_own in (True, False):
            rows = means[means.index.isin(measured) == is_own]
            places = [names.index(name) for name in rows.index]
            fill = colour if is_own else "white"
            style = {"fmt": "o", "color": colour, "mfc": fill, "markersize": 4}
            draw_intervals(axes, rows, "tau", places, **style)
        axes.axvline(0, color="0.7", lw=0.8)
        axes.set(xlim=(-1.08, 1.08), xlabel="mean τ")
        axes.set_title(question, fontsize=8)
    for (ladder, costs), marker in zip(precision.groupby("ladder"), "o^s", strict=False):
        known = costs[costs.measure.isin(names) & costs[TARGET_SECONDS].gt(0)]
        places = [names.index(name) for name in known.measure]
        panels[-1].plot(known[TARGET_SECONDS], places, marker, ms=3.5, color="0.4", label=ladder)
    panels[-1].set(xscale="log", xlabel="seconds")
    panels[-1].set_title("cost to 2 %", fontsize=8)
    legend_below(figure, panels[-1], len(TIMED))
    panels[0].set_yticks(range(len(names)), names, fontsize=7.5)
    panels[0].set_ylim(len(names) - 0.4, -0.6)
    return figure
