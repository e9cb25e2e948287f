"""Signatures of the same networks on several datasets."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nlbench.parsers import unique
from nlbench.store.signature import dtw_distances

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import page_figure
from .framework.verdicts import interval_text, mean_above, mean_and_spread
from .shared.site_scores import AFFINITY, signatures, site_scores
from .shared.small_networks import DATA, measure_networks, seeds_by_model

OTHERS = ("synthetic", "random")
TRAINING_DIGITS = "digits of the training split"
COLOURS = {TRAINING_DIGITS: "#009E73", "synthetic": "#0072B2", "random": "#D55E00"}


class Datasets(Study):
    """Signatures of digit classifiers on digits, synthetic pictures and noise."""

    question = "How far does a network's signature move on data it was not trained on?"
    source = AFFINITY
    needs = "digits; trains 9 networks"
    minutes = 3.0
    quick_minutes = 0.3
    takes = ("seeds",)

    def measure(self, context: Context) -> Runs:
        """Measure trained networks on each dataset and on their training images."""
        seeds = seeds_by_model(context)
        samples = 128 if context.quick else 512
        data = (DATA, *OTHERS)
        return {
            "run": measure_networks(context, seeds, data=data, samples=samples),
            "train": measure_networks(context, seeds, samples=samples, split="train", part="train"),
        }

    def analyse(self, runs: Runs) -> Findings:
        """Compare each signature with the same network's on the test digits."""
        training_digits = site_scores(runs["train"]).assign(data=TRAINING_DIGITS)
        table = pd.concat([site_scores(runs["run"]), training_digits], ignore_index=True)
        rows = []
        for (model, seed), sites in table.groupby(["model", "seed"], sort=False):
            by_data = dict(signatures(sites, "data"))
            for data in (TRAINING_DIGITS, *OTHERS):
                if data in by_data and DATA in by_data:
                    distance = dtw_distances([by_data[DATA], by_data[data]])[0, 1]
                    change = by_data[data].mean() - by_data[DATA].mean()
                    rows.append((model, seed, data, distance, change))
        columns = ["network", "seed", "data", "distance", "change of mean"]
        moved = pd.DataFrame(rows, columns=columns)
        wide = moved.pivot_table(index=["network", "seed"], columns="data", values="distance")
        return Findings(
            [
                _is_farther(
                    wide,
                    "synthetic",
                    "random",
                    "Noise moves a signature farther than pictures do",
                    "random 0.77 ± 0.32; CIFAR10 0.28 ± 0.11, CIFAR100 0.26 ± 0.11",
                ),
                _is_farther(
                    wide,
                    TRAINING_DIGITS,
                    "synthetic",
                    "Other pictures move a signature farther than other digits do",
                    "",
                ),
            ],
            {"Distance to the signature on the test digits": moved},
            {"How far other data move a signature": _figure(moved)},
            [
                "Small networks trained on digits, and synthetic pictures in place of CIFAR; "
                "the published distances are for 33 networks of other depths, trained on ImageNet."
            ],
        )


def _is_farther(
    distances: pd.DataFrame, nearer: str, farther: str, claim: str, published: str
) -> Verdict:
    if nearer not in distances or farther not in distances:
        return Verdict(claim, published, remark="not measured")
    differences = (distances[farther] - distances[nearer]).dropna()
    means = (f"{name} {mean_and_spread(distances[name])}" for name in (farther, nearer))
    return Verdict(
        claim,
        published,
        f"{'; '.join(means)}; farther by {interval_text(differences)}",
        mean_above(differences),
        f"{(differences > 0).sum()} of {len(differences)} networks in this order; differences "
        "within each, with their 95% t interval over networks; ± sd over networks",
    )


def _figure(moved: pd.DataFrame) -> Figure:
    figure, axes = page_figure(2.7)
    networks = unique(moved.network)
    for place, (data, colour) in enumerate(COLOURS.items()):
        rows = moved[moved.data == data]
        places = np.array([networks.index(name) for name in rows.network]) + 0.2 * (place - 1)
        axes.plot(places, rows.distance, "o", color=colour, label=data)
    axes.set_xticks(range(len(networks)), networks)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("DTW distance")
    axes.legend(loc="best")
    return figure
