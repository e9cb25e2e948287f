"""Differences between signatures of networks trained with different seeds."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from nlbench.parsers import unique
from nlbench.reports.signatures import compare_signatures
from nlbench.request import Request
from nlbench.store.run import Run

from .correlations import NAMES, OTHERS
from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import COLOURS, page_figure
from .framework.trends import MIN_NETWORKS, deviation_interval
from .framework.verdicts import (
    below,
    interval_text,
    mean_above,
    mean_and_spread,
    ordered,
    range_text,
)
from .shared.linear_regions import RECIPES, shipped_networks
from .shared.linearised_networks import linearise, original_network
from .shared.site_scores import AFFINITY, nearest_shares_group, signatures, site_scores
from .shared.small_networks import DATA, measure_networks, seeds_by_model

TABLE_3 = {
    "affinity": "0.76 ± 0.04",
    "cka": "0.90 ± 0.07",
    "norm": "448.56 ± 404.61",
    "sparsity": "0.56 ± 0.16",
    "entropy": "0.39 ± 0.46",
}
"""Mean and standard deviation over 17 ResNet50s."""


class Seeds(Study):
    """Distances between signatures, within one architecture and between architectures."""

    question = "Does a signature belong to the architecture, or does each training have its own?"
    source = AFFINITY
    needs = "digits; trains 21 networks"
    minutes = 5.0
    quick_minutes = 0.3
    takes = ("seeds",)

    def measure(self, context: Context) -> Runs:
        """Measure the affinity of VGG8s, ResNet20s and plain20s, and of untrained VGG8s."""
        trained = seeds_by_model(context, vgg8=9)
        drawn = {"vgg8": trained["vgg8"]}
        files = tuple(map(str, _vgg8_by_recipe(context)))
        recipes = Request(
            tuple(TABLE_3), ("vgg8",), (DATA,), files, samples=64 if context.quick else 0
        )
        return {
            "run": measure_networks(context, trained, drawn=drawn),
            "recipes": context.run(recipes, "recipes"),
        }

    def analyse(self, runs: Runs) -> Findings:
        """Compare signatures within and between architectures."""
        table = site_scores(runs["run"])
        trained = dict(signatures(table[table.state == "trained"], ["model", "seed"]))
        drawn = dict(signatures(table[table.state == "drawn"], ["model", "seed"]))
        names = [str(model) for model, _ in trained]
        compared = compare_signatures(list(trained.values()))
        pairs = _pairs(names, compared.distances)
        moved = {
            place: compare_signatures([drawn[key], trained[key]]).distances[0, 1]
            for place, key in enumerate(trained)
            if key in drawn
        }
        means = pd.DataFrame(
            [
                (model, seed, values.mean(), values.min(), values.max())
                for (model, seed), values in trained.items()
            ],
            columns=["network", "seed", "mean", "min", "max"],
        )
        criteria = _criteria(runs["recipes"])
        colours = dict(zip(unique(names), COLOURS, strict=False))
        return Findings(
            [
                _is_steady(means),
                _is_nearer(pairs, names),
                nearest_shares_group(
                    "The signature nearest to a training's is of the same architecture",
                    "",
                    names,
                    compared.distances,
                    "by chance it would be {chance:.0%}; distances are sums over sites, so longer "
                    "signatures are farther away",
                ),
                _moves_less_than_training(compared.distances, moved),
            ],
            {
                "Mean, lowest and highest score of each training": means,
                "Distances between signatures": pairs,
                "Five criteria over one architecture, trained in several ways": criteria,
            },
            {
                "Signatures of all trained networks, and their distances": _figure(
                    names, list(trained.values()), pairs, colours
                ),
            },
            [
                f"VGG8 is trained {names.count('vgg8')} times on digits; in the paper, VGG16 is "
                "trained nine times on CIFAR10.",
                f"The published criteria (appendix G, table 3) are those of 17 ResNet50s, trained "
                f"on ImageNet by three families of methods; here: {criteria.networks.max()} VGG8s, "
                "each trained on digits by another recipe. The mean over activations of each, ± "
                "sd over networks; the norm is absolute and depends on the network.",
            ],
        )


def _vgg8_by_recipe(context: Context) -> list[Path]:
    """Request VGG8s trained by seven recipes. Quick studies use the two bundled ones."""
    clean, noisy = shipped_networks()
    if context.quick:
        return [clean, noisy]
    _, augmented, wrong = RECIPES
    train = context.request_training
    original = original_network(context, "vgg8", 0)
    return [
        clean,
        train("vgg8", DATA, "adam", name="adam"),
        train("vgg8", DATA, augmented, name="shifted", flip=False),
        train("vgg8", DATA, wrong, name="noise0.4", label_noise=0.4),
        linearise(context, "vgg8", "post-training", 0.003, 0),
        linearise(context, "vgg8", "from-start", 0.001, 0),
        train("vgg8", DATA, "post-training", weights=original, name="random0.4", random_share=0.4),
    ]


def _criteria(run: Run) -> pd.DataFrame:
    """Return each criterion over the networks, averaged over activations, and as published."""
    rows = []
    for measure, published in TABLE_3.items():
        table = site_scores(run, measure, OTHERS.get(measure, "value"))
        means = table.groupby("weights").value.mean().dropna()
        rows.append((NAMES.get(measure, measure), published, mean_and_spread(means), len(means)))
    return pd.DataFrame(rows, columns=["criterion", "published", "here", "networks"])


def _pairs(names: Sequence[str], distances: NDArray[np.float64]) -> pd.DataFrame:
    rows = [
        (names[i], names[j], names[i] == names[j], distances[i, j])
        for i, j in itertools.combinations(range(len(names)), 2)
    ]
    return pd.DataFrame(rows, columns=["first", "second", "same", "distance"])


def _is_steady(means: pd.DataFrame) -> Verdict:
    ours = means[means.network == "vgg8"]["mean"]
    others = means[means.network != "vgg8"].groupby("network")["mean"].mean()
    gap = float((others - ours.mean()).abs().min())
    low, high = deviation_interval(ours)
    is_known = means.network.value_counts().min() >= MIN_NETWORKS
    return Verdict(
        "VGG8's mean score hardly depends on the seed",
        "robust to the seed",
        f"{ours.mean():.3f}; sd {ours.std():.3f} ({low:.3f} to {high:.3f}) over {len(ours)}",
        below((low, high), gap / 2) if is_known else None,
        "hardly: the 95% interval of the standard deviation is below half of the distance, "
        f"{gap:.3f}, to the nearest mean score of another architecture; at least {MIN_NETWORKS} "
        "networks of each",
    )


def _is_nearer(pairs: pd.DataFrame, names: Sequence[str]) -> Verdict:
    within = pairs[pairs.same].distance
    between = pairs[~pairs.same].distance
    fewest = min(Counter(names).values())
    return Verdict(
        "Signatures: trainings of one architecture are nearer to each other than to any other's",
        "",
        f"{range_text(within)} within, {range_text(between)} between",
        ordered(within, between) if fewest >= MIN_NETWORKS else None,
        "DTW distances; the farthest pair within one architecture vs. the nearest pair between "
        f"two, for architectures with at least {MIN_NETWORKS} networks each",
    )


def _moves_less_than_training(
    distances: NDArray[np.float64], moved: Mapping[int, float]
) -> Verdict:
    """Compare the distance between seeds with the distance from before to after training."""
    between_seeds = distances[np.ix_(list(moved), list(moved))]
    others = between_seeds.sum(0) / max(1, len(moved) - 1)
    by_training = np.array(list(moved.values()))
    differences = by_training - others
    return Verdict(
        "Seeds make less of a difference than training does",
        "stable over seeds, different for other weights",
        f"VGG8: {others.mean():.2f} between seeds, {by_training.mean():.2f} from drawn to trained",
        mean_above(differences),
        f"in {(differences > 0).sum()} of {len(differences)} networks: DTW distance to their own "
        "signature before training vs. the mean distance to those of other seeds; difference "
        f"{interval_text(differences)}, 95% t interval over networks",
    )


def _figure(
    names: Sequence[str],
    curves: Sequence[NDArray[np.float64]],
    pairs: pd.DataFrame,
    colours: Mapping[str, str],
) -> Figure:
    figure, (left, right) = page_figure(3.0, columns=2, width_ratios=(3, 2))
    for name, values in zip(names, curves, strict=True):
        depth = np.linspace(0, 1, len(values))
        left.plot(depth, values, color=colours[name], linewidth=0.9, alpha=0.8)
    for name, colour in colours.items():
        left.plot([], [], color=colour, label=f"{name} × {names.count(name)}")
    left.set(xlabel="depth, first to last site", ylabel="affinity")
    left.legend(loc="lower right")
    kinds = {"within": pairs.distance[pairs.same], "between": pairs.distance[~pairs.same]}
    rng = np.random.default_rng(0)
    for place, away in enumerate(kinds.values()):
        right.plot(place + rng.uniform(-0.2, 0.2, len(away)), away, ".", color=COLOURS[place])
    right.set_xticks(range(len(kinds)), [f"{kind}\narchitectures" for kind in kinds])
    right.set(xlim=(-0.5, len(kinds) - 0.5), ylabel="DTW distance")
    right.set_ylim(bottom=0)
    return figure
