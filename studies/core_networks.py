"""What is left of networks that are made linear: how deep, how wide, and on what it depends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from .drawing import page_figure
from .linearised_networks import (
    SOURCE,
    effort,
    layers,
    linearised,
    measured,
    networks,
    omegas,
    shrinks,
)
from .study import Context, Findings, Study, Verdict

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

    from nlbench.store.run_folder import Run

__all__ = ["CoreNetworks"]


MODEL, DATA = "vgg8", "digits"
NOISE = 0.4
WIDTHS = ("resnet18-w4", "resnet18-w8")
ALIKE = 0.25


class CoreNetworks(Study):
    """Path length and shape of what stays nonlinear, by ω, width, depth and difficulty."""

    question = "Do the units that stay nonlinear form a core of much the same depth and width?"
    source = SOURCE
    needs = "linearises 16 networks, of which early-or-late shares 9; trains 2"
    minutes, quick_minutes = 3.5, 0.6
    takes = ("seeds",)

    def measure(self, context: Context) -> Mapping[str, Run]:
        """Networks under several penalties, of several widths and depths, and of wrong labels."""
        steps = omegas(context, "post-training")
        weights: dict[str, list[str | Path]] = {MODEL: ["trained"]}
        weights[MODEL] += [
            linearised(context, MODEL, "post-training", omega, seed)
            for omega in steps
            for seed in context.seeds_or(3)
        ]
        weights[MODEL] += self._of_wrong_labels(context, steps)
        for model in WIDTHS[: 1 if context.quick else None]:
            for seed in context.seeds_or(3)[:1]:
                short: dict[str, Any] = {}
                if context.quick:
                    short = {"name": "quick", "epochs": 6, "warmup_steps": 20}
                start = context.trained(model, DATA, "auto", seed, **short)
                weights.setdefault(model, []).append(start)
                weights[model] += [
                    linearised(context, model, "post-training", omega, seed, weights=str(start))
                    for omega in steps[-2:]
                ]
        return {"run": measured(context, weights, DATA)}

    def _of_wrong_labels(self, context: Context, steps: tuple[float, ...]) -> list[str | Path]:
        """Networks that are made linear while they keep to wrong labels; there is one to begin."""
        from .linear_regions import shipped

        _, noisy = shipped()
        return [
            linearised(
                context,
                MODEL,
                "post-training",
                omega,
                # The seed decides which labels are wrong.
                0,
                weights=str(noisy),
                name=f"noise{NOISE:g}",
                label_noise=NOISE,
            )
            for omega in steps
        ]

    def analyse(self, runs: Mapping[str, Run]) -> Findings:
        """Compare the path lengths that are left."""
        table = networks(runs["run"])
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
        plain = _plain(lengths, MODEL)
        verdicts = [
            shrinks(
                table,
                list(plain.pathlength),
                f"{MODEL}, mean over seeds at ω = {', '.join(f'{one:g}' for one in plain.omega)}",
            ),
            _by_width(lengths),
            _by_depth(table, lengths),
            _by_difficulty(table),
        ]
        return Findings(
            verdicts,
            {"Means over seeds": lengths, "Networks": table},
            {
                "Share of each layer's units that stay nonlinear, input at the top": _figure(
                    layers(runs["run"])
                )
            },
            [
                f"Small data: {DATA}; seeds of {MODEL}: {table.seed.nunique()}, fewer of the other "
                "networks; the published experiments are on CIFAR and translation.",
                effort(table),
            ],
        )


def _plain(lengths: pd.DataFrame, model: str) -> pd.DataFrame:
    return lengths[(lengths.model == model) & (lengths.noise == 0)].sort_values("omega")


def _by_width(lengths: pd.DataFrame) -> Verdict:
    """Whether the depth that is left depends on the width."""
    both = [_plain(lengths, model).set_index("omega").pathlength for model in WIDTHS]
    shared = both[0].index.intersection(both[1].index)
    ours, agrees = "one width only", None
    if len(shared):
        ratios = both[1][shared] / both[0][shared]
        ours = ", ".join(
            f"ω = {omega:g}: {both[0][omega]:.2f} and {both[1][omega]:.2f}" for omega in shared
        )
        agrees = bool(((ratios - 1).abs() < ALIKE).all())
    return Verdict(
        "The depth that is left hardly depends on the width",
        "near constant effective depth",
        ours,
        agrees,
        f"path length of {' and '.join(WIDTHS)} under the same ω; agrees within {ALIKE:.0%}",
    )


def _by_depth(table: pd.DataFrame, lengths: pd.DataFrame) -> Verdict:
    """Whether networks of different depth come closer."""
    deep = WIDTHS[0]
    before = table[(table["mode"] == "reference") & (table.noise == 0)]
    first = before.groupby("model").pathlength.mean()
    both = [_plain(lengths, model).set_index("omega").pathlength for model in (deep, MODEL)]
    shared = both[0].index.intersection(both[1].index)
    ours, agrees = "not measured", None
    if len(shared) and {deep, MODEL} <= set(first.index):
        ratio, ratios = first[deep] / first[MODEL], both[0][shared] / both[1][shared]
        said = ", ".join(f"{one:.2f} at ω = {omega:g}" for omega, one in ratios.items())
        ours = f"{ratio:.2f} times as deep before, {said}"
        agrees = bool((np.abs(np.log(ratios)) < abs(np.log(ratio))).all())
    return Verdict(
        "What is left of a deeper network is of more similar depth than the networks were",
        "near constant effective depth",
        ours,
        agrees,
        f"path length of {deep} by that of {MODEL}, under the same ω",
    )


def _by_difficulty(table: pd.DataFrame) -> Verdict:
    """Whether a harder task keeps longer paths."""
    left = table[(table.model == MODEL) & (table["mode"] != "reference")]
    means = left.groupby(["noise", "omega"]).pathlength.mean()
    noisy = means[NOISE] if NOISE in means.index.get_level_values(0) else means[:0]
    clean = means[0.0]
    shared = [omega for omega in noisy.index if omega in clean.index]
    more = [noisy[omega] > clean[omega] for omega in shared]
    return Verdict(
        "A harder task keeps longer nonlinear paths",
        "core networks depend on the difficulty of the task",
        ", ".join(f"ω = {o:g}: {noisy[o]:.2f} against {clean[o]:.2f}" for o in shared)
        or "not measured",
        (True if all(more) else None if any(more) else False) if more else None,
        f"{MODEL} with {NOISE:.0%} wrong labels (one network of each ω) against clean ones; yes or "
        "no where all ω agree",
    )


def _figure(table: pd.DataFrame) -> Figure:
    left = table[(table["mode"] == "post-training") & (table.model == MODEL)]
    steps: list[Any] = sorted(left.omega.unique())
    places = list(dict.fromkeys(left.place))
    figure, grid = page_figure(2.6, columns=len(steps), sharey=True, squeeze=False)
    panels = grid[0]
    for axes, omega in zip(panels, steps, strict=True):
        for noise, colour, shift in ((0.0, "#0072B2", -0.2), (NOISE, "#D55E00", 0.2)):
            one = left[(left.omega == omega) & (left.noise == noise)].groupby("place")
            shares = one.nonlinear.sum() / one.units.sum()
            if len(shares):
                axes.barh(
                    np.arange(len(places)) + shift,
                    shares[places],
                    0.4,
                    color=colour,
                    label=f"{noise:.0%} wrong labels",
                )
        axes.set_title(f"ω = {omega:g}")
        axes.set_xlim(0, 1)
        axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    panels[0].set_yticks(range(len(places)), places)
    panels[0].invert_yaxis()
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure
