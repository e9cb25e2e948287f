"""Measures of nonlinearity as predictors of generalisation, robustness and removal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nlbench.citation import Source
from nlbench.parsers import unique
from nlbench.reports.tables import MeasureInfo
from nlbench.request import Request
from nlbench.serialization.fields import to_plain
from nlbench.store.run import Run

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import draw_intervals, page_figure
from .framework.partial_tau import Association, Group, associate
from .framework.trends import SIGNIFICANCE, holm
from .framework.verdicts import above
from .measures import applicable
from .shared.subjects import load_on_cpu


@dataclass(frozen=True)
class PredictionTask:
    """Training and attack settings for the networks of a dataset.

    Parameters
    ----------
    epochs, batch_size : int
    epsilon : float
        Attack size, in units of the inputs, at which about half of the predictions change.
    """

    epochs: int
    batch_size: int
    epsilon: float


TASKS = {
    "mnist1d": PredictionTask(16, 128, 0.1),
    "digits": PredictionTask(24, 64, 0.15),
    "spirals": PredictionTask(40, 32, 0.2),
}
QUICK_TASKS = ("digits", "spirals")
LEARNING_RATE = 0.01
ACTIVATIONS = ("relu", "gelu", "tanh")
WIDTHS = (8, 16, 32, 64)
DEPTHS = (1, 2, 3, 4)
SHAPES = 5
"""Number of pairs of width and depth per task and activation."""
NOISES = (0.0, 0.1, 0.2, 0.4)
DECAYS = (0.0, 1e-4, 1e-3)
SAMPLES = 512
PAIRS = 16
MIN_FIT = 0.5
"""Minimum training accuracy of a network that can have a generalisation gap."""
WEAK_TAU = 0.2
"""Size up to which an association counts as weak."""
SETTINGS = {"substitution.cost": "kl", "lines.paths": "pairs", "lines.tolerance": 0.01}
MEASURES = (
    "affinity", "r2", "cka", "nlc", "absdev", "affine-residual", "activation-state", "pieces",
    "effective-rank", "substitution",
)  # fmt: skip
JACOBIAN = "geometric-complexity"
SIZE = "log parameters"
LOSS = "training loss"
NORM = "weight norm"
BASELINES = (SIZE, LOSS, NORM, JACOBIAN)
CONTROLS = (SIZE, LOSS)
OUTCOMES: Mapping[str, str] = {
    "gap": "the generalisation gap",
    "fragility": "the share of correct predictions that FGSM changes",
    "nonlinear": "the share of units that must stay nonlinear for a point of accuracy",
}
HALVES = ("gap_0", "gap_1", "fragility_0", "fragility_1")
"""Outcomes on two halves of the test samples, for their reliability."""
CLAIMS = (
    (
        "absdev",
        "gap",
        "Networks that deviate more from linearity have the larger gap",
        "absolute deviation predicts the test error (here: over its range)",
    ),
    (
        "nlc",
        "gap",
        "Networks with the larger nonlinearity coefficient have the larger gap",
        "a powerful predictor of test error (before training; here: after)",
    ),
    ("affine-residual", "fragility", "The less affine a network, the less robust it is", ""),
    (
        "substitution",
        "nonlinear",
        "Where substitution costs more, more units must stay nonlinear",
        "",
    ),
    (
        "activation-state",
        "nonlinear",
        "Where units change state more, more must stay nonlinear",
        "",
    ),
)


class Prediction(Study):
    """Measures as predictors of generalisation, robustness and removal in small networks."""

    question = (
        "Does a measure of nonlinearity predict generalisation, robustness or what can be removed, "
        "beyond size and training loss?"
    )
    source = Source("", "ours, after Y. Jiang et al. Fantastic Generalization Measures. ICLR, 2020")
    needs = "digits, mnist1d; trains 180 small networks"
    minutes = 9.0
    quick_minutes = 0.3
    takes = ("seeds", "measures")

    def measure(self, context: Context) -> Runs:
        """Train the networks, measure them on training samples, and compute their outcomes."""
        names = tuple(unique((*(context.measures or MEASURES), JACOBIAN)))
        tasks = QUICK_TASKS if context.quick else TASKS
        networks = {task: _networks(context, task) for task in tasks}
        context.train_pending()
        pairs = PAIRS // 4 if context.quick else PAIRS
        runs: dict[str, Run] = {}
        for task, by_model in networks.items():
            for model, files in by_model.items():
                request = Request(
                    names, (model,), (task,), tuple(map(str, files)), (0,), SAMPLES,
                    split="train",
                    settings=applicable({**SETTINGS, "lines.number": pairs}, names, task),
                )  # fmt: skip
                runs[f"measures-{task}"] = context.run(request, f"measures-{task}")
            runs[f"outcomes-{task}"] = _outcomes(context, task, by_model)
        return runs

    def analyse(self, runs: Runs) -> Findings:
        """Correlate measures with outcomes within tasks, given size and training loss."""
        table = network_table(runs)
        result = _associations(table)
        return Findings(
            _verdicts(table, result),
            {
                "Partial rank correlation with the outcomes": result,
                "Outcomes by task": _outcome_table(table),
                "Reliability of outcomes": _reliability_table(table),
            },
            {"Partial rank correlation with each outcome": _figure(result)},
            _remarks(table),
            headline=_headline(result),
        )


def _networks(context: Context, task: str) -> dict[str, list[Path]]:
    """Request the networks for a task, and return their checkpoints by model.

    Shapes and weight decays are drawn with a fixed seed; every shape has every noise level.
    """
    random = np.random.default_rng([2026, list(TASKS).index(task)])
    checkpoints: dict[str, list[Path]] = {}
    for activation in ACTIVATIONS:
        for shape in random.permutation(len(WIDTHS) * len(DEPTHS))[:SHAPES]:
            width = WIDTHS[shape // len(DEPTHS)]
            depth = DEPTHS[shape % len(DEPTHS)]
            decays = random.choice(DECAYS, len(NOISES))
            model = f"small/{activation}-w{width}-d{depth}"
            if context.quick and len(checkpoints) > ACTIVATIONS.index(activation):
                continue
            checkpoints[model] = [
                _request_network(context, task, model, level, float(decay), repeat)
                for level, decay in enumerate(decays)
                if not context.quick or level in (0, len(NOISES) - 1)
                for repeat in context.seeds_or(1)
            ]
    return checkpoints


def _request_network(
    context: Context, task: str, model: str, level: int, decay: float, repeat: int
) -> Path:
    """Request a network. Each fraction of wrong labels has seeds of its own."""
    settings = TASKS[task]
    noise = NOISES[level]
    return context.request_training(
        model,
        task,
        "adam",
        level + repeat * len(NOISES),
        label_noise=noise,
        name=f"{'quick-' if context.quick else ''}noise{noise:g}",
        epochs=settings.epochs // 8 if context.quick else settings.epochs,
        batch_size=settings.batch_size,
        learning_rate=LEARNING_RATE,
        weight_decay=decay,
        warmup_steps=20,
    )


def _outcomes(context: Context, task: str, by_model: Mapping[str, Sequence[Path]]) -> Run:
    from .shared.outcomes import TaskSamples, outcomes_measure

    samples = TaskSamples.load(task, TASKS[task].epsilon)
    models = {}
    trainings = {}
    for model, files in by_model.items():
        for file in files:
            subject = load_on_cpu(model, str(file), task, samples=2)
            header = subject.facts.weights_metadata or {}
            models[file.name] = subject.model
            trainings[id(subject.model)] = float(header["label_noise"]), int(header["seed"])
    return context.evaluate(
        models, samples.test[0][:4], [outcomes_measure(samples, trainings)], f"outcomes-{task}"
    )


def network_table(runs: Runs) -> pd.DataFrame:
    """Return one row per network: task, shape, activation, baselines, measures and outcomes.

    Measures with a direction have their sign chosen so that larger means more nonlinear.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for part, run in runs.items():
        kind, _, task = part.partition("-")
        for record in run.records:
            row = rows.setdefault((task, record.subject.weights), {"task": task})
            summary = record.result.summary
            if kind == "outcomes":
                row |= {name: summary[name] for name in OUTCOMES}
                row |= {"accuracy": summary["value"], LOSS: summary["loss"]}
                row |= {NORM: summary["norm"], "train accuracy": summary["train"]}
                row |= {name: summary[name] for name in HALVES if name in summary}
                if summary["train"] < MIN_FIT:
                    row["gap"] = math.nan
                row[SIZE] = math.log(record.subject.parameters or math.nan)
                continue
            row["shape"] = record.subject.model
            row["activation"] = record.subject.model.partition("/")[2].partition("-")[0]
            name = record.measure.name
            statistic = "over_range" if name == "absdev" else "value"
            sense = MeasureInfo.from_dict(to_plain(record.measure)).sense or 1
            row[name] = sense * summary.get(statistic, math.nan)
    return pd.DataFrame(list(rows.values()))


def _measures(table: pd.DataFrame) -> list[str]:
    known = {"task", "shape", "activation", "accuracy", "train accuracy", *OUTCOMES, *HALVES}
    known |= set(BASELINES)
    return [*(name for name in map(str, table) if name not in known), *BASELINES]


def association(
    table: pd.DataFrame, measure: str, outcome: str, controls: Sequence[str] = CONTROLS
) -> Association:
    """Correlate a measure with an outcome within tasks, given the controls.

    Networks of the same shape form one cluster across tasks.
    """
    groups: list[Group] = []
    for task in TASKS:
        rows = table[table.task == task]
        # Dummy coding: one indicator for each activation function except the first.
        controlled = [
            (rows[name] == word).astype(float) if word else rows[name]
            for name in controls
            if name != measure
            for word in (sorted(set(rows[name]))[1:] if name == "activation" else [""])
        ]
        groups.append((rows[measure], rows[outcome], controlled, list(rows["shape"])))
    return associate(groups)


def _associations(table: pd.DataFrame) -> pd.DataFrame:
    """Return the associations with each outcome, strongest first, and their adjusted p-values."""
    rows = []
    for outcome in OUTCOMES:
        partial = {name: association(table, name, outcome) for name in _measures(table)}
        adjusted = holm({name: result.p for name, result in partial.items()})
        for name, result in sorted(partial.items(), key=lambda item: item[1].p):
            others = ((*CONTROLS, "activation"), ())
            values = (association(table, name, outcome, controls).value for controls in others)
            interval = result.value, result.low, result.high
            counts = result.networks, result.clusters
            rows.append(
                (outcome, name, *interval, adjusted[name], *result.by_group, *values, *counts)
            )
    columns = ["outcome", "measure", "τ", "low", "high", "p (Holm)", *TASKS]
    columns += ["given the activation", "without controls", "networks", "shapes"]
    return pd.DataFrame(rows, columns=columns)


def _is_decided(row: pd.Series) -> bool:
    """Return True if an association is significant and has the same sign in all tasks."""
    has_one_sign = above(row[list(TASKS)].dropna().to_numpy(np.float64)) is not None
    return bool(row["p (Holm)"] < SIGNIFICANCE) and has_one_sign


def _are_weak(rows: pd.DataFrame) -> bool:
    """Return True if all intervals lie within ±`WEAK_TAU`."""
    return bool((rows.low > -WEAK_TAU).all() and (rows.high < WEAK_TAU).all())


def _verdicts(table: pd.DataFrame, result: pd.DataFrame) -> list[Verdict]:
    verdicts = []
    for outcome, words in OUTCOMES.items():
        rows = result[(result.outcome == outcome) & ~result.measure.isin(BASELINES)]
        decided = rows[[_is_decided(row) for _, row in rows.iterrows()]]
        best = (decided if len(decided) else rows).iloc[0]
        verdicts.append(
            Verdict(
                f"A measure predicts {words}, given size and training loss",
                "",
                f"{best.measure} τ = {best['τ']:.2f} ({best.low:.2f} to {best.high:.2f})",
                True if len(decided) else False if _are_weak(rows) else None,
                f"Holm over {len(result[result.outcome == outcome])} predictors, same sign in all "
                f"tasks; disagrees if all intervals lie within ±{WEAK_TAU:g}; decided: "
                f"{', '.join(decided.measure) or 'none'}",
            )
        )
    for measure, outcome, claim, published in CLAIMS:
        if measure not in table:
            continue
        row = result[(result.outcome == outcome) & (result.measure == measure)].iloc[0]
        is_positive = above((row.low, row.high)) if _is_decided(row) else None
        text = f"τ = {row['τ']:.2f} ({row.low:.2f} to {row.high:.2f}), {row.shapes} shapes"
        verdicts.append(
            Verdict(claim, published, text, is_positive, "given size and training loss")
        )
    return verdicts


def _headline(result: pd.DataFrame) -> list[str]:
    lines = []
    for outcome, words in OUTCOMES.items():
        rows = result[result.outcome == outcome]
        decided = [row for _, row in rows.iterrows() if _is_decided(row)]
        measures = [f"{r.measure} ({r['τ']:+.2f})" for r in decided if r.measure not in BASELINES]
        baselines = [f"{r.measure} ({r['τ']:+.2f})" for r in decided if r.measure in BASELINES]
        lines.append(
            f"Given size and training loss, shown to predict {words}: "
            f"{', '.join(measures) or 'no measure'}; baselines: {', '.join(baselines) or 'none'}."
        )
    return lines


def _outcome_table(table: pd.DataFrame) -> pd.DataFrame:
    columns = ["accuracy", "train accuracy", LOSS, *OUTCOMES]
    parts = table.groupby("task", sort=False)[columns]
    wide = parts.quantile(np.array([0.1, 0.5, 0.9])).reset_index(names=["task", "quantile"])
    wide.insert(1, "networks", wide.task.map(table.task.value_counts()))
    return wide


def _reliability_table(table: pd.DataFrame) -> pd.DataFrame:
    """Correlate each outcome between halves of the test samples, by task.

    The Spearman-Brown formula gives the reliability of the outcome on all samples.
    """
    rows = []
    for task, networks in table.groupby("task", sort=False):
        fitted = networks[networks["train accuracy"] >= MIN_FIT]
        for outcome in ("gap", "fragility"):
            counted = fitted if outcome == "gap" else networks
            r = counted[f"{outcome}_0"].corr(counted[f"{outcome}_1"])
            rows.append((task, outcome, len(counted), r, 2 * r / (1 + r)))
    return pd.DataFrame(rows, columns=["task", "outcome", "networks", "halves", "reliability"])


def _remarks(table: pd.DataFrame) -> list[str]:
    sizes = ", ".join(
        f"{task}: {(table.task == task).sum()} (ε = {TASKS[task].epsilon:g})"
        for task in unique(table.task)
    )
    return [
        f"Perceptrons by task: {sizes}; widths {WIDTHS[0]} to {WIDTHS[-1]}, depths {DEPTHS[0]} to "
        f"{DEPTHS[-1]}, {', '.join(ACTIVATIONS)}, {NOISES[0]:g} to {NOISES[-1]:g} wrong labels, "
        f"weight decay 0 to {DECAYS[-1]:g}.",
        "τ: Kendall's τ between residuals of normal scores given log parameters and training loss "
        "(each of these two given only the other), mean over tasks. Intervals and p-values are "
        "cluster-robust; a cluster is a shape (an activation with a width and a depth) over all "
        "tasks. An association is decided if it is significant after Holm's correction and has "
        "the same sign in all tasks.",
        "Networks of one shape differ in weight decay and in the fraction of wrong labels. Each "
        "fraction has its own seed, so the effects of the fraction and the seed are confounded.",
        "Measures are computed on training samples; larger means more nonlinear. Outcomes are "
        "computed on test samples. The gap is training accuracy minus the expected accuracy on "
        "test labels with equal noise.",
        "Absolute deviation is divided by the range of the logits on the path.",
        f"Networks that fit less than {MIN_FIT:.0%} of their training labels have no gap.",
    ]


def _figure(result: pd.DataFrame) -> Figure:
    names = unique(result.measure)[::-1]
    figure, panels = page_figure(0.8 + 0.22 * len(names), columns=len(OUTCOMES), sharey=True)
    for axes, outcome in zip(panels, OUTCOMES, strict=True):
        rows = result[result.outcome == outcome].set_index("measure").loc[names]
        draw_intervals(axes, rows, "τ", np.arange(len(names)), fmt="o", capsize=2)
        axes.axvline(0, color="0.7", zorder=0)
        axes.set_xlabel(f"partial τ, {outcome}")
    panels[0].set_yticks(np.arange(len(names)), names)
    return figure
