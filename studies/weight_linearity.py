"""Linearity in the weights as an explanation of the advantage of late linearisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nlbench.measure import Measure, Result
from nlbench.store.run import Run

from .early_or_late import HARDER_DATA, HARDER_MODEL, late_advantages, request_networks
from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import page_figure
from .framework.network_measure import network_measure
from .framework.trends import MIN_NETWORKS, network_interval
from .framework.verdicts import Decision, above, below, interval_text, mean_above, range_text
from .shared.linearised_networks import (
    SOURCE,
    epochs_remark,
    is_short,
    measure_networks,
    network_table,
)
from .shared.subjects import load_on_cpu

if TYPE_CHECKING:
    from torch import nn

SAMPLES = 256
EXPLAINED = 0.5
"""Fraction of the gap in accuracy from which on linearity in the weights explains it."""
MODES = {
    "post-training": ("after training", "#0072B2"),
    "from-start": ("from the start", "#D55E00"),
}

QUANTITIES = {
    "nonlinearity": "Outputs change more linearly in the weights when networks are linearised late",
    "kernel distance": "Tangent kernels change less when networks are linearised late",
}


class WeightLinearityStudy(Study):
    """Linearity in the weights while networks are linearised late or early."""

    question = "Does linearity in the weights explain why linearising late is easier?"
    source = SOURCE
    needs = "mnist1d; linearises 48 networks and trains 8, shared with early-or-late"
    minutes = 5.0
    quick_minutes = 0.3
    takes = ("seeds",)

    def measure(self, context: Context) -> Runs:
        """Measure linearised networks, and compare each with the network that it started from."""
        files = request_networks(context, depths=())
        run = measure_networks(context, files, HARDER_DATA, part="networks")
        return {"networks": run, "weights": _compare_weights(context, files[HARDER_MODEL])}

    def analyse(self, runs: Runs) -> Findings:
        """Compare the change in the weights, and estimate how much of the gap it explains."""
        table = linearity_table(runs)
        return Findings(
            _verdicts(table),
            {"Networks": table},
            {"Accuracy vs. distance of tangent kernels": _figure(table)},
            [
                f"{HARDER_MODEL} on {HARDER_DATA}, seeds: {table.seed.nunique()}. Late networks "
                "are compared with the trained network that they start from, early ones with their "
                "initialisation, trained ones too. The slopes of the PReLUs are weights, and no "
                f"unit is frozen. On {SAMPLES} test samples; see nlbench weight-linearity.",
                epochs_remark(table),
            ],
        )


def comparison_measure(starts: Mapping[int, nn.Module]) -> type[Measure]:
    """Return a measure of a network's linearity in the weights since the start of its training.

    Parameters
    ----------
    starts : mapping of int to torch.nn.Module
        The network at the start, keyed by the ``id`` of the trained one.
    """

    def linearity_since_start(batch: Any) -> Result:
        """Nonlinearity in the weights, and the distance of the tangent kernels."""
        from nlbench.weight_linearity import weight_linearity

        found = weight_linearity(starts[id(batch.model)], batch.model, batch.inputs)
        return Result({"value": found.value, "kernel": found.kernel_distance}, n=found.n)

    return network_measure("linearity-since-start", linearity_since_start)


def _compare_weights(context: Context, files: list[Path]) -> Run:
    from nlbench.models.sparsified.sparsification import sparsify

    def load(weights: str, seed: int) -> Any:
        return load_on_cpu(HARDER_MODEL, weights, HARDER_DATA, seed=seed, samples=SAMPLES)

    models = {}
    starts = {}
    trained = {}
    for file in files:
        subject = load(str(file), 0)
        header = subject.facts.weights_metadata or {}
        seed = int(header["seed"])
        if "omega" not in header:
            trained[seed] = str(file)
        start = load(trained[seed] if header["recipe"] == "post-training" else "init", seed).model
        model = subject.model
        if "omega" in header:
            model = unfrozen(model)
            start = sparsify(start, example=subject.inputs[:2])
        models[subject.facts.weights] = model
        starts[id(model)] = start
    measures = [comparison_measure(starts)]
    return context.evaluate(models, subject.inputs, measures, "weights", name=HARDER_MODEL)


def unfrozen(model: nn.Module) -> nn.Module:
    """Copy a sparsified network so that all its slopes are weights, with the same outputs."""
    import copy

    import torch

    from nlbench.models.sparsified.relu_calls import SparsePReLU

    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, SparsePReLU):
            with torch.no_grad():
                layer.weight.copy_(layer.slopes())
            layer.frozen.fill_(False)
    return model


def linearity_table(runs: Runs) -> pd.DataFrame:
    """Return one row per network: how it was trained, its accuracy, and the change in weights."""
    table = network_table(runs["networks"])
    for record in runs["weights"].records:
        if record.result.status == "ok":
            summary = record.result.summary
            for column, key in zip(QUANTITIES, ("value", "kernel"), strict=True):
                table.loc[record.subject.weights, column] = summary[key]
    table = table[table["mode"] != "floor"]
    return table.sort_values(["mode", "omega", "seed"], ignore_index=True)


def slope_within(table: pd.DataFrame) -> float:
    """Compute the slope of accuracy on the kernel distance among networks trained alike.

    Least squares with the logarithm of the path length as the other regressor, and a constant for
    each mode and ω.
    """
    rows = table[table["mode"] != "reference"]
    values = rows[["accuracy", "kernel distance"]].assign(length=np.log(rows.pathlength))
    values = values - values.groupby([rows["mode"], rows.omega]).transform("mean")
    regressors = values[["kernel distance", "length"]].to_numpy()
    return float(np.linalg.lstsq(regressors, values.accuracy.to_numpy(), rcond=None)[0][0])


def gaps(table: pd.DataFrame) -> tuple[float, float]:
    """Compute the gaps in accuracy and in kernel distance at the same path length.

    Both are those of late over early networks, means over seeds. A network that late ones start
    from has not moved.
    """
    start = table.assign(
        **{"kernel distance": table["kernel distance"].where(table["mode"] != "reference", 0.0)}
    )
    accuracy, distance = (
        late_advantages(start, "from-start", "pathlength", column)
        for column in ("accuracy", "kernel distance")
    )
    return float(accuracy.mean()), float(distance.mean())


def explained_surplus(table: pd.DataFrame) -> float:
    """Compute the accuracy that kernel distances explain, minus `EXPLAINED` of the gap.

    The explained accuracy is the gap in kernel distance times the slope among networks trained
    alike.
    """
    accuracy, distance = gaps(table)
    return slope_within(table) * distance - EXPLAINED * accuracy


def jackknife(
    table: pd.DataFrame, statistic: Callable[[pd.DataFrame], float]
) -> tuple[float, float]:
    """Compute a 95% interval for a statistic of a table from leaving out one seed at a time.

    Examples
    --------
    >>> table = pd.DataFrame({"seed": [0, 1, 2], "value": [4.4, 3.6, 3.6]})
    >>> low, high = jackknife(table, lambda rows: rows.value.mean())
    >>> round(low, 2), round(high, 2)
    (2.72, 5.01)
    """
    seeds = table.seed.unique()
    if len(seeds) < MIN_NETWORKS:
        return np.nan, np.nan
    whole = statistic(table)
    others = np.array([statistic(table[table.seed != seed]) for seed in seeds])
    return network_interval(len(seeds) * whole - (len(seeds) - 1) * others)


def _verdicts(table: pd.DataFrame) -> list[Verdict]:
    linearised = table[table["mode"] != "reference"]
    short = is_short(table)
    means = linearised.pivot_table(index="seed", columns="mode", values=list(QUANTITIES))
    verdicts = []
    for name, claim in QUANTITIES.items():
        late, early = (means[name][mode] for mode in MODES)
        decision = mean_above(early - late)
        verdicts.append(
            Verdict(
                claim,
                "the time-evolution of the data-dependent NTK",
                f"{range_text(late)} late, {range_text(early)} early; lower for "
                f"{(late < early).sum()} of {len(late)} seeds",
                Decision(None, decision.needed) if short else decision,
                "since the networks that they start from, trained ones for late, initialised for "
                "early; mean over ω for each seed, then the 95% t interval of the difference over "
                f"seeds, {interval_text(early - late)}",
            )
        )
    return [*verdicts, _test_within(table), _test_explained(table)]


def _test_within(table: pd.DataFrame) -> Verdict:
    """Test whether accuracy falls with the kernel distance among networks trained alike."""
    low, high = jackknife(table, slope_within)
    return Verdict(
        "Of networks linearised alike, those whose kernels changed less are more accurate",
        "",
        f"{10 * slope_within(table):+.2f} points per 0.1 of kernel distance "
        f"({10 * low:+.2f} to {10 * high:+.2f})"
        if np.isfinite(low)
        else f"seeds: {table.seed.nunique()}",
        None if is_short(table) else below((low, high)),
        "least squares of accuracy on kernel distance and log path length among networks with the "
        "same mode and ω; 95% interval from leaving out one seed at a time",
    )


def _test_explained(table: pd.DataFrame) -> Verdict:
    """Test whether the gap in kernel distance explains the gap in accuracy."""
    accuracy, distance = gaps(table)
    answer = above(jackknife(table, explained_surplus))
    has_gap = above(jackknife(table, lambda rows: gaps(rows)[0]))
    explained = slope_within(table) * distance
    return Verdict(
        f"The change of tangent kernels explains at least {EXPLAINED:.0%} of the gap in accuracy",
        "",
        f"{100 * explained:+.2f} of {100 * accuracy:+.2f} points",
        answer if has_gap and not is_short(table) else None,
        "gap in kernel distance between late and early networks at the same path length, times "
        "the slope among networks linearised alike; decided by the 95% interval of its difference "
        f"from {EXPLAINED:.0%} of the gap, if late networks are significantly more accurate",
    )


def _figure(table: pd.DataFrame) -> Figure:
    figure, panels = page_figure(3.0, columns=2, sharey=True)
    for axes, column in zip(panels, QUANTITIES, strict=True):
        for mode, (label, colour) in MODES.items():
            rows = table[table["mode"] == mode]
            axes.plot(rows[column], 100 * rows.accuracy, "o", ms=4, color=colour, label=label)
        axes.set_xlabel(column)
    panels[0].set_ylabel("test accuracy, %")
    panels[0].legend(fontsize=7.5)
    return figure
