"""Similarity of the signatures of published classifiers, by family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from nlbench.errors import RequestError
from nlbench.reports.agreement import kendall
from nlbench.reports.signatures import SignatureComparison, compare_signatures

from .airfoils import SIZES
from .framework import Findings, Runs, Verdict
from .framework.figures import page_figure
from .framework.verdicts import (
    Decision,
    correlates,
    correlation_text,
    networks_ordered,
    ordered,
    range_text,
    rises,
    within,
)
from .shared.classifiers import (
    CLASSIFIERS,
    FAMILIES,
    Classifiers,
    classifier_remarks,
    short_name,
    undecided_if_untrained,
)
from .shared.site_scores import nearest_shares_group, signatures, site_scores
from .shared.zoo_networks import zoo_remarks

_PALETTE = (
    "#0072B2", "#56B4E9", "#009E73", "#66A61E", "#000000", "#777777", "#E69F00", "#B8860B",
    "#D55E00", "#CC79A7", "#7B3294",
)  # fmt: skip
COLOURS = dict(zip(FAMILIES, _PALETTE, strict=True))


MAX_CHANGE = 0.05
"""Maximum difference between scores that counts as no change."""


class Families(Classifiers):
    """DTW distances between the signatures of torchvision's classifiers, and their dendrogram."""

    question = "Do networks of one family have similar signatures?"
    zoo = (
        *(f"neuralfoil-{size}" for size in SIZES),
        *("mtcnn-pnet", "mtcnn-rnet", "mtcnn-onet", "crepe-tiny", "crepe-full"),
    )
    zoo_weights = ("trained", "init")

    def analyse(self, runs: Runs) -> Findings:
        """Compare signatures within and between families."""
        run = runs["run"]
        sites = site_scores(run)
        table = dict(signatures(sites, "model"))
        names = [name for name in CLASSIFIERS if name in table]
        if len(names) < 2:
            raise RequestError(
                f"families: only {', '.join(names) or 'no network'} has a signature here, expected "
                "at least two networks; use --weights init to measure all with random weights"
            )
        compared = compare_signatures([table[name] for name in names])
        families = [CLASSIFIERS[name].family for name in names]
        short_names = [short_name(name) for name in names]
        distances = pd.DataFrame(compared.distances, columns=short_names).round(3)
        distances.insert(0, "network", short_names)
        verdicts = [
            nearest_shares_group(
                "The nearest signature is that of a network of the same family",
                "architectures of one family cluster",
                families,
                compared.distances,
                "by chance {chance:.0%}; families with only one network are excluded; a family's "
                "networks count once",
                "families",
            ),
            *_compare_with_alexnet(names, compared.distances),
            _vits_are_apart(families, compared.distances),
            *_compare_depths(sites),
            *_compare_patches(table),
        ]
        return Findings(
            [*undecided_if_untrained(run, verdicts), _families_of_the_zoo(runs)],
            {"Distances between signatures": distances},
            {
                "Dendrogram of the signatures (average linkage of DTW distances)": _dendrogram(
                    short_names, families, compared
                ),
            },
            [*classifier_remarks(run), *zoo_remarks(runs, self.zoo)],
        )


def _families_of_the_zoo(runs: Runs) -> Verdict:
    """Compare signatures within and between families of trained networks of the zoo."""
    claim = "Trained networks of the zoo cluster by family"
    published = "families cluster"
    if "zoo" not in runs:
        return Verdict(claim, published, remark="none available")
    verdicts = {}
    for state, rows in site_scores(runs["zoo"]).groupby("state", sort=False):
        table = dict(signatures(rows, "model"))
        verdicts[state] = nearest_shares_group(
            claim,
            published,
            [short_name(name).partition("-")[0] for name in table],
            compare_signatures(list(table.values())).distances,
            "nearest signature is of the same family; by chance {chance:.0%}; families also differ "
            "in their data and activation; a family's networks count once",
            "families",
        )
    drawn = f"; initialised {verdicts['drawn'].ours}" if "drawn" in verdicts else ""
    return replace(verdicts["trained"], ours=f"{verdicts['trained'].ours}{drawn}")


def _compare_with_alexnet(names: Sequence[str], distances: NDArray[np.float64]) -> list[Verdict]:
    first = "torchvision/alexnet"
    claims = (
        "Until 2019 networks became less and less like AlexNet",
        "Swin and ConvNeXt resemble AlexNet again",
    )
    if first not in names:
        return [Verdict(claim, remark="AlexNet is missing") for claim in claims]
    from_alexnet = pd.Series(distances[names.index(first)], index=list(names)).drop(first)
    classifiers = [CLASSIFIERS[name] for name in from_alexnet.index]
    years = np.array([classifier.year for classifier in classifiers])
    latest = from_alexnet[[classifier.group == "post-ViT" for classifier in classifiers]]
    # AlexNet itself is excluded: its distance of 0 would dominate.
    early = pd.DataFrame({"year": years, "distance": from_alexnet})[years < 2020]
    early = early.groupby([c.family for c in classifiers if c.year < 2020]).mean()
    tau = kendall(early.year, early.distance)
    middle = from_alexnet[(years >= 2018) & (years <= 2020)]
    are_known = len(latest) > 0 and len(middle) > 0
    ours = f"distance {latest.mean():.2f}, after {middle.mean():.2f} from 2018 to 2020"
    return [
        Verdict(
            claims[0],
            "increasingly dissimilar",
            correlation_text("τ", tau).replace("networks", "families"),
            correlates(tau),
            "Kendall's τ between year and DTW distance to AlexNet, means over the networks of each "
            "family; longer signatures are farther away whatever their scores",
        ),
        Verdict(
            claims[1],
            "a U-turn",
            ours if are_known else "",
            networks_ordered(latest, middle),
            "agrees if all of them are nearer than every network from 2018 to 2020",
        ),
    ]


def _vits_are_apart(families: Sequence[str], distances: NDArray[np.float64]) -> Verdict:
    """Test whether every ViT is farther from other families than every other network is."""
    claim = "ViTs differ from all others"
    published = "highly dissimilar"
    names = np.array(families)
    means = np.array(
        [row[names != name].mean() for row, name in zip(distances, families, strict=True)]
    )
    vits = means[names == "ViT"]
    others = means[names != "ViT"]
    if not len(vits) or len(set(families)) < 3:
        return Verdict(claim, published)
    decision = networks_ordered(others, vits)
    if any(networks_ordered(means[names == name], vits).agrees is False for name in families):
        decision = Decision(False)
    return Verdict(
        claim,
        published,
        f"mean distance {range_text(vits)}; the others {range_text(others)}",
        decision,
        "mean DTW distance of each network to those of other families; agrees if every ViT's is "
        "larger than every other network's, disagrees if smaller than all those of one family",
    )


def _compare_depths(sites: pd.DataFrame) -> list[Verdict]:
    """Compare the scores of VGGs, and of ResNets after additions, by depth."""
    # A block calls its ReLU several times; the last call follows the addition.
    added = sites[sites.place.str.fullmatch(r"layer.*\.relu:\d")]
    added = added.assign(block=added.place.str.replace(r"\.relu:\d$", "", regex=True))
    last = added.groupby(["model", "block"], as_index=False).value.last()
    means = {
        name: t.groupby("model").value.mean() for name, t in (("VGG", sites), ("ResNet", last))
    }
    scores = {}
    texts = {}
    for family, mean in means.items():
        names = [name for name, classifier in CLASSIFIERS.items() if classifier.family == family]
        scores[family] = [mean[name] for name in names if name in mean.index]
        texts[family] = " < ".join(f"{score:.3f}" for score in scores[family])
    vggs = scores["VGG"]
    resnets = scores["ResNet"]
    return [
        Verdict(
            "VGGs have the same signature at every depth",
            "do not change (figure 14)",
            texts["VGG"].replace(" < ", ", "),
            within(vggs, float(np.mean(vggs)), MAX_CHANGE) if len(vggs) > 1 else None,
            f"mean score of each network; agrees if all are within {MAX_CHANGE} of their mean",
        ),
        Verdict(
            "The deeper a ResNet, the more linear its activations after additions",
            "approach 1 (figure 15)",
            texts["ResNet"],
            rises(resnets),
            "mean score of each network, from ResNet18 to ResNet152",
        ),
    ]


def _compare_patches(table: Mapping[str, NDArray[np.float64]]) -> list[Verdict]:
    """Compare how the scores of two ViTs with different patch sizes change over layers."""
    verdicts = []
    if (small := table.get("torchvision/vit_l_16")) is not None:
        tau = kendall(np.arange(len(small)), small)
        verdicts.append(
            Verdict(
                "With patches of 16 a ViT is the more linear the later the layer",
                "gradually more linear (figure 13)",
                correlation_text("τ", tau).replace("networks", "layers"),
                correlates(tau),
                "ViT-L/16, Kendall's τ between layer and score",
            )
        )
    if (large := table.get("torchvision/vit_l_32")) is not None:
        first, *middle, last = (part.mean() for part in np.array_split(large, 4))
        verdicts.append(
            Verdict(
                "With patches of 32 the score rises steeply in the last layers alone",
                "plateau, then a steep change (figure 13)",
                f"quarters {', '.join(f'{mean:.2f}' for mean in (first, *middle, last))}",
                ordered(abs(middle[1] - middle[0]), last - middle[1]),
                "ViT-L/32: the rise to the last quarter of layers vs. the change before it",
            )
        )
    return verdicts


def _dendrogram(
    names: Sequence[str], families: Sequence[str], compared: SignatureComparison
) -> Figure:
    from scipy.cluster.hierarchy import dendrogram

    figure, axes = page_figure(1.0 + 0.17 * len(names))
    dendrogram(
        compared.merges,
        ax=axes,
        orientation="left",
        labels=list(names),
        link_color_func=lambda _: "#777777",
        leaf_font_size=7,
    )
    family_of = dict(zip(names, families, strict=True))
    for label in axes.get_yticklabels():
        label.set_color(COLOURS[family_of[label.get_text()]])
    axes.set_xlabel("DTW distance")
    return figure
