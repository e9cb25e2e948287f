"""How far signatures of one architecture differ between trainings."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from nlbench.reports.agreement import paired_share
from nlbench.reports.signatures import SignatureComparison, compare_signatures

from .drawing import COLOURS, page_figure
from .site_scores import AFFINITY, signatures, site_scores
from .small_networks import measured_networks, seeds_of_each
from .study import Context, Findings, Study, Verdict, above

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nlbench.store.run_folder import Run

__all__ = ["Seeds"]


class Seeds(Study):
    """Nine trainings of VGG8: their signatures against each other and other architectures'."""

    question = "Is a signature the architecture's own, or does each training have another?"
    source = AFFINITY
    needs = "digits; trains 15 networks"
    minutes, quick_minutes = 4.0, 0.5
    takes = ("seeds",)

    def measure(self, context: Context) -> Mapping[str, Run]:
        """Affinity of nine VGG8s and three ResNet20s and plain20s, and of VGG8s as drawn."""
        trained = seeds_of_each(context, of_vgg8=9)
        drawn = {"vgg8": trained["vgg8"]}
        return {"run": measured_networks(context, trained, drawn=drawn)}

    def analyse(self, runs: Mapping[str, Run]) -> Findings:
        """Distances of signatures within an architecture and between two."""
        table = site_scores(runs["run"])
        trained = table[table.state == "trained"]
        found = dict(signatures(trained, ["model", "seed"]))
        names = [str(model) for model, _ in found]
        compared = compare_signatures(list(found.values()))
        pairs = _pairs(names, compared.distances)
        within, between = pairs[pairs.same], pairs[~pairs.same]
        before = dict(signatures(table[table.state == "drawn"], ["model", "seed"]))
        moved = {
            place: compare_signatures([before[key], found[key]]).distances[0, 1]
            for place, key in enumerate(found)
            if key in before
        }
        means = pd.DataFrame(
            [
                (model, seed, values.mean(), values.min(), values.max())
                for (model, seed), values in found.items()
            ],
            columns=["network", "seed", "mean", "min", "max"],
        )
        return Findings(
            [
                _steady(means),
                _nearer(within.distance, between.distance),
                _recognised(names, compared.distances),
                _weights_count(compared.distances, moved),
            ],
            {
                "Mean, least and largest score of each training": means,
                "Distances of signatures": pairs,
            },
            {
                "Signatures of all trainings, and their distances": _figure(
                    names, list(found.values()), pairs
                ),
                "A map of the signatures": _map(names, compared),
            },
            [
                f"{names.count('vgg8')} trainings of VGG8 on digits; the published ones are nine "
                "of VGG16 on CIFAR10."
            ],
        )


def _pairs(names: Sequence[str], distances: NDArray[np.float64]) -> pd.DataFrame:
    rows = [
        (names[i], names[j], names[i] == names[j], distances[i, j])
        for i, j in itertools.combinations(range(len(names)), 2)
    ]
    return pd.DataFrame(rows, columns=["first", "second", "same", "distance"])


def _steady(means: pd.DataFrame) -> Verdict:
    ours = means[means.network == "vgg8"]["mean"]
    others = means[means.network != "vgg8"].groupby("network")["mean"].mean()
    gap = float((others - ours.mean()).abs().min())
    spread = float(ours.std())
    return Verdict(
        "VGG8's mean score hardly depends on the seed",
        "robust to the seed",
        f"{ours.mean():.3f} ± {spread:.3f} over {len(ours)}",
        spread < gap / 2,
        f"hardly: ± is less than half of the {gap:.3f} to the mean score of the nearest other "
        "architecture",
    )


def _nearer(within: pd.Series, between: pd.Series) -> Verdict:
    both = "trainings of one architecture are nearer to each other than to any other's"
    return Verdict(
        f"Signatures: {both}",
        "",
        f"{within.mean():.2f} ({within.min():.2f} to {within.max():.2f}) within, "
        f"{between.mean():.2f} ({between.min():.2f} to {between.max():.2f}) between",
        bool(within.max() < between.min()) if len(within) else None,
        "DTW distances; the farthest pair within against the nearest pair between",
    )


def _recognised(names: Sequence[str], distances: NDArray[np.float64]) -> Verdict:
    """Whether the nearest other signature is of the same architecture."""
    alone = [names.count(name) == 1 for name in names]
    away = distances + np.diag(np.full(len(names), np.inf))
    hits = [
        1.0 if names[int(away[i].argmin())] == names[i] else -1.0
        for i in range(len(names))
        if not alone[i]
    ]
    share = paired_share(hits)
    chance = float(
        np.mean([(names.count(n) - 1) / (len(names) - 1) for n in names if names.count(n) > 1])
    )
    return Verdict(
        "The signature nearest to a training's is of the same architecture",
        "",
        f"{share.value:.0%} of {share.n} ({share.low:.0%} to {share.high:.0%})",
        above(share.low, share.high, chance),
        f"by chance it would be {chance:.0%}",
    )


def _weights_count(distances: NDArray[np.float64], moved: Mapping[int, float]) -> Verdict:
    """Whether each network is nearer to other seeds' than to what it was before training."""
    own = distances[np.ix_(list(moved), list(moved))]
    others = own.sum(0) / max(1, len(own) - 1)
    by_training = np.array(list(moved.values()))
    share = paired_share(by_training - others)
    return Verdict(
        "Seeds make less of a difference than training does",
        "stable over seeds, different for other weights",
        f"VGG8: {others.mean():.2f} between seeds, {by_training.mean():.2f} from drawn to trained",
        above(share.low, share.high, 0.5) if len(own) > 1 else None,
        f"so in {share.value:.0%} of {share.n} networks ({share.low:.0%} to {share.high:.0%}, "
        "Wilson): DTW distance to its own signature before training against the mean distance to "
        "those of other seeds",
    )


def _figure(
    names: Sequence[str], found: Sequence[NDArray[np.float64]], pairs: pd.DataFrame
) -> Figure:
    networks = list(dict.fromkeys(names))
    figure, (left, right) = page_figure(3.0, columns=2, width_ratios=(3, 2))
    for name, values in zip(names, found, strict=True):
        depth = np.linspace(0, 1, len(values))
        left.plot(depth, values, color=COLOURS[networks.index(name)], linewidth=0.9, alpha=0.8)
    for place, network in enumerate(networks):
        left.plot([], [], color=COLOURS[place], label=f"{network} × {names.count(network)}")
    left.set_xlabel("depth, first to last site")
    left.set_ylabel("affinity")
    left.legend(loc="lower right")
    kinds = {
        "within": pairs.distance[pairs.same],
        "between": pairs.distance[~pairs.same],
    }
    rng = np.random.default_rng(0)
    for place, away in enumerate(kinds.values()):
        right.plot(place + rng.uniform(-0.2, 0.2, len(away)), away, ".", color=COLOURS[place])
    right.set_xticks(range(len(kinds)), [f"{kind}\narchitectures" for kind in kinds])
    right.set_xlim(-0.5, len(kinds) - 0.5)
    right.set_ylim(bottom=0)
    right.set_ylabel("DTW distance")
    return figure


def _map(names: Sequence[str], compared: SignatureComparison) -> Figure:
    figure, axes = page_figure(2.7)
    for place, network in enumerate(dict.fromkeys(names)):
        of = [i for i, name in enumerate(names) if name == network]
        axes.plot(*compared.points[of].T, "o", color=COLOURS[place], label=network)
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_xlabel("classical scaling of DTW distances")
    axes.legend()
    return figure
