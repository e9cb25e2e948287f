"""Depth and width of the nonlinear core of linearised networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import legend_below, page_figure
from .framework.verdicts import above, ordered, within
from .shared.linear_regions import shipped_networks
from .shared.linearised_networks import (
    SOURCE,
    epochs_remark,
    is_short,
    layer_table,
    linearise,
    measure_networks,
    network_table,
    omegas,
    paths_shrink,
)

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure


MODEL, DATA = "vgg8", "digits"
NOISE = 0.4
WIDTHS = ("resnet18-w4", "resnet18-w8")
MAX_RELATIVE_DIFFERENCE = 0.25


class CoreNetworks(Study):
    """Path length and shape of the nonlinear core, by ω, width, depth and difficulty."""

    question = "Do the units that stay nonlinear form a core of nearly constant depth and width?"
    source = SOURCE
    needs = "linearises 16 networks (9 shared with early-or-late), trains 2"
    minutes, quick_minutes = 3.5, 0.3
    takes = ("seeds",)

    def measure(self, context: Context) -> Runs:
        """Measure networks with several penalties, widths and depths, and with wrong labels."""
        steps = omegas(context, "post-training")
        weights: dict[str, list[str | Path]] = {MODEL: ["trained"]}
        weights[MODEL] += [
            linearise(context, MODEL, "post-training", omega, seed)
            for omega in steps
            for seed in context.seeds_or(3)
        ]
        _, noisy = shipped_networks()
        # The seed decides which labels are wrong, so only seed 0 matches the bundled network.
        wrong_labels: dict[str, Any] = {"name": f"noise{NOISE:g}", "label_noise": NOISE}
        weights[MODEL] += [
            linearise(context, MODEL, "post-training", omega, 0, weights=str(noisy), **wrong_labels)
            for omega in steps
        ]
        short: dict[str, Any] = {"name": "quick", "epochs": 1, "warmup_steps": 20}
        changes = short if context.quick else {}
        seed = context.seeds_or(3)[0]
        for model in WIDTHS[: 1 if context.quick else None]:
            start = context.request_training(model, DATA, "auto", seed, **changes)
            weights[model] = [start]
            weights[model] += [
                linearise(context, model, "post-training", omega, seed, weights=str(start))
                for omega in steps[-2:]
            ]
        return {"run": measure_networks(context, weights, DATA)}

    def analyse(self, runs: Runs) -> Findings:
        """Compare the remaining path lengths."""
        table = network_table(runs["run"])
        lengths = (
            table[table["mode"] != "reference"]
            .groupby(["model", "noise", "omega"])
            .agg(
                networks=("seed", "size"),
                accuracy=("accuracy", "mean"),
                linear=("linear-units", "mean"),
                pathlength=("pathlength", "mean"),
            )
            .reset_index()
        )
        plain = _lengths_by_omega(lengths, MODEL)
        steps = ", ".join(f"{omega:g}" for omega in plain.index)
        verdicts = [
            paths_shrink(
                table,
                list(plain),
                f"{MODEL}, mean over seeds at ω = {steps}",
            ),
            _compare_widths(lengths),
            _compare_layer_widths(layer_table(runs["run"])),
            _compare_depths(table, lengths),
            _compare_difficulties(table, lengths),
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
                f"Small-scale: {DATA}; seeds of {MODEL}: {table.seed.nunique()}, fewer for other "
                "networks; the published experiments are on CIFAR and translation.",
                epochs_remark(table),
            ],
        )


def _lengths_by_omega(lengths: pd.DataFrame, model: str, noise: float = 0.0) -> pd.Series:
    rows = lengths[(lengths.model == model) & (lengths.noise == noise)]
    series: pd.Series = rows.sort_values("omega").set_index("omega").pathlength
    return series


def _pair(first: pd.Series, second: pd.Series) -> pd.DataFrame:
    """Pair the lengths of two networks by penalty."""
    return pd.concat([first, second], axis=1, join="inner", keys=["first", "second"])


def _compare_widths(lengths: pd.DataFrame) -> Verdict:
    return _same_for_widths(
        "depth",
        [_lengths_by_omega(lengths, model) for model in WIDTHS],
        2,
        f"path length of {' and '.join(WIDTHS)} under the same ω",
    )


def _compare_layer_widths(layers: pd.DataFrame) -> Verdict:
    """Compare the nonlinear units per layer between networks of different width."""
    late = layers[layers["mode"] == "post-training"]
    return _same_for_widths(
        "width",
        [late[late.model == model].groupby("omega").nonlinear.mean() for model in WIDTHS],
        1,
        f"nonlinear units per layer of {' and '.join(WIDTHS)} under the same ω; the latter had "
        "twice as many before",
    )


def _same_for_widths(
    quantity: str, means: Sequence[pd.Series[float]], decimals: int, remark: str
) -> Verdict:
    """Compare a mean between the networks of both widths, for each ω."""
    pairs = _pair(*means)
    rows = (
        f"ω = {omega:g}: {row['first']:.{decimals}f} and {row.second:.{decimals}f}"
        for omega, row in pairs.iterrows()
    )
    return Verdict(
        f"The remaining {quantity} hardly depends on the width",
        f"near constant effective {quantity}",
        ", ".join(rows) or "one width only",
        within(pairs.second / pairs["first"], 1.0, MAX_RELATIVE_DIFFERENCE),
        f"{remark}; agrees if within {MAX_RELATIVE_DIFFERENCE:.0%}",
    )


def _compare_depths(table: pd.DataFrame, lengths: pd.DataFrame) -> Verdict:
    """Test whether linearisation makes the path lengths of deep and shallow networks more alike."""
    deep = WIDTHS[0]
    before = table[(table["mode"] == "reference") & (table.noise == 0)]
    start = before.groupby("model").pathlength.mean()
    pairs = _pair(_lengths_by_omega(lengths, deep), _lengths_by_omega(lengths, MODEL))
    ratios, ours, first_ratio = pairs["first"] / pairs.second, "not measured", np.nan
    if len(pairs) and {deep, MODEL} <= set(start.index):
        first_ratio = start[deep] / start[MODEL]
        listed = ", ".join(f"{ratio:.2f} at ω = {omega:g}" for omega, ratio in ratios.items())
        ours = f"{first_ratio:.2f} times as deep before, {listed}"
    return Verdict(
        "Linearised networks differ less in depth than the original ones",
        "near constant effective depth",
        ours,
        None if is_short(table) else ordered(np.abs(np.log(ratios)), abs(np.log(first_ratio))),
        f"path length of {deep} divided by that of {MODEL}, under the same ω",
    )


def _compare_difficulties(table: pd.DataFrame, lengths: pd.DataFrame) -> Verdict:
    """Test whether networks for a harder task keep longer paths."""
    noisy, clean = (_lengths_by_omega(lengths, MODEL, noise) for noise in (NOISE, 0.0))
    pairs = _pair(noisy, clean)
    rows = (
        f"ω = {omega:g}: {row['first']:.2f} vs. {row.second:.2f}" for omega, row in pairs.iterrows()
    )
    return Verdict(
        "A harder task keeps longer nonlinear paths",
        "core networks depend on the difficulty of the task",
        ", ".join(rows) or "not measured",
        None if is_short(table) else above(pairs["first"] - pairs.second),
        f"{MODEL} with {NOISE:.0%} wrong labels (one network per ω) vs. clean ones; decided "
        "only if all ω agree",
    )


def _figure(table: pd.DataFrame) -> Figure:
    rows = table[(table["mode"] == "post-training") & (table.model == MODEL)]
    steps: list[Any] = sorted(rows.omega.unique())
    places = list(dict.fromkeys(rows.place))
    figure, grid = page_figure(2.6, columns=len(steps), sharey=True, squeeze=False)
    panels = grid[0]
    for axes, omega in zip(panels, steps, strict=True):
        for noise, colour, shift in ((0.0, "#0072B2", -0.2), (NOISE, "#D55E00", 0.2)):
            layers = rows[(rows.omega == omega) & (rows.noise == noise)].groupby("place")
            shares = layers.nonlinear.sum() / layers.units.sum()
            if len(shares):
                heights = np.arange(len(places)) + shift
                label = f"{noise:.0%} wrong labels"
                axes.barh(heights, shares[places], 0.4, color=colour, label=label)
        axes.set(title=f"ω = {omega:g}", xlim=(0, 1))
        axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    panels[0].set_yticks(range(len(places)), places)
    panels[0].invert_yaxis()
    legend_below(figure, panels[-1], 2)
    return figure
