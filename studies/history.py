"""Signature statistics of published classifiers, by year."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from nlbench.reports.agreement import kendall
from nlbench.store.run import Run

from .framework import Findings, Runs, Verdict
from .framework.figures import page_figure
from .framework.verdicts import correlates, correlation_text, networks_ordered, range_text
from .shared.classifiers import (
    CLASSIFIERS,
    Classifiers,
    classifier_remarks,
    short_name,
    sort_classifiers,
    undecided_if_untrained,
)
from .shared.site_scores import signatures, site_scores
from .shared.zoo_networks import zoo_remarks

# Standard deviation of a network's scores over batches, from the slides.
STD_OVER_BATCHES = {
    "alexnet": 0.005,
    "vgg16": 0.008,
    "resnet152": 0.005,
    "densenet161": 0.020,
    "efficientnet_b4": 0.018,
    "vit_h_14": 0.013,
    "swin_b": 0.016,
}
COLUMNS = (
    "network", "year", "family", "group", "sites", "min", "median", "mean", "max", "spread",
)  # fmt: skip


def signature_statistics(run: Run) -> pd.DataFrame:
    """Compute statistics of each classifier's signature, with its year, family and group."""
    rows = [
        {"network": model, **vars(CLASSIFIERS[str(model)]), **summarise_scores(values)}
        for model, values in signatures(site_scores(run), "model")
        if model in CLASSIFIERS
    ]
    return sort_classifiers(pd.DataFrame(rows, columns=COLUMNS))


def summarise_scores(values: NDArray[np.float64]) -> dict[str, float]:
    """Compute the statistics of a signature."""
    return {
        "sites": len(values),
        "min": values.min(),
        "median": np.median(values),
        "mean": values.mean(),
        "max": values.max(),
        "spread": np.ptp(values),
    }


TRANSFORMERS = ("minilm-l6", "rxnmapper")
CONVOLUTIONAL = ("mtcnn-pnet", "mtcnn-rnet", "mtcnn-onet", "crepe-tiny", "efficientnet-lite0")


class History(Classifiers):
    """Affinity of torchvision's classifiers from AlexNet to ConvNeXt, by year."""

    question = "How did the nonlinearity of vision networks change over a decade?"
    zoo = TRANSFORMERS + CONVOLUTIONAL

    def analyse(self, runs: Runs) -> Findings:
        """Test the trends before transformers, and compare transformers with earlier networks."""
        run = runs["run"]
        table = signature_statistics(run)
        before = table[table.year < 2020]
        verdicts = [
            *(_trend(before, name) for name in ("max", "median", "spread")),
            _transformers(table),
            _early_networks(table),
            _googlenet(table),
        ]
        spreads = site_scores(run, statistic="std").groupby("model", sort=False).value.mean()
        stable = pd.DataFrame(
            [
                (model, STD_OVER_BATCHES.get(short_name(str(model)), np.nan), value)
                for model, value in spreads.items()
            ],
            columns=["network", "published", "here"],
        )
        return Findings(
            [*undecided_if_untrained(run, verdicts), _trained_transformers(runs)],
            {
                "Statistics of signatures": table,
                "Mean standard deviation of scores over batches": stable,
            },
            {"Minimum, median and maximum affinity of each network, by year": _figure(table)},
            [*classifier_remarks(run), *zoo_remarks(runs, self.zoo)],
        )


def _trained_transformers(runs: Runs) -> Verdict:
    """Compare trained Transformers with trained convolutional networks of the zoo."""
    scores = dict(signatures(site_scores(runs["zoo"]), "model")) if "zoo" in runs else {}
    means = {name.removeprefix("zoo/"): float(values.mean()) for name, values in scores.items()}
    lower = [means[name] for name in TRANSFORMERS if name in means]
    higher = [means[name] for name in CONVOLUTIONAL if name in means]
    return Verdict(
        "Trained Transformers of the zoo are more nonlinear than its convolutional networks",
        "",
        f"mean score {range_text(lower)}; the others {range_text(higher)}"
        if lower and higher
        else "",
        networks_ordered(lower, higher),
        "published of ViTs: lowest scores; Transformers for text and for molecules vs. networks "
        "for images and sounds; agrees if "
        "every one is below every other; a number needed is that of the smaller group",
    )


def _trend(before: pd.DataFrame, statistic: str) -> Verdict:
    name = {
        "max": "the largest score of a network",
        "median": "the median score",
        "spread": "the spread of scores (largest minus least)",
    }[statistic]
    families = before.groupby("family")[["year", statistic]].mean()
    tau = kendall(families.year, families[statistic])
    return Verdict(
        f"Before transformers {name} grew with the years",
        "increasing",
        correlation_text("τ", tau).replace("networks", "families"),
        correlates(tau),
        "Kendall's τ between year and score, means over the networks of each family",
    )


def _transformers(table: pd.DataFrame) -> Verdict:
    claim = "ViTs are the most nonlinear of all"
    published = "lowest scores"
    vits = table[table.family == "ViT"]["mean"]
    others = table[table.family != "ViT"]
    if vits.empty or others.empty:
        return Verdict(claim, published, remark="none available")
    lowest = others.sort_values("mean").iloc[0]
    return Verdict(
        claim,
        published,
        f"mean score {range_text(vits)}; the lowest other is "
        f"{short_name(lowest.network)} with {lowest['mean']:.2f}",
        networks_ordered(vits, others["mean"]),
        "agrees if every ViT's mean score is below that of every other network",
    )


def _early_networks(table: pd.DataFrame) -> Verdict:
    early = table[table.family.isin(["AlexNet", "VGG"])].spread
    later = table[(table.year >= 2014) & (table.year < 2020) & (table.family != "VGG")].spread
    are_known = len(early) > 0 and len(later) > 0
    return Verdict(
        "AlexNet's and VGG's scores are less spread than those of later networks until 2019",
        "very low spread",
        f"at most {early.max():.2f}; the others at least {later.min():.2f}" if are_known else "",
        networks_ordered(early, later),
    )


def _googlenet(table: pd.DataFrame) -> Verdict:
    claim = "GoogLeNet's scores lie between 0.6 and 0.9"
    published = "0.6 to 0.9"
    rows = table[table.network == "torchvision/googlenet"]
    if rows.empty:
        return Verdict(claim, published)
    low, high = float(rows["min"].iloc[0]), float(rows["max"].iloc[0])
    return Verdict(
        claim,
        published,
        f"{low:.2f} to {high:.2f}",
        low >= 0.55 and high <= 0.95,
        "rounded to one decimal, like the published ends",
    )


def _figure(table: pd.DataFrame) -> Figure:
    figure, axes = page_figure(3.4)
    places = np.arange(len(table))
    axes.vlines(places, table["min"], table["max"], color="#777777", linewidth=1)
    marks = {"max": ("^", "#D55E00"), "median": ("o", "#000000"), "min": ("v", "#0072B2")}
    for name, (mark, colour) in marks.items():
        axes.plot(places, table[name], mark, color=colour, markersize=4, label=name)
    for start in np.flatnonzero(table.year.diff().fillna(1)):
        axes.axvline(start - 0.5, color="#dddddd", linewidth=0.8)
        axes.annotate(
            str(table.year[start]),
            (start - 0.4, 1.0),
            xycoords=("data", "axes fraction"),
            va="bottom",
            fontsize=7,
        )
    axes.set_xticks(places, [short_name(name) for name in table.network], rotation=90, fontsize=7)
    axes.set(xlim=(-0.6, len(table) - 0.4), ylabel="affinity")
    axes.legend(loc="best", ncols=3)
    return figure
