"""Correlations between affinity and other measures of activations over sites."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from nlbench.parsers import unique
from nlbench.reports.agreement import within_groups
from nlbench.store.run import Run

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import page_figure
from .framework.trends import SIGNIFICANCE, mean_correlation
from .framework.verdicts import Decision, all_hold, correlates_weakly, in_most_networks, mean_near
from .shared.classifiers import (
    CLASSIFIERS,
    classifier_remarks,
    measure_classifiers,
    short_name,
    sort_classifiers,
    undecided_if_untrained,
)
from .shared.site_scores import AFFINITY, site_scores
from .shared.small_networks import measure_networks, seeds_by_model
from .shared.zoo_networks import measure_zoo, zoo_remarks

# Statistic of each measure; the published norm is ‖X - Y‖, not relative to ‖X‖.
OTHERS = {
    "cka": "value",
    "norm": "absolute",
    "sparsity": "value",
    "entropy": "value",
    "r2": "value",
}
NAMES = {"cka": "CKA", "norm": "norm", "sparsity": "sparsity", "entropy": "entropy", "r2": "R²"}

# Table 2 of the paper, in the order of OTHERS.
_TABLE = """
    alexnet -0.75 -0.86 0.14 -0.80 -0.41
    vgg11 -0.07 -0.76 -0.15 -0.95 -0.27
    vgg13 0.08 -0.66 -0.23 -0.93 -0.26
    vgg16 0.01 -0.63 -0.19 -0.88 -0.17
    vgg19 -0.01 -0.62 -0.15 -0.86 -0.14
    googlenet 0.74 -0.60 -0.83 -0.49 0.73
    inception_v3 0.69 -0.66 -0.75 -0.45 0.35
    resnet18 0.59 -0.17 -0.67 -0.30 -0.44
    resnet34 0.48 -0.18 -0.65 -0.19 -0.08
    resnet50 0.56 -0.60 -0.71 -0.50 -0.78
    resnet101 0.51 -0.57 -0.70 -0.51 -0.64
    resnet152 0.52 -0.51 -0.68 -0.42 -0.48
    densenet121 0.84 -0.75 -0.87 -0.62 0.82
    densenet161 0.87 -0.74 -0.87 -0.67 0.81
    densenet169 0.87 -0.74 -0.87 -0.67 0.81
    densenet201 0.89 -0.75 -0.91 -0.67 0.90
    efficientnet_b1 0.35 -0.41 -0.39 0.01 0.03
    efficientnet_b2 0.49 -0.02 -0.44 -0.06 0.34
    efficientnet_b3 0.32 -0.12 -0.18 -0.13 0.18
    efficientnet_b4 0.30 -0.51 -0.29 -0.44 0.11
    vit_b_32 0.47 -0.31 -0.29 0.39 0.51
    vit_l_32 -0.14 -0.61 -0.47 -0.02 -0.06
    vit_b_16 -0.27 -0.71 0.04 0.39 -0.22
    vit_l_16 -0.39 -0.89 -0.66 -0.23 -0.24
    vit_h_14 -0.77 -0.83 0.92 0.31 -0.49
    swin_t -0.12 -0.39 -0.02 -0.42 -0.06
    swin_s -0.003 -0.61 -0.31 0.18 -0.03
    swin_b -0.32 -0.59 -0.43 0.42 -0.32
    convnext_tiny 0.77 -0.01 -0.04 0.09 0.80
    convnext_small 0.57 0.22 0.25 0.13 0.72
    convnext_base 0.67 0.41 0.35 -0.03 0.82
    convnext_large 0.75 0.23 0.35 -0.10 0.84
"""
PUBLISHED: Mapping[str, Mapping[str, float]] = {
    name: dict(zip(OTHERS, map(float, values), strict=True))
    for name, *values in (line.split() for line in _TABLE.strip().splitlines())
}
AVERAGE = {
    "cka": (0.31, 0.45),
    "norm": (-0.44, 0.35),
    "sparsity": (-0.31, 0.43),
    "entropy": (-0.29, 0.39),
    "r2": (0.13, 0.50),
}
"""Mean and standard deviation over networks, from the end of table 2."""

STRONG = 0.7
"""Minimum size of a strong correlation: about half of the variance is shared."""
MAX_DIFFERENCE = 0.1
"""Maximum difference between correlations that count as equal."""
PERMUTATIONS = 2000


ZOO = ("efficientnet-lite0", "mtcnn-rnet", "mtcnn-onet", "crepe-tiny", "minilm-l6", "smollm2-135m")


class Correlations(Study):
    """Affinity vs. R², CKA, norm, sparsity and entropy over the sites of each network."""

    question = "Does the affinity score show something that no other measure of activations shows?"
    source = AFFINITY
    needs = "digits, trains 9 networks; pretrained weights and ImageNet, else random weights"
    minutes = 7.0
    quick_minutes = 1.4
    takes = ("data", "weights", "seeds")

    def measure(self, context: Context) -> Runs:
        """Measure the sites of the classifiers, of small networks and of zoo networks."""
        measures = ("affinity", *OTHERS)
        return {
            "classifiers": measure_classifiers(context, measures),
            "digits": measure_networks(
                context, seeds_by_model(context), measures=measures, part="digits"
            ),
            **measure_zoo(context, ZOO[1:3] if context.quick else ZOO, measures),
        }

    def analyse(self, runs: Runs) -> Findings:
        """Correlate affinity with each other measure within each network."""
        run = runs["classifiers"]
        table = correlate_sites(run)
        small = correlate_sites(runs["digits"])
        published = [PUBLISHED.get(short_name(str(name)), {}) for name in table.network]
        for other in OTHERS:
            table[f"published {NAMES[other]}"] = [row.get(other, math.nan) for row in published]
        verdicts = [
            *_averages(table),
            _closest_by_family(table),
            _none_follows("No other measure follows affinity", table),
        ]
        follows = "no other measure follows affinity"
        on_digits = _none_follows(f"Small networks trained on digits: {follows}", small)
        zoo = correlate_sites(runs["zoo"]) if "zoo" in runs else small[:0]
        of_zoo = _none_follows(f"Trained networks of the zoo: {follows}", zoo)
        return Findings(
            [*undecided_if_untrained(run, verdicts), on_digits, of_zoo],
            {
                "Pearson's correlation with affinity over sites": table,
                "The same for small networks trained on digits": small,
                "The same for trained networks of the zoo": zoo,
            },
            {
                "Correlation with affinity: classifiers (dots), published table (bars: "
                "mean ± standard deviation), networks trained on digits (crosses)": _figure(
                    table, small
                )
            },
            [
                *classifier_remarks(run),
                *zoo_remarks(runs, ZOO),
                "R² is undefined at sites without more samples than inputs: any fit is exact.",
            ],
        )


def correlate_sites(run: Run) -> pd.DataFrame:
    """Correlate affinity with every other measure over the sites of each network.

    The columns are ``network, seed, sites`` and one per measure.
    """
    keys = ["model", "weights", "seed", "place"]
    table = site_scores(run).set_index(keys).value.rename("affinity").to_frame()
    for other, statistic in OTHERS.items():
        table[other] = site_scores(run, other, statistic).set_index(keys).value
    rows = []
    for (model, _, seed), sites in table.groupby(level=["model", "weights", "seed"], sort=False):
        values = [_pearson(sites[["affinity", other]].dropna()) for other in OTHERS]
        rows.append((model, seed, int(sites.affinity.notna().sum()), *values))
    return sort_classifiers(pd.DataFrame(rows, columns=["network", "seed", "sites", *OTHERS]))


def _pearson(pairs: pd.DataFrame) -> float:
    """Compute the correlation of two columns, or NaN for fewer than four pairs."""
    if len(pairs) < 4:
        return math.nan
    return within_groups([(pairs.iloc[:, 0], pairs.iloc[:, 1])]).value


def _averages(table: pd.DataFrame) -> list[Verdict]:
    verdicts = []
    for other, (mean, std) in AVERAGE.items():
        ours = table[other].dropna()
        differences = (ours - table[f"published {NAMES[other]}"]).dropna()
        verdicts.append(
            Verdict(
                f"Affinity and {NAMES[other]}: mean correlation over networks",
                f"{mean:.2f} ± {std:.2f}",
                f"{ours.mean():.2f} ± {ours.std():.2f} (n = {len(ours)})",
                mean_near(differences, 0, MAX_DIFFERENCE),
                "± sd over networks; agrees if the mean difference from the published coefficient "
                f"of the same network lies within ±{MAX_DIFFERENCE}, by its 95% t interval over "
                f"{len(differences)} networks, disagrees if it lies outside",
            )
        )
    return verdicts


def _closest_by_family(table: pd.DataFrame) -> Verdict:
    """Test whether the measure closest to affinity depends on the family."""
    sizes = table[list(OTHERS)].abs().dropna(how="all")
    closest = sizes.idxmax(axis=1)
    family = pd.Series([CLASSIFIERS[name].family for name in table.network], table.index)
    family = family[closest.index]
    listed = [
        f"{NAMES[other]}: {', '.join(unique(family[closest == other]))}"
        for other in OTHERS
        if (closest == other).any()
    ]
    codes = [pd.factorize(values)[0] for values in (closest, family)]
    p = _chance_of_agreement(*codes) if len(closest) else 1.0
    most = in_most_networks(closest == closest.mode().iloc[0]) if len(closest) else Decision(None)
    return Verdict(
        "The measure closest to affinity depends on the family",
        "entropy: VGG; sparsity: ResNet, DenseNet; CKA: MNASNet, EfficientNet; norm: ViT, Swin; "
        "R²: ConvNeXt",
        "; ".join(listed),
        True if p < SIGNIFICANCE else Decision(False if most.agrees else None),
        "the largest coefficient of each network; agrees if more pairs of a family share it than "
        f"if families were drawn at random (permutation test, p = {p:.2g}); disagrees if one "
        "measure is closest in most networks",
    )


def _chance_of_agreement(closest: NDArray[np.int64], family: NDArray[np.int64]) -> float:
    """Compute the p-value of the number of pairs that share a family and the closest measure."""
    rng = np.random.default_rng(0)
    is_family = np.equal.outer(family, family)

    def count(values: NDArray[np.int64]) -> int:
        return int((is_family & np.equal.outer(values, values)).sum())

    drawn = np.array([count(rng.permutation(closest)) for _ in range(PERMUTATIONS)])
    return float((1 + (drawn >= count(closest)).sum()) / (1 + PERMUTATIONS))


def _none_follows(claim: str, table: pd.DataFrame) -> Verdict:
    """Test that no measure correlates strongly with affinity on average over networks."""
    means = {
        other: mean_correlation(values)
        for other in OTHERS
        # A coefficient defined for few networks says nothing about the others.
        if 2 * len(values := table[other].dropna()) > len(table)
    }
    return Verdict(
        claim,
        "no strong consistent correlation",
        "; ".join(f"{NAMES[other]} {mean.text}" for other, mean in means.items()) or "none",
        all_hold(correlates_weakly(mean, STRONG) for mean in means.values()),
        "mean Pearson correlation over sites, by Fisher's transform, with its 95% t interval over "
        f"{len(table)} networks; agrees if all intervals lie within ±{STRONG} (equivalence), "
        "disagrees if one lies outside",
    )


def _figure(table: pd.DataFrame, small: pd.DataFrame) -> Figure:
    figure, axes = page_figure(3.0)
    rng = np.random.default_rng(0)
    for place, (other, (mean, std)) in enumerate(AVERAGE.items()):
        axes.bar(place, 2 * std, 0.7, bottom=mean - std, color="#dddddd")
        axes.hlines(mean, place - 0.35, place + 0.35, color="#777777")
        for correlations, mark, colour in ((table, "o", "#0072B2"), (small, "x", "#D55E00")):
            values = correlations[other].to_numpy()
            places = place + rng.uniform(-0.25, 0.25, len(values))
            axes.plot(places, values, mark, color=colour, markersize=4)
    axes.axhline(0, color="#777777", linewidth=0.8)
    axes.set_xticks(range(len(OTHERS)), [NAMES[other] for other in AVERAGE])
    axes.set(ylim=(-1.05, 1.05), ylabel="Pearson's r with affinity")
    return figure
