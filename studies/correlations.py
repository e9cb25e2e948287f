"""Affinity against the other measures of activations, site by site."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from nlbench.reports.agreement import within_groups

from .classifiers import CLASSIFIERS, judged, measured_classifiers, remarks_on, short_name
from .drawing import page_figure
from .site_scores import AFFINITY, site_scores
from .small_networks import measured_networks, seeds_of_each
from .study import Context, Findings, Study, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nlbench.store.run_folder import Run

__all__ = ["PUBLISHED", "Correlations", "correlations_of"]


# The published norm is ‖X - Y‖ itself, not relative to ‖X‖.
OTHERS = {
    "cka": "value",
    "norm": "absolute",
    "sparsity": "value",
    "entropy": "value",
    "r2": "value",
}
NAMES = {"cka": "CKA", "norm": "norm", "sparsity": "sparsity", "entropy": "entropy", "r2": "R²"}

# The paper's table 2, in the order of OTHERS.
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
"""Mean and standard deviation over networks, as the paper's table 2 ends."""

STRONG = 0.7
"""A coefficient from which half of the variance is shared."""


class Correlations(Study):
    """Affinity against R², CKA, norm, sparsity and entropy over the sites of each network."""

    question = "Does the affinity score tell what no other measure of activations tells?"
    source = AFFINITY
    needs = "digits, trains 9 networks; pretrained weights and ImageNet, else random weights"
    minutes, quick_minutes = 5.0, 1.2
    takes = ("data", "weights", "seeds")

    def measure(self, context: Context) -> Mapping[str, Run]:
        """All measures of sites of the classifiers, and of small networks trained on digits."""
        measures = ("affinity", *OTHERS)
        return {
            "classifiers": measured_classifiers(context, measures),
            "digits": measured_networks(
                context, seeds_of_each(context), measures=measures, part="digits"
            ),
        }

    def analyse(self, runs: Mapping[str, Run]) -> Findings:
        """Pearson's correlation with affinity within each network, by measure."""
        run = runs["classifiers"]
        found = correlations_of(run)
        small = correlations_of(runs["digits"])
        published = [PUBLISHED.get(short_name(str(name)), {}) for name in found.network]
        for other in OTHERS:
            found[f"published {NAMES[other]}"] = [one.get(other, math.nan) for one in published]
        return Findings(
            [
                *judged(run, [*_averages(found), _closest(found), _consistent(found, "")]),
                _consistent(small, "Small networks trained on digits: "),
            ],
            {
                "Pearson's correlation with affinity over sites": found,
                "The same for small networks trained on digits": small,
            },
            {
                "Correlation with affinity: the classifiers (dots), the published table (bars: "
                "mean ± standard deviation) and networks trained on digits (crosses)": _figure(
                    found, small
                )
            },
            [
                *remarks_on(run),
                "Sites with no more samples than inputs have no R²: the fit would be exact.",
            ],
        )


def correlations_of(run: Run) -> pd.DataFrame:
    """Correlate affinity with each other measure over the sites of each network.

    Returns
    -------
    DataFrame
        One row a network and seed; columns ``network, seed, sites`` and one a measure.
    """
    keys = ["model", "weights", "seed", "place"]
    table = site_scores(run).set_index(keys).value.rename("affinity").to_frame()
    for other, statistic in OTHERS.items():
        table[other] = site_scores(run, other, statistic).set_index(keys).value
    rows = []
    for (model, _, seed), part in table.groupby(level=["model", "weights", "seed"], sort=False):
        values = [_pearson(part[["affinity", other]].dropna()) for other in OTHERS]
        rows.append((model, seed, int(part.affinity.notna().sum()), *values))
    found = pd.DataFrame(rows, columns=["network", "seed", "sites", *OTHERS])
    order = {name: place for place, name in enumerate(CLASSIFIERS)}
    return found.sort_values(
        "network", key=lambda names: names.map(lambda n: order.get(n, 0)), kind="stable"
    ).reset_index(drop=True)


def _pearson(pairs: pd.DataFrame) -> float:
    """Of two columns; of fewer than four pairs it says nothing."""
    if len(pairs) < 4:
        return math.nan
    return within_groups([(pairs.iloc[:, 0], pairs.iloc[:, 1])]).value


def _averages(found: pd.DataFrame) -> list[Verdict]:
    verdicts = []
    for other, (mean, std) in AVERAGE.items():
        ours = found[other].dropna()
        verdicts.append(
            Verdict(
                f"Affinity and {NAMES[other]}: mean correlation over networks",
                f"{mean:.2f} ± {std:.2f}",
                f"{ours.mean():.2f} ± {ours.std():.2f} (n = {len(ours)})",
                bool(abs(ours.mean() - mean) <= std) if len(ours) else None,
                "agrees if within the published standard deviation over networks",
            )
        )
    return verdicts


def _closest(found: pd.DataFrame) -> Verdict:
    """Whether what goes with affinity most closely changes with the family."""
    family = [CLASSIFIERS[name].family for name in found.network]
    means = found.groupby(family, sort=False)[list(OTHERS)].mean().abs()
    best = means.dropna(how="all").idxmax(axis=1)
    said = "; ".join(
        f"{NAMES[other]}: {', '.join(best.index[best == other])}"
        for other in OTHERS
        if (best == other).any()
    )
    return Verdict(
        "Which measure goes with affinity most closely changes with the family",
        "entropy: VGG; sparsity: ResNet, DenseNet; CKA: MNASNet, EfficientNet; norm: ViT, Swin; "
        "R²: ConvNeXt",
        said,
        len(set(best)) > 1,
        "by the mean coefficient of the networks of a family",
    )


def _consistent(found: pd.DataFrame, whose: str) -> Verdict:
    """Whether any measure follows affinity strongly, and with one sign, in every network."""
    strong: list[str] = []
    told: list[str] = []
    for other in OTHERS:
        values = found[other].dropna()
        if len(values):
            told.append(f"{NAMES[other]} {values.min():.2f} to {values.max():.2f}")
            if values.min() >= STRONG or values.max() <= -STRONG:
                strong.append(other)
    return Verdict(
        f"{whose}{'n' if whose else 'N'}o other measure follows affinity in every network",
        "no strong consistent correlation",
        "; ".join(told) or "none",
        not strong if told else None,
        f"follows: Pearson's coefficient over sites at least {STRONG} in size, of one sign, in "
        f"each of {len(found)} networks",
    )


def _figure(found: pd.DataFrame, small: pd.DataFrame) -> Figure:
    figure, axes = page_figure(3.0)
    rng = np.random.default_rng(0)
    for place, (other, (mean, std)) in enumerate(AVERAGE.items()):
        axes.bar(place, 2 * std, 0.7, bottom=mean - std, color="#dddddd")
        axes.hlines(mean, place - 0.35, place + 0.35, color="#777777")
        for table, mark, colour in ((found, "o", "#0072B2"), (small, "x", "#D55E00")):
            values = table[other].to_numpy()
            shifted = place + rng.uniform(-0.25, 0.25, len(values))
            axes.plot(shifted, values, mark, color=colour, markersize=4)
    axes.axhline(0, color="#777777", linewidth=0.8)
    axes.set_xticks(range(len(OTHERS)), [NAMES[other] for other in AVERAGE])
    axes.set_ylim(-1.05, 1.05)
    axes.set_ylabel("Pearson's r with affinity")
    return figure
