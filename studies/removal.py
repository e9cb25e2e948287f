"""Criteria for removing activations, compared with the cost of removing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats

from nlbench.citation import Source
from nlbench.request import Request
from nlbench.store.run import Run

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import page_figure
from .framework.trends import SIGNIFICANCE, holm, network_interval
from .framework.verdicts import all_hold, mean_above
from .shared.small_networks import trained_network
from .shared.subjects import load_on_cpu

TASKS = {"mnist1d": "signal-cnn", "digits": "vgg8"}
SITE_MEASURES = (
    "affinity", "r2", "cka", "norm", "sparsity", "entropy", "activation-state", "effective-rank",
)  # fmt: skip
LESS_NONLINEAR = ("affinity", "r2", "cka", "linear-units")
SCALE_FREE = ("affinity", "r2", "cka")
SAMPLES = 512

LABELS = {
    "activation-state": "activation-state entropy (EASIER)",
    "senet": "sensitivity (SENet, by magnitudes)",
    "taylor": "first-order Taylor term",
    "fisher": "Fisher term E(g·(ŷ − y))²",
    "residual": "unexplained variance",
    "change": "relative change ‖y − x‖/‖x‖",
    "linear-units": "learned masks (SNL)",
    "substitution": "substitution on training samples",
    "identity": "substitution by the identity",
    "depth": "calls that follow",
    "size": "channels",
}


class RemovalStudy(Study):
    """Criteria from the literature for removing activations, compared with the measured cost."""

    question = "Which criterion predicts the cost of making an activation affine?"
    source = Source(
        "M. Cho et al. Selective Network Linearization. ICML, 2022; S. Kundu et al. Learning to "
        "Linearize Deep Neural Networks (SENet). ICLR, 2023; V. Quétu et al. The Simpler The "
        "Better (EASIER). ECML PKDD, 2024."
    )
    needs = "mnist1d, digits; trains 40 networks"
    minutes = 15.0
    quick_minutes = 0.4
    takes = ("seeds",)

    def measure(self, context: Context) -> Runs:
        """Measure criteria on training samples, costs on test samples, and the removal curves."""
        networks = {
            (task, seed): _request_network(context, task, seed)
            for task in TASKS
            for seed in _seeds(context, task)
        }
        masked = {
            key: _request_masked_network(context, key, file) for key, file in networks.items()
        }
        context.train_pending()
        runs: dict[str, Run] = {}
        for task, model in TASKS.items():
            files = {seed: str(file) for (at, seed), file in networks.items() if at == task}
            masks = [str(masked[task, seed]) for seed in files]

            def run(
                part: str,
                measures: Sequence[str],
                weights: Sequence[str],
                settings: Mapping[str, str],
                model: str = model,
                task: str = task,
            ) -> Run:
                split = "train" if part == "criteria" else "test"
                samples = SAMPLES // 2 if context.quick else SAMPLES
                request = Request(
                    tuple(measures), (model,), (task,), tuple(weights), (0,), samples,
                    split=split, settings=settings,
                )  # fmt: skip
                return context.run(request, f"{part}-{task}")

            weights = list(files.values())
            kl = {"substitution.cost": "kl"}
            runs[f"criteria-{task}"] = run(
                "criteria",
                [*SITE_MEASURES, "substitution"],
                weights,
                {**kl, "replacement.maps": "channel,identity"},
            )
            runs[f"cost-{task}"] = run(
                "cost", ["substitution", "accuracy"], weights, {**kl, "replacement.crossed": "true"}
            )
            runs[f"masks-{task}"] = run("masks", ["linear-units"], masks, {})
            for seed, file in files.items():
                runs |= _curves(context, task, seed, file, runs)
        return runs

    def analyse(self, runs: Runs) -> Findings:
        """Correlate criteria with costs within networks, and compare areas under the curves."""
        correlations = _correlations(runs)
        areas = _areas(runs)
        table = _summary(correlations, areas)
        # Substitution is the cost itself on other samples, so its correlation is an upper bound.
        order = [name for name in table.criterion if name != "substitution"]
        families = [["substitution", *order], order]
        separations = [_separations(correlations, family) for family in families]
        return Findings(
            _verdicts(correlations, areas),
            {
                "Correlation with the cost, and area under the curve of accuracy": table,
                "Differences from substitution and from the best criterion": pd.concat(
                    separations, ignore_index=True
                ),
                "By task": _summary(correlations, areas, ["task", "criterion"], "flops"),
            },
            {"Correlation with the cost, and area under the curve": _figure(table)},
            _remarks(runs),
            headline=_headline(table, separations[1]),
        )


def _seeds(context: Context, task: str) -> tuple[int, ...]:
    full, quick = (12, 2) if task == "mnist1d" else (8, 1)
    return context.seeds_or(full, quick)


def _request_network(context: Context, task: str, seed: int) -> Path:
    if task == "digits":
        return trained_network(context, "vgg8", seed)
    epochs = 2 if context.quick else 15
    return context.request_training(
        "signal-cnn", task, "adam", seed, name=f"{epochs}epochs", epochs=epochs, warmup_steps=20
    )


def _request_masked_network(context: Context, key: tuple[str, int], start: Path) -> Path:
    """Request a network whose units are linearised under SNL's prior."""
    task, seed = key
    epochs = 1 if context.quick else 6
    return context.request_training(
        TASKS[task], task, "post-training", seed, weights=str(start),
        name=f"masks{epochs}", epochs=epochs, omega=0.001,
    )  # fmt: skip


def _curves(
    context: Context, task: str, seed: int, file: str, runs: Mapping[str, Run]
) -> dict[str, Run]:
    """Measure the remaining criteria of one network, and its removal curve by each criterion."""
    from .shared.removal_criteria import criteria_measure, curves_measure

    samples = SAMPLES // 4 if context.quick else SAMPLES // 2
    train, test = (
        load_on_cpu(TASKS[task], file, task, samples=samples, split=split)
        for split in ("train", "test")
    )
    name = f"{task}-seed{seed}"
    inputs = train.inputs[:4]
    remaining = context.evaluate(
        train.model, inputs, [criteria_measure(train, seed)], f"own-{name}", name=name
    )
    parts = {**runs, f"own-{name}": remaining}
    criteria = _criteria(parts, task, seed, file)
    curves = context.evaluate(
        train.model, inputs, [curves_measure(train, test, criteria)], f"curves-{name}", name=name
    )
    return {f"own-{name}": remaining, f"curves-{name}": curves}


def _places(run: Run, measure: str, file: str = "", statistic: str = "value") -> dict[str, float]:
    """Return a statistic of one network, keyed by place."""
    for record in run.records:
        is_file = not file or record.subject.weights == file.rpartition("/")[2]
        if record.measure.name == measure and is_file:
            return {v.place: v.statistics[statistic] for v in record.result.values if v.statistics}
    return {}


def _criteria(
    runs: Mapping[str, Run], task: str, seed: int, file: str
) -> dict[str, dict[str, float]]:
    """Return every criterion for the calls of a network. Larger values predict larger costs."""
    measured = runs[f"criteria-{task}"]
    table = {name: _places(measured, name, file) for name in (*SITE_MEASURES, "substitution")}
    table["identity"] = _places(measured, "substitution", file, "identity")
    remaining = runs[f"own-{task}-seed{seed}"]
    (record,) = remaining.records
    for name in next(iter(record.result.values)).statistics:
        if name != "value":
            table[name] = _places(remaining, "removal-criteria", statistic=name)
    masks = _mask_places(runs[f"masks-{task}"], seed)
    if set(masks) >= set(table["size"]):
        table["linear-units"] = masks
    oriented = {}
    for name, values in table.items():
        if set(values) >= set(table["size"]):
            sign = -1 if name in LESS_NONLINEAR else 1
            oriented[name] = {place: sign * value for place, value in values.items()}
    return oriented


def _mask_places(run: Run, seed: int) -> dict[str, float]:
    for record in run.records:
        if record.subject.weights.endswith(f"-seed{seed}.safetensors"):
            return _places(run, "linear-units", record.subject.weights)
    return {}


def _networks(runs: Runs) -> list[tuple[str, int, str]]:
    """Return the task, seed and checkpoint of each network."""
    networks = []
    for task in TASKS:
        for record in runs[f"cost-{task}"].records:
            if record.measure.name == "substitution":
                file = record.subject.weights
                seed = int(file.rpartition("seed")[2].partition(".")[0])
                networks.append((task, seed, file))
    return networks


def _correlations(runs: Runs) -> pd.DataFrame:
    """Return Spearman's correlation of each criterion with the cost, within each network."""
    rows = []
    for task, seed, file in _networks(runs):
        cost = _places(runs[f"cost-{task}"], "substitution", file)
        for criterion, values in _criteria(runs, task, seed, file).items():
            pairs = np.array([(values[place], cost[place]) for place in cost])
            rho = stats.spearmanr(*pairs.T).statistic if len(set(pairs[:, 0])) > 1 else 0.0
            rows.append((task, seed, criterion, float(rho)))
    return pd.DataFrame(rows, columns=["task", "seed", "criterion", "spearman"])


def _areas(runs: Runs) -> pd.DataFrame:
    """Return the areas under each network's removal curves, by criterion."""
    rows = []
    for task, seed, _ in _networks(runs):
        (record,) = runs[f"curves-{task}-seed{seed}"].records
        for value in record.result.values:
            area = value.statistics
            rows.append((task, seed, value.place, area["value"], area["kl"], area["value_flops"]))
    return pd.DataFrame(rows, columns=["task", "seed", "criterion", "accuracy", "kl", "flops"])


def _mean_interval(values: pd.Series[float]) -> tuple[float, float, float]:
    """Return the mean over networks with its interval."""
    return (float(values.mean()), *network_interval(values))


def _summary(
    correlations: pd.DataFrame,
    areas: pd.DataFrame,
    keys: Sequence[str] = ("criterion",),
    other: str = "kl",
) -> pd.DataFrame:
    """Average the correlations and areas over networks, and another area, best first."""
    both = correlations.merge(areas, on=["task", "seed", "criterion"])
    rows = []
    for key, networks in both.groupby(list(keys), sort=False):
        intervals = *_mean_interval(networks.spearman), *_mean_interval(networks.accuracy)
        rows.append((*key, len(networks), *intervals, networks[other].mean()))
    columns = [*keys, "networks", "spearman", "low", "high"]
    columns += ["area", "area low", "area high", {"kl": "area kl", "flops": "area by flops"}[other]]
    table = pd.DataFrame(rows, columns=columns)
    order = [*keys[:-1], "spearman"]
    return table.sort_values(order, ascending=[name != "spearman" for name in order])


def _differences(
    frame: pd.DataFrame, first: str, second: str, column: str = "spearman"
) -> pd.Series[float]:
    """Return the differences between two criteria, by task and seed, where both are known."""
    wide = frame.pivot_table(index=["task", "seed"], columns="criterion", values=column)
    if first not in wide or second not in wide:
        return pd.Series(dtype=np.float64)
    return (wide[first] - wide[second]).dropna()


def _separations(correlations: pd.DataFrame, order: Sequence[str]) -> pd.DataFrame:
    """Test the first criterion against each of the others by a paired t test.

    The p-values are adjusted for these tests by Holm's method.
    """
    first = order[0]
    differences = {other: _differences(correlations, first, other) for other in order[1:]}
    p_values = {n: stats.ttest_1samp(values, 0).pvalue for n, values in differences.items()}
    adjusted = holm({n: 1.0 if np.isnan(p) else float(p) for n, p in p_values.items()})
    rows = [
        (first, other, len(values), values.mean(), *network_interval(values), adjusted[other])
        for other, values in differences.items()
    ]
    columns = ["first", "criterion", "networks", "difference", "low", "high", "p (Holm)"]
    return pd.DataFrame(rows, columns=columns)


def _verdicts(correlations: pd.DataFrame, areas: pd.DataFrame) -> list[Verdict]:
    def predicts(claim: str, criterion: str) -> Verdict:
        rows = correlations[correlations.criterion == criterion]
        return _positive_in_tasks(claim, rows.set_index("task").spearman, "Spearman correlation")

    def compare(claim: str, first: str, second: str, column: str = "spearman") -> Verdict:
        frame = correlations if column == "spearman" else areas
        kind = "Spearman correlation" if column == "spearman" else "area under the accuracy curve"
        values = _differences(frame, first, second, column)
        return _positive_in_tasks(claim, values, f"paired difference in {kind}")

    return [
        *(predicts(f"{LABELS.get(c, c)} predicts the cost", c) for c in SCALE_FREE),
        predicts("Activation-state entropy predicts the cost", "activation-state"),
        predicts("SENet's sensitivity predicts the cost", "senet"),
        predicts("The Fisher term predicts the cost", "fisher"),
        compare("Unexplained variance predicts the cost better than R²", "residual", "r2"),
        compare("The Fisher term predicts better than affinity", "fisher", "affinity"),
        compare("Learned masks predict better than affinity", "linear-units", "affinity"),
        compare("Learned masks predict better than the depth of a call", "linear-units", "depth"),
        compare(
            "Removal by substitution keeps more accuracy than removal by affinity",
            "substitution",
            "affinity",
            "accuracy",
        ),
        compare(
            "Removal by substitution keeps more accuracy than random removal",
            "substitution",
            "random",
            "accuracy",
        ),
        compare(
            "Removal by activation-state entropy keeps more accuracy than random removal",
            "activation-state",
            "random",
            "accuracy",
        ),
    ]


def _positive_in_tasks(claim: str, values: pd.Series[float], what: str) -> Verdict:
    """Test whether the mean over networks is positive in each task."""
    tasks = list(values.groupby(level="task", sort=False)) if len(values) else []
    texts = []
    for task, group in tasks:
        mean, low, high = _mean_interval(group)
        texts.append(f"{task}: {mean:.3f} ({low:.3f} to {high:.3f}), {len(group)} networks")
    return Verdict(
        claim,
        "",
        "; ".join(texts) or "not measured",
        all_hold(mean_above(group) for _, group in tasks),
        f"mean {what} above 0 in each task, by its 95% t interval over networks; disagrees if it "
        "is below 0 in one",
    )


def _headline(table: pd.DataFrame, separations: pd.DataFrame) -> tuple[str, ...]:
    alike = separations[~(separations["p (Holm)"] < SIGNIFICANCE)].criterion
    best = separations["first"].iloc[0]
    rows = table.set_index("criterion")
    row = rows.loc[best]
    ceiling = rows.loc["substitution"] if "substitution" in rows.index else row
    names = ", ".join(LABELS.get(c, c) for c in alike) or "none"
    return (
        f"{LABELS.get(best, best)} predicts the cost best: Spearman correlation {row.spearman:.2f} "
        f"({row.low:.2f} to {row.high:.2f}) within networks, mean of {row.networks:.0f} networks; "
        f"the cost measured on other samples reaches {ceiling.spearman:.2f}. "
        f"Not significantly worse: {names}.",
    )


def _remarks(runs: Runs) -> list[str]:
    accuracies: dict[str, list[float]] = {task: [] for task in TASKS}
    for task, values in accuracies.items():
        for record in runs[f"cost-{task}"].records:
            if record.measure.name == "accuracy" and record.result.status == "ok":
                values.append(record.result.summary["value"])
    return [
        "Accuracy: "
        + "; ".join(
            f"{task} {np.mean(values):.3f} ({TASKS[task]}, {len(values)} networks)"
            for task, values in accuracies.items()
        )
        + ".",
        "The cost of a call is KL(f ‖ f_s) on test samples with the call replaced by the best "
        "affine map per channel; criteria are computed on training samples.",
        "Each task has one architecture, trained with several seeds. Intervals are over these "
        "networks, and the table by task shows how the results differ between tasks.",
        "Learned masks: the fraction of units that stay nonlinear after short training under SNL's "
        "prior. SENet's sensitivity is computed from weight magnitudes instead of its pruning.",
    ]


def _figure(table: pd.DataFrame) -> Figure:
    rows = table.iloc[::-1]
    figure, (left, right) = page_figure(0.6 + 0.24 * len(rows), columns=2, sharey=True)
    y = np.arange(len(rows))
    for axes, columns, label in (
        (left, ("spearman", "low", "high"), "Spearman correlation with the cost"),
        (right, ("area", "area low", "area high"), "area under the accuracy curve"),
    ):
        value, low, high = (rows[column].to_numpy(dtype=np.float64) for column in columns)
        axes.errorbar(value, y, xerr=np.abs([value - low, high - value]), fmt="o", capsize=2)
        axes.set_xlabel(label)
    left.axvline(0, color="0.7", zorder=0)
    left.set_yticks(y, [LABELS.get(name, name) for name in rows.criterion])
    return figure
