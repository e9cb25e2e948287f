"""Statistics of signatures against the accuracy that was published of a network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from nlbench.reports.agreement import Correlation, within_groups

from .classifiers import Classifiers, judged, remarks_on, short_name
from .drawing import page_figure
from .history import statistics_of
from .study import Findings, Verdict, above, over_networks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nlbench.store.run_folder import Run

__all__ = ["Accuracy"]


STATISTICS = ("min", "median", "mean", "max", "spread")
TRAITS = ("parameters", "operations", "sites")
COLOURS = {
    "pre-residual": "#0072B2",
    "residual": "#009E73",
    "searched": "#E69F00",
    "ViT": "#D55E00",
    "post-ViT": "#CC79A7",
}
# The groups in which the paper finds that scores tell accuracy better than size and depth do.
TELLING = ("residual", "ViT", "post-ViT")


class Accuracy(Classifiers):
    """Statistics of signatures of torchvision's classifiers against their published accuracy."""

    question = "Does a network's signature tell its accuracy better than its size does?"

    def analyse(self, runs: Mapping[str, Run]) -> Findings:
        """Correlate statistics of signatures, size and depth with accuracy, group by group."""
        run = runs["run"]
        found = with_accuracy(statistics_of(run))
        table = pd.DataFrame(
            [
                (group, name, c.n, c.value, c.low, c.high)
                for group, part in [("all", found), *found.groupby("group", sort=False)]
                for name in (*STATISTICS, *TRAITS)
                for c in [pearson(part[name], part.accuracy)]
            ],
            columns=["group", "statistic", "n", "r", "low", "high"],
        )
        traditional = found[found.family.isin(["AlexNet", "VGG", "ResNet", "DenseNet"])]
        verdicts = [
            _correlated(
                "AlexNet, VGGs, ResNets, DenseNets: the more spread the scores, the more accurate",
                "r = 0.755",
                pearson(traditional.spread, traditional.accuracy),
                1,
            ),
            _correlated(
                "ViTs: the lower the least score, the more accurate",
                "r = -0.96",
                pearson(found["min"][found.group == "ViT"], found.accuracy[found.group == "ViT"]),
                -1,
            ),
            *(_best(group, found[found.group == group], STATISTICS) for group in TELLING),
            _best("searched", found[found.group == "searched"], ("parameters",)),
        ]
        return Findings(
            judged(run, verdicts),
            {
                "Pearson's correlation with accuracy": table,
                "Networks": found,
            },
            {"Spread and least score against published accuracy": _figure(found)},
            [
                *remarks_on(run),
                "Accuracy, parameters and operations are what torchvision states of its default "
                "weights, which for some networks are better ones than the paper had.",
            ],
        )


def with_accuracy(found: pd.DataFrame) -> pd.DataFrame:
    """Add what torchvision states of each network's default weights.

    Columns ``accuracy`` (top-1 on ImageNet, in percent), ``parameters`` (millions) and
    ``operations`` (thousand millions of multiplications and additions, for one image).
    """
    from torchvision import models

    stated = [models.get_model_weights(short_name(n)).DEFAULT.meta for n in found.network]
    return found.assign(
        accuracy=[meta["_metrics"]["ImageNet-1K"]["acc@1"] for meta in stated],
        parameters=[meta["num_params"] / 1e6 for meta in stated],
        operations=[meta["_ops"] for meta in stated],
    )


def pearson(x: Sequence[float] | pd.Series, y: Sequence[float] | pd.Series) -> Correlation:
    """Pearson's correlation with an interval; of fewer than three pairs there is none.

    Examples
    --------
    >>> pearson([0.0, 1.0, 2.0], [3.0, 4.0, 5.0]).value
    1.0
    """
    if len(x) < 3:
        return Correlation(math.nan, math.nan, math.nan, len(x))
    return within_groups([(np.asarray(x), np.asarray(y))])


def _correlated(claim: str, published: str, ours: Correlation, sign: int) -> Verdict:
    low, high = sorted((sign * ours.low, sign * ours.high))
    return Verdict(
        claim,
        published,
        over_networks("r", ours),
        above(low, high),
        "the published number is legible on the slides alone, and there without its statistic's "
        "name"
        if sign > 0
        else "",
    )


def _best(group: str, part: pd.DataFrame, expected: Sequence[str]) -> Verdict:
    """Whether what goes with accuracy most closely is among the expected, whoever is left out."""
    names = (*STATISTICS, *TRAITS)

    def most(kept: pd.DataFrame) -> str:
        shares = {name: abs(pearson(kept[name], kept.accuracy).value) for name in names}
        known = {name: share for name, share in shares.items() if math.isfinite(share)}
        return max(known, key=lambda name: known[name]) if known else ""

    scores = expected == STATISTICS
    claim = (
        f"{group} networks: a statistic of the scores goes with accuracy more closely than size, "
        "operations and depth do"
        if scores
        else f"{group} networks: the number of parameters goes with accuracy most closely"
    )
    published = "a statistic of the scores" if scores else "parameters"
    if len(part) < 4:
        return Verdict(claim, published, f"{len(part)} networks", None, "too few")
    whole = most(part)
    others = [most(part.drop(index)) for index in part.index]
    holds = [name in expected for name in others]
    value = pearson(part[whole], part.accuracy)
    return Verdict(
        claim,
        published,
        f"{whole}, r = {value.value:.2f} (n = {value.n})",
        None if len(set(holds)) > 1 else whole in expected,
        "the same with each network left out in turn"
        if len(set(holds)) == 1
        else "it changes with the network that is left out",
    )


def _figure(found: pd.DataFrame) -> Figure:
    figure, panels = page_figure(3.0, columns=2)
    for axes, name in zip(panels, ("spread", "min"), strict=True):
        for group, part in found.groupby("group", sort=False):
            axes.plot(part.accuracy, part[name], "o", color=COLOURS[str(group)], label=str(group))
        axes.set_xlabel("published accuracy, %")
        axes.set_ylabel(f"{name} of affinity")
    panels[0].legend(loc="best", fontsize=7)
    return figure
