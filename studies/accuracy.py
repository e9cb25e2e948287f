"""Correlation of signature statistics with the published accuracy of networks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nlbench.reports.agreement import Correlation, within_groups

from .airfoils import SIZES
from .framework import Findings, Runs, Verdict
from .framework.figures import draw_groups, page_figure
from .framework.verdicts import correlates, correlation_text
from .history import signature_statistics, summarise_scores
from .shared.classifiers import Classifiers, classifier_remarks, short_name, undecided_if_untrained
from .shared.site_scores import signatures, site_scores
from .shared.zoo_networks import zoo_remarks

STATISTICS = ("min", "median", "mean", "max", "spread")
TRAITS = ("parameters", "operations", "sites")
COLOURS = {
    "pre-residual": "#0072B2",
    "residual": "#009E73",
    "searched": "#E69F00",
    "ViT": "#D55E00",
    "post-ViT": "#CC79A7",
}
# Groups in which, according to the paper, scores predict accuracy better than size and depth.
GROUPS = ("residual", "ViT", "post-ViT")


class AccuracyStudy(Classifiers):
    """Signature statistics of torchvision's classifiers vs. their published accuracy."""

    question = "Does a network's signature predict its accuracy better than its size does?"
    zoo = tuple(f"neuralfoil-{size}" for size in SIZES)

    def analyse(self, runs: Runs) -> Findings:
        """Correlate signature statistics, size and depth with accuracy, group by group."""
        run = runs["run"]
        networks = add_accuracy(signature_statistics(run))
        by_group = [("all", networks), *networks.groupby("group", sort=False)]
        rows = [
            (group, name, r.n, r.value, r.low, r.high)
            for group, members in by_group
            for name in (*STATISTICS, *TRAITS)
            for r in [pearson(members[name], members.accuracy)]
        ]
        table = pd.DataFrame(rows, columns=["group", "statistic", "n", "r", "low", "high"])
        traditional = networks[networks.family.isin(["AlexNet", "VGG", "ResNet", "DenseNet"])]
        vits = networks[networks.group == "ViT"]
        spread = pearson(traditional.spread, traditional.accuracy)
        least = pearson(vits["min"], vits.accuracy)
        verdicts = [
            Verdict(
                "AlexNet, VGGs, ResNets, DenseNets: the more spread the scores, the more accurate",
                "r = 0.755",
                correlation_text("r", spread),
                correlates(spread),
                "the published number is legible only on the slides, without the name of its "
                "statistic",
            ),
            Verdict(
                "ViTs: the lower the least score, the more accurate",
                "r = -0.96",
                correlation_text("r", least),
                correlates(least, -1),
            ),
            *(
                _test_best_predictor(
                    networks[networks.group == group],
                    STATISTICS,
                    f"{group} networks: a statistic of the scores predicts accuracy better "
                    "than size, operations and depth do",
                    "a statistic of the scores",
                )
                for group in GROUPS
            ),
            _test_best_predictor(
                networks[networks.group == "searched"],
                ("parameters",),
                "searched networks: the number of parameters predicts accuracy best",
                "parameters",
            ),
        ]
        foils = airfoil_networks(runs)
        return Findings(
            [*undecided_if_untrained(run, verdicts), *_airfoil_verdicts(foils)],
            {
                "Pearson's correlation with accuracy": table,
                "Networks": networks,
                "Networks of one task, trained": foils,
            },
            {"Spread and minimum of scores vs. published accuracy": _figure(networks)},
            [
                *classifier_remarks(run),
                *zoo_remarks(runs, self.zoo),
                "Accuracy, parameters and operations are those reported by torchvision for its "
                "default weights, which for some networks are better than the paper's.",
            ],
        )


def airfoil_networks(runs: Runs) -> pd.DataFrame:
    """Return the signature statistics of NeuralFoil's sizes, trained on one task.

    ``accuracy`` is minus the logarithm of the published error; ``parameters`` is also logarithmic.
    """
    scores = dict(signatures(site_scores(runs["zoo"]), "model")) if "zoo" in runs else {}
    rows = []
    for name, values in scores.items():
        parameters, error = SIZES[name.rpartition("-")[2]]
        sizes = {"parameters": math.log(parameters), "accuracy": -math.log(error)}
        rows.append({"network": name, **summarise_scores(values), **sizes})
    columns = ["network", "sites", *STATISTICS, "parameters", "accuracy"]
    return pd.DataFrame(rows, columns=columns)


def _airfoil_verdicts(networks: pd.DataFrame) -> list[Verdict]:
    spread = pearson(networks.spread, networks.accuracy)
    return [
        Verdict(
            "NeuralFoil's eight sizes: the more spread the scores, the more accurate",
            "",
            correlation_text("r", spread),
            correlates(spread),
            "published of classifiers: r = 0.755; trained networks; accuracy is minus the "
            "logarithm of the published error",
        ),
        _test_best_predictor(
            networks,
            STATISTICS,
            "NeuralFoil's eight sizes: a statistic of the scores predicts accuracy better than "
            "the logarithm of the size and the depth do",
            "",
            ("parameters", "sites"),
        ),
    ]


def add_accuracy(networks: pd.DataFrame) -> pd.DataFrame:
    """Add the figures that torchvision reports for each network's default weights.

    The columns are ``accuracy`` (top-1 on ImageNet in percent), ``parameters`` (millions) and
    ``operations`` (billions of multiplications and additions for one image).
    """
    from torchvision import models

    metas = [models.get_model_weights(short_name(n)).DEFAULT.meta for n in networks.network]
    return networks.assign(
        accuracy=[meta["_metrics"]["ImageNet-1K"]["acc@1"] for meta in metas],
        parameters=[meta["num_params"] / 1e6 for meta in metas],
        operations=[meta["_ops"] for meta in metas],
    )


def pearson(x: Sequence[float] | pd.Series, y: Sequence[float] | pd.Series) -> Correlation:
    """Compute Pearson's correlation with an interval. It is NaN for fewer than three pairs.

    Examples
    --------
    >>> pearson([0.0, 1.0, 2.0], [3.0, 4.0, 5.0]).value
    1.0
    """
    if len(x) < 3:
        return Correlation(math.nan, math.nan, math.nan, len(x))
    return within_groups([(np.asarray(x), np.asarray(y))])


def _test_best_predictor(
    networks: pd.DataFrame,
    expected: Sequence[str],
    claim: str,
    published: str,
    traits: Sequence[str] = TRAITS,
) -> Verdict:
    """Test whether an expected quantity is the best predictor in every leave-one-out sample."""
    if len(networks) < 4:
        return Verdict(claim, published, f"{len(networks)} networks", remark="too few")

    def best_predictor(rows: pd.DataFrame) -> str:
        names = (*STATISTICS, *traits)
        strengths = {name: abs(pearson(rows[name], rows.accuracy).value) for name in names}
        known = {name: r for name, r in strengths.items() if math.isfinite(r)}
        return max(known, key=lambda name: known[name]) if known else ""

    name = best_predictor(networks)
    answers = {best_predictor(networks.drop(index)) in expected for index in networks.index}
    is_stable = len(answers) == 1
    r = pearson(networks[name], networks.accuracy)
    return Verdict(
        claim,
        published,
        f"{name}, r = {r.value:.2f} (n = {r.n})",
        name in expected if is_stable else None,
        "the same if any single network is left out"
        if is_stable
        else "depends on which network is left out",
    )


def _figure(networks: pd.DataFrame) -> Figure:
    figure, panels = page_figure(3.0, columns=2)
    for axes, name in zip(panels, ("spread", "min"), strict=True):
        draw_groups(axes, networks, "accuracy", name, "group", COLOURS)
        axes.set(xlabel="published accuracy, %", ylabel=f"{name} of affinity")
    panels[0].legend(loc="best", fontsize=7)
    return figure
