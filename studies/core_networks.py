"""Depth and width of the nonlinear core of linearised networks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nlbench.parsers import unique

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import legend_below, page_figure
from .framework.verdicts import Decision, mean_above, mean_below
from .shared.linear_regions import RECIPES, shipped_networks
from .shared.linearised_networks import (
    SOURCE,
    epochs_remark,
    floor_text,
    is_short,
    layer_table,
    linear_floor,
    linearise,
    measure_networks,
    network_table,
    omegas,
    original_network,
    paths_shrink,
)

MODEL = "vgg8"
DATA = "digits"
NOISE = 0.4
WIDTHS = ("resnet18-w4", "resnet18-w8")
MAX_RELATIVE_DIFFERENCE = 0.25


class CoreNetworks(Study):
    """Path length and shape of the nonlinear core, by ω, width, depth and difficulty."""

    question = "Do the units that stay nonlinear form a core of nearly constant depth and width?"
    source = SOURCE
    needs = "linearises 55 networks (20 shared with early-or-late), trains 20"
    minutes = 21.0
    quick_minutes = 0.3
    takes = ("seeds",)

    def measure(self, context: Context) -> Runs:
        """Measure networks with several penalties, widths and depths, and with wrong labels."""
        steps = omegas(context, "post-training")
        short: dict[str, Any] = {"name": "quick", "epochs": 1, "warmup_steps": 20}
        changes = short if context.quick else {}
        seeds = context.seeds_or(5)
        starts = dict.fromkeys(original_network(context, MODEL, seed) for seed in seeds)
        weights: dict[str, list[str | Path]] = {MODEL: [*starts]}
        for seed in seeds:
            weights[MODEL] += [
                linearise(context, MODEL, "post-training", omega, seed) for omega in steps
            ]
            weights[MODEL].append(linear_floor(context, MODEL, seed))
            wrong_labels = _wrong_labels(context, seed)
            weights[MODEL] += [
                linearise(context, MODEL, "post-training", omega, seed, **wrong_labels)
                for omega in steps
            ]
            for model in WIDTHS[: 1 if context.quick else None]:
                start = context.request_training(model, DATA, "auto", seed, **changes)
                weights.setdefault(model, []).append(start)
                weights[model] += [
                    linearise(context, model, "post-training", omega, seed, weights=str(start))
                    for omega in steps[-1 if context.quick else -2 :]
                ]
        return {"run": measure_networks(context, weights, DATA)}

    def analyse(self, runs: Runs) -> Findings:
        """Compare the remaining path lengths."""
        table = network_table(runs["run"])
        lengths = (
            table[table["mode"] != "reference"]
            .groupby(["model", "mode", "noise", "omega"])
            .agg(
                networks=("seed", "size"),
                accuracy=("accuracy", "mean"),
                linear=("linear-units", "mean"),
                pathlength=("pathlength", "mean"),
            )
            .reset_index()
        )
        shallow = table[(table.model == MODEL) & (table.noise == 0)]
        depths = _make_selector(table, "pathlength")
        units = layer_table(runs["run"]).groupby(["model", "mode", "noise", "omega", "seed"])
        widths = _make_selector(units.nonlinear.mean().reset_index(), "nonlinear")
        verdicts = [
            paths_shrink(shallow, f"{MODEL}, mean over seeds"),
            _same_for_widths("depth", depths, "path length"),
            _same_for_widths(
                "width", widths, "nonlinear units per layer; the latter had twice as many before"
            ),
            _compare_depths(table, depths),
            _compare_difficulties(table, depths),
        ]
        return Findings(
            verdicts,
            {"Means over seeds": lengths, "Networks": table},
            {
                "Fraction of units in each layer that stay nonlinear, input at the top": _figure(
                    layer_table(runs["run"])
                )
            },
            [
                f"Small-scale: {DATA}; seeds: {table.seed.nunique()}; the published experiments "
                "are on CIFAR and translation.",
                f"Test accuracy of {MODEL}: {shallow.accuracy.max():.1%} at most, "
                f"{floor_text(shallow)}.",
                epochs_remark(table),
            ],
        )


def _wrong_labels(context: Context, seed: int) -> dict[str, Any]:
    """Return the fields for linearising a network trained on wrong labels.

    The seed decides which labels are wrong. Quick studies use the bundled network of seed 0.
    """
    start = shipped_networks()[1]
    if not context.quick:
        start = context.request_training(
            MODEL, DATA, RECIPES[2], seed, label_noise=NOISE, name=f"noise{NOISE:g}"
        )
    name = f"fitted-noise{NOISE:g}"
    return {"name": name, "label_noise": NOISE, "weights": str(start)}


def _make_selector(table: pd.DataFrame, column: str) -> Callable[..., pd.DataFrame]:
    """Return a function that selects values of linearised networks, by seed and penalty."""
    late = table[table["mode"] == "post-training"]

    def select(model: str, noise: float = 0.0) -> pd.DataFrame:
        rows = late[(late.model == model) & (late.noise == noise)]
        return rows.pivot_table(column, "seed", "omega")

    return select


def _compare(first: pd.DataFrame, second: pd.DataFrame) -> str:
    """Format the means of two networks for each penalty."""
    means = pd.concat([first.mean(), second.mean()], axis=1, join="inner")
    return ", ".join(f"ω = {omega:g}: {a:.2f} and {b:.2f}" for omega, (a, b) in means.iterrows())


def _same_for_widths(quantity: str, values: Callable[..., pd.DataFrame], what: str) -> Verdict:
    """Compare a quantity between the networks of both widths."""
    narrow, wide = map(values, WIDTHS)
    differences = (wide / narrow - 1).abs().max(axis=1).dropna()
    return Verdict(
        f"The remaining {quantity} hardly depends on the width",
        f"near constant effective {quantity}",
        _compare(narrow, wide) or "one width only",
        mean_below(differences, MAX_RELATIVE_DIFFERENCE),
        f"{what}, {' and '.join(WIDTHS)} under the same ω: the largest relative difference, mean "
        f"over seeds, with its 95% t interval; agrees if below {MAX_RELATIVE_DIFFERENCE:.0%}",
    )


def _compare_depths(table: pd.DataFrame, depths: Callable[..., pd.DataFrame]) -> Verdict:
    """Test whether linearisation makes the path lengths of deep and shallow networks more alike."""
    deep = WIDTHS[0]
    before = table[(table["mode"] == "reference") & (table.noise == 0)]
    starts = before.pivot_table("pathlength", "seed", "model")
    ratios = (depths(deep) / depths(MODEL)).dropna(how="all").dropna(axis=1)
    # A bundled network is the start of all seeds.
    start = starts[deep] / starts[MODEL].fillna(starts[MODEL].mean())
    differences = start.map(np.log).abs() - ratios.map(np.log).abs().max(axis=1)
    listed = ", ".join(f"{ratio:.2f} at ω = {omega:g}" for omega, ratio in ratios.mean().items())
    return Verdict(
        "Linearised networks differ less in depth than the original ones",
        "near constant effective depth",
        f"{start.mean():.2f} times as deep before, {listed}",
        Decision(None) if is_short(table) else mean_above(differences.dropna()),
        f"path length of {deep} divided by that of {MODEL}, under the same ω: logarithm before "
        "minus the largest after; 95% t interval over seeds",
    )


def _compare_difficulties(table: pd.DataFrame, depths: Callable[..., pd.DataFrame]) -> Verdict:
    """Test whether networks for a harder task keep longer paths."""
    noisy = depths(MODEL, NOISE)
    clean = depths(MODEL)
    differences = (noisy - clean).mean(axis=1).dropna()
    return Verdict(
        "A harder task keeps longer nonlinear paths",
        "core networks depend on the difficulty of the task",
        _compare(noisy, clean) or "not measured",
        Decision(None) if is_short(table) else mean_above(differences),
        f"{MODEL} with {NOISE:.0%} wrong labels and with clean ones: mean difference over ω; 95% "
        "t interval over seeds",
    )


def _figure(table: pd.DataFrame) -> Figure:
    rows = table[(table["mode"] == "post-training") & (table.model == MODEL)]
    steps: list[Any] = sorted(rows.omega.unique())
    places = unique(rows.place)
    figure, grid = page_figure(2.6, columns=len(steps), sharey=True, squeeze=False)
    panels = grid[0]
    for axes, omega in zip(panels, steps, strict=True):
        for noise, colour, shift in ((0.0, "#0072B2", -0.2), (NOISE, "#D55E00", 0.2)):
            layers = rows[(rows.omega == omega) & (rows.noise == noise)].groupby("place")
            fractions = layers.nonlinear.sum() / layers.units.sum()
            if len(fractions):
                heights = np.arange(len(places)) + shift
                label = f"{noise:.0%} wrong labels"
                axes.barh(heights, fractions[places], 0.4, color=colour, label=label)
        axes.set(title=f"ω = {omega:g}", xlim=(0, 1))
        axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    panels[0].set_yticks(range(len(places)), places)
    panels[0].invert_yaxis()
    legend_below(figure, panels[-1], 2)
    return figure
