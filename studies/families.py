"""Which published classifiers have signatures that are alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from nlbench.errors import RequestError
from nlbench.reports.agreement import kendall, paired_share
from nlbench.reports.signatures import SignatureComparison, compare_signatures

from .classifiers import CLASSIFIERS, FAMILIES, Classifiers, judged, remarks_on, short_name
from .drawing import page_figure
from .site_scores import signatures, site_scores
from .study import Findings, Verdict, above, over_networks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nlbench.store.run_folder import Run

__all__ = ["Families"]


_COLOURS = (
    "#0072B2", "#56B4E9", "#009E73", "#66A61E", "#000000", "#777777", "#E69F00", "#B8860B",
    "#D55E00", "#CC79A7", "#7B3294",
)  # fmt: skip


class Families(Classifiers):
    """DTW distances between the signatures of torchvision's classifiers: dendrogram and map."""

    question = "Do networks of one family have signatures that are alike?"

    def analyse(self, runs: Mapping[str, Run]) -> Findings:
        """Distances, what merges with what, and how far it is from AlexNet."""
        run = runs["run"]
        table = dict(signatures(site_scores(run), "model"))
        found = {name: table[name] for name in CLASSIFIERS if name in table}
        if len(found) < 2:
            raise RequestError(
                f"families: only {', '.join(found) or 'no network'} has a signature here, expected "
                "two networks at least; --weights init measures all as drawn"
            )
        names = list(found)
        compared = compare_signatures(list(found.values()))
        families = [CLASSIFIERS[name].family for name in names]
        away = pd.DataFrame(compared.distances, columns=[short_name(name) for name in names]).round(
            3
        )
        away.insert(0, "network", [short_name(name) for name in names])
        return Findings(
            judged(
                run,
                [
                    _alike(families, compared.distances),
                    *_from_alexnet(names, compared.distances),
                    _apart(families, compared.distances),
                ],
            ),
            {"Distances of signatures": away},
            {
                "Dendrogram of the signatures (average linkage of DTW distances)": _dendrogram(
                    names, compared
                ),
                "A map of the signatures": _map(names, compared),
            },
            remarks_on(run),
        )


def _alike(families: Sequence[str], distances: NDArray[np.float64]) -> Verdict:
    """Whether the nearest other network is of the same family, against chance."""
    away = distances + np.diag(np.full(len(families), np.inf))
    counted = [i for i, name in enumerate(families) if families.count(name) > 1]
    hits = [1.0 if families[int(away[i].argmin())] == families[i] else -1.0 for i in counted]
    chance = (
        float(np.mean([(families.count(families[i]) - 1) / (len(families) - 1) for i in counted]))
        if counted
        else float("nan")
    )
    share = paired_share(hits)
    return Verdict(
        "The nearest signature is that of a network of the same family",
        "architectures of one family cluster",
        f"{share.value:.0%} of {share.n} ({share.low:.0%} to {share.high:.0%})",
        above(share.low, share.high, chance),
        f"by chance {chance:.0%}; networks whose family has no other are left out",
    )


def _from_alexnet(names: Sequence[str], distances: NDArray[np.float64]) -> list[Verdict]:
    first = "torchvision/alexnet"
    claims = (
        "Until 2019 networks became less and less like AlexNet",
        "Swin and ConvNeXt are like AlexNet again",
    )
    if first not in names:
        return [Verdict(claim, "", "", None, "AlexNet is missing") for claim in claims]
    away = pd.Series(distances[names.index(first)], index=list(names)).drop(first)
    about = [CLASSIFIERS[name] for name in away.index]
    years = np.array([one.year for one in about])
    post = np.array([one.group == "post-ViT" for one in about])
    # AlexNet's years themselves, at a distance of nothing, would decide the order alone.
    earlier = away[years < 2020]
    tau = kendall(years[years < 2020], earlier)
    middle = away[(years >= 2018) & (years <= 2020)]
    both = post.any() and len(middle) > 0
    return [
        Verdict(
            claims[0],
            "increasingly dissimilar",
            over_networks("τ", tau),
            above(tau.low, tau.high),
            "Kendall's τ of year and DTW distance to AlexNet; longer signatures are farther away "
            "whatever their scores",
        ),
        Verdict(
            claims[1],
            "a U-turn",
            f"distance {away[post].mean():.2f}, after {middle.mean():.2f} from 2018 to 2020"
            if both
            else "",
            bool(away[post].max() < middle.min()) if both else None,
            "all of them nearer than every network of those years",
        ),
    ]


def _apart(families: Sequence[str], distances: NDArray[np.float64]) -> Verdict:
    """Whether ViTs are farther from the others than any other family is."""
    means = {}
    for family in dict.fromkeys(families):
        inside = np.array([name == family for name in families])
        means[family] = float(distances[np.ix_(inside, ~inside)].mean())
    if "ViT" not in means or len(means) < 3:
        return Verdict("ViTs are unlike all others", "highly dissimilar", "", None)
    most = max(means, key=lambda name: means[name])
    second = max((name for name in means if name != "ViT"), key=lambda name: means[name])
    return Verdict(
        "ViTs are unlike all others",
        "highly dissimilar",
        f"mean distance {means['ViT']:.2f}; {second} {means[second]:.2f}",
        most == "ViT",
        "mean DTW distance to all networks of other families, the largest of all families",
    )


def _colour(name: str) -> str:
    return _COLOURS[list(FAMILIES).index(CLASSIFIERS[name].family)]


def _dendrogram(names: Sequence[str], compared: SignatureComparison) -> Figure:
    from scipy.cluster.hierarchy import dendrogram

    figure, axes = page_figure(1.0 + 0.17 * len(names))
    dendrogram(
        compared.merges,
        ax=axes,
        orientation="left",
        labels=[short_name(name) for name in names],
        link_color_func=lambda _: "#777777",
        leaf_font_size=7,
    )
    by_label = {short_name(name): name for name in names}
    for label in axes.get_yticklabels():
        label.set_color(_colour(by_label[label.get_text()]))
    axes.set_xlabel("DTW distance")
    return figure


def _map(names: Sequence[str], compared: SignatureComparison) -> Figure:
    figure, axes = page_figure(4.0)
    for family in dict.fromkeys(CLASSIFIERS[name].family for name in names):
        of = [i for i, name in enumerate(names) if CLASSIFIERS[name].family == family]
        axes.plot(*compared.points[of].T, "o", color=_colour(names[of[0]]), label=family)
    for name, point in zip(names, compared.points, strict=True):
        axes.annotate(
            short_name(name), point, xytext=(3, 3), textcoords="offset points", fontsize=6
        )
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_xlabel("classical scaling of DTW distances")
    axes.legend(fontsize=7, ncols=2)
    return figure
