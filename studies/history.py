"""Statistics of the signatures of published classifiers, by year."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from nlbench.reports.agreement import kendall

from .classifiers import CLASSIFIERS, Classifiers, judged, remarks_on, short_name
from .drawing import page_figure
from .site_scores import signatures, site_scores
from .study import Findings, Verdict, above, over_networks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nlbench.store.run_folder import Run

__all__ = ["History", "statistics_of"]


# Standard deviation of a network's scores over batches, from the slides.
OVER_BATCHES = {
    "alexnet": 0.005,
    "vgg16": 0.008,
    "resnet152": 0.005,
    "densenet161": 0.020,
    "efficientnet_b4": 0.018,
    "vit_h_14": 0.013,
    "swin_b": 0.016,
}


def statistics_of(run: Run) -> pd.DataFrame:
    """Statistics of each classifier's signature, with its year, family and group."""
    table = site_scores(run)
    rows = [
        (
            model,
            CLASSIFIERS[str(model)].year,
            CLASSIFIERS[str(model)].family,
            CLASSIFIERS[str(model)].group,
            len(values),
            values.min(),
            np.median(values),
            values.mean(),
            values.max(),
            np.ptp(values),
        )
        for model, values in signatures(table, "model")
        if model in CLASSIFIERS
    ]
    columns = [
        "network", "year", "family", "group", "sites", "min", "median", "mean", "max", "spread",
    ]  # fmt: skip
    found = pd.DataFrame(rows, columns=columns)
    order = {name: place for place, name in enumerate(CLASSIFIERS)}
    return found.sort_values("network", key=lambda names: names.map(order), ignore_index=True)


class History(Classifiers):
    """Affinity of torchvision's classifiers from AlexNet to ConvNeXt, by year."""

    question = "How did the nonlinearity of vision networks change over a decade?"

    def analyse(self, runs: Mapping[str, Run]) -> Findings:
        """Trends before transformers, and what came with them."""
        run = runs["run"]
        found = statistics_of(run)
        before = found[found.year < 2020]
        verdicts = [
            *(_trend(before, name) for name in ("max", "median", "spread")),
            _transformers(found),
            _early(found),
            _within(found),
        ]
        over = site_scores(run, statistic="std").groupby("model", sort=False).value.mean()
        stable = pd.DataFrame(
            [(m, OVER_BATCHES.get(short_name(str(m)), np.nan), value) for m, value in over.items()],
            columns=["network", "published", "here"],
        )
        return Findings(
            judged(run, verdicts),
            {
                "Statistics of signatures": found,
                "Mean standard deviation of scores over batches": stable,
            },
            {"Least, median and largest affinity of each network, by year": _figure(found)},
            remarks_on(run),
        )


def _trend(before: pd.DataFrame, name: str) -> Verdict:
    said = {
        "max": "the largest score of a network",
        "median": "the median score",
        "spread": "the spread of scores (largest minus least)",
    }[name]
    tau = kendall(before.year, before[name])
    return Verdict(
        f"Before transformers {said} grew with the years",
        "increasing",
        over_networks("τ", tau),
        above(tau.low, tau.high),
        "Kendall's τ of year and score; networks of a family aren't independent, so the interval "
        "is too narrow",
    )


def _transformers(found: pd.DataFrame) -> Verdict:
    vits, others = found[found.family == "ViT"], found[found.family != "ViT"]
    if vits.empty or others.empty:
        return Verdict("ViTs are the most nonlinear of all", "lowest scores", "", None, "none here")
    least = others.sort_values("mean").iloc[0]
    return Verdict(
        "ViTs are the most nonlinear of all",
        "lowest scores",
        f"mean score {vits['mean'].mean():.2f} ({vits['mean'].min():.2f} to "
        f"{vits['mean'].max():.2f}); the lowest other is {short_name(least.network)} with "
        f"{least['mean']:.2f}",
        bool(vits["mean"].max() < least["mean"]),
        "every ViT's mean score below that of every other network",
    )


def _early(found: pd.DataFrame) -> Verdict:
    early = found[found.family.isin(["AlexNet", "VGG"])]
    later = found[(found.year >= 2014) & (found.year < 2020) & (found.family != "VGG")]
    both = len(early) > 0 and len(later) > 0
    return Verdict(
        "AlexNet's and VGG's scores are less spread than those of what came until 2019",
        "very low spread",
        f"{early.spread.max():.2f} at most; the others {later.spread.min():.2f} at least"
        if both
        else "",
        bool(early.spread.max() < later.spread.min()) if both else None,
    )


def _within(found: pd.DataFrame) -> Verdict:
    of = found[found.network == "torchvision/googlenet"]
    if of.empty:
        return Verdict("GoogLeNet's scores lie between 0.6 and 0.9", "0.6 to 0.9", "", None)
    low, high = float(of["min"].iloc[0]), float(of["max"].iloc[0])
    return Verdict(
        "GoogLeNet's scores lie between 0.6 and 0.9",
        "0.6 to 0.9",
        f"{low:.2f} to {high:.2f}",
        low >= 0.55 and high <= 0.95,
        "to the decimal of the published ends",
    )


def _figure(found: pd.DataFrame) -> Figure:
    figure, axes = page_figure(3.4)
    places = np.arange(len(found))
    axes.vlines(places, found["min"], found["max"], color="#777777", linewidth=1)
    for name, mark, colour in (
        ("max", "^", "#D55E00"),
        ("median", "o", "#000000"),
        ("min", "v", "#0072B2"),
    ):
        axes.plot(places, found[name], mark, color=colour, markersize=4, label=name)
    for start in np.flatnonzero(found.year.diff().fillna(1)):
        axes.axvline(start - 0.5, color="#dddddd", linewidth=0.8)
        axes.annotate(
            str(found.year[start]),
            (start - 0.4, 1.0),
            xycoords=("data", "axes fraction"),
            va="bottom",
            fontsize=7,
        )
    axes.set_xticks(places, [short_name(name) for name in found.network], rotation=90, fontsize=7)
    axes.set_xlim(-0.6, len(found) - 0.4)
    axes.set_ylabel("affinity")
    axes.legend(loc="best", ncols=3)
    return figure
