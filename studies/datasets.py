"""The same network on several datasets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from nlbench.reports.agreement import paired_share
from nlbench.reports.signatures import dtw_distances

from .drawing import page_figure
from .site_scores import AFFINITY, signatures, site_scores
from .small_networks import DATA, measured_networks, seeds_of_each
from .study import Context, Findings, Study, Verdict, above

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nlbench.store.run_folder import Run

__all__ = ["Datasets"]


OTHERS = ("synthetic", "random")
UNSEEN = "digits of the training split"
COLOURS = {UNSEEN: "#009E73", "synthetic": "#0072B2", "random": "#D55E00"}


class Datasets(Study):
    """Networks trained on digits, on digits, made-up pictures and noise: how signatures move."""

    question = "How far does a network's signature move on data that it was not trained on?"
    source = AFFINITY
    needs = "digits; trains 9 networks"
    minutes, quick_minutes = 3.0, 0.5
    takes = ("seeds",)

    def measure(self, context: Context) -> Mapping[str, Run]:
        """Affinity of trained networks on each dataset, and on the digits they were trained on."""
        seeds = seeds_of_each(context)
        samples = 128 if context.quick else 512
        others = (DATA, *OTHERS)
        return {
            "run": measured_networks(context, seeds, data=others, samples=samples),
            "train": measured_networks(
                context, seeds, samples=samples, split="train", part="train"
            ),
        }

    def analyse(self, runs: Mapping[str, Run]) -> Findings:
        """Distance of each network's signature on other data to that on the test digits."""
        seen = site_scores(runs["run"])
        known = site_scores(runs["train"]).assign(data=UNSEEN)
        table = pd.concat([seen, known], ignore_index=True)
        rows = []
        for (model, seed), part in table.groupby(["model", "seed"], sort=False):
            found = dict(signatures(part, "data"))
            for data in (UNSEEN, *OTHERS):
                if data in found and DATA in found:
                    away = dtw_distances([found[DATA], found[data]])[0, 1]
                    change = found[data].mean() - found[DATA].mean()
                    rows.append((model, seed, data, away, change))
        moved = pd.DataFrame(
            rows, columns=["network", "seed", "data", "distance", "change of mean"]
        )
        wide = moved.pivot_table(index=["network", "seed"], columns="data", values="distance")
        return Findings(
            [
                _ordered(
                    wide,
                    "synthetic",
                    "random",
                    "Noise moves a signature farther than pictures do",
                    "random 0.77 ± 0.32; CIFAR10 0.28 ± 0.11, CIFAR100 0.26 ± 0.11",
                ),
                _ordered(
                    wide,
                    UNSEEN,
                    "synthetic",
                    "Other pictures move a signature farther than other digits do",
                    "",
                ),
            ],
            {"Distance to the signature on the test digits": moved},
            {"How far other data move a signature": _figure(moved)},
            [
                "Small networks trained on digits, and made-up pictures in place of CIFAR; the "
                "published distances are of 33 networks trained on ImageNet, and of other lengths.",
            ],
        )


def _ordered(wide: pd.DataFrame, less: str, more: str, claim: str, published: str) -> Verdict:
    if less not in wide or more not in wide:
        return Verdict(claim, published, "", None, "not measured")
    share = paired_share(wide[more] - wide[less])
    return Verdict(
        claim,
        published,
        f"{more} {_told(wide[more])}; {less} {_told(wide[less])}",
        above(share.low, share.high, 0.5),
        f"{share.value:.0%} of {share.n} networks ({share.low:.0%} to {share.high:.0%}), each "
        "against itself; Wilson's interval",
    )


def _told(values: pd.Series) -> str:
    return (
        f"{values.mean():.2f} ± {values.std():.2f}" if len(values) > 1 else f"{values.mean():.2f}"
    )


def _figure(moved: pd.DataFrame) -> Figure:
    figure, axes = page_figure(2.7)
    networks = list(dict.fromkeys(moved.network))
    for place, (data, colour) in enumerate(COLOURS.items()):
        part = moved[moved.data == data]
        where = np.array([networks.index(name) for name in part.network]) + 0.2 * (place - 1)
        axes.plot(where, part.distance, "o", color=colour, label=data)
    axes.set_xticks(range(len(networks)), networks)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("DTW distance")
    axes.legend(loc="best")
    return figure
