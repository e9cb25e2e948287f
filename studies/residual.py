"""The effect of residual connections on a network's signature."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import COLOURS, page_figure
from .framework.verdicts import in_most_networks, mean_above, mean_below
from .shared.site_scores import AFFINITY, site_scores
from .shared.small_networks import measure_networks

MIN_SEPARATION = 2.0
"""Ashman's D above which two normal distributions are cleanly separated."""
NEAR_ONE = 0.9

NAMES = {"resnet20": "ResNet20", "plain20": "plain20"}


def separation(first: ArrayLike, second: ArrayLike) -> float:
    """Compute Ashman's D for two groups, √2 |μ1 - μ2| / √(σ1² + σ2²).

    References
    ----------
    K. M. Ashman, C. M. Bird, S. E. Zepf, "Detecting bimodality in astronomical datasets",
    The Astronomical Journal 108, 1994.

    Examples
    --------
    >>> round(separation([0.0, 2.0], [4.0, 6.0]), 4)
    4.0
    """
    x, y = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    width = math.sqrt(float(x.var() + y.var()))
    return math.sqrt(2) * abs(float(x.mean() - y.mean())) / width if width else math.inf


class Residual(Study):
    """Modes of affinity in ResNet20 and in the same network without shortcuts."""

    question = "Do residual connections split a network's activations into two kinds?"
    source = AFFINITY
    needs = "digits; trains 12 networks"
    minutes = 5.0
    quick_minutes = 0.2
    takes = ("seeds",)

    def measure(self, context: Context) -> Runs:
        """Measure the affinity of ResNet20 and plain20, untrained and trained on digits."""
        seeds = dict.fromkeys(NAMES, context.seeds_or(6))
        return {"run": measure_networks(context, seeds, drawn=seeds)}

    def analyse(self, runs: Runs) -> Findings:
        """Compare the scores after the addition in each block with those inside the block."""
        table = _block_sites(site_scores(runs["run"]))
        trained = table[table.state == "trained"]
        drawn = table[table.state == "drawn"]
        rows = [
            (state, NAMES[str(model)], seed, inner.mean(), outer.mean(), separation(inner, outer))
            for (state, model, seed), sites in table.groupby(["state", "model", "seed"])
            for inner, outer in [_inner_outer(sites)]
        ]
        columns = ["weights", "network", "seed", "first ReLU", "second ReLU", "D"]
        separations = pd.DataFrame(rows, columns=columns)
        by_network = {
            (str(state), str(network)): group.D.to_numpy()
            for (state, network), group in separations.groupby(["weights", "network"])
        }
        verdicts = [
            *_test_separation(by_network),
            _is_near_one(trained),
            _second_is_more_linear(trained),
            _comes_with_training(by_network, len(drawn)),
        ]
        seeds = trained.seed.nunique()
        return Findings(
            verdicts,
            {"Separation of first and second ReLUs of blocks": separations},
            {"Affinity of the first and second ReLUs of blocks, trained": _figure(trained)},
            [
                f"Trained on digits for a few epochs, {seeds} seed{'s'[: seeds != 1]} each; the "
                "published figure is for CIFAR."
                if seeds
                else "No network was trained."
            ],
        )


def _block_sites(table: pd.DataFrame) -> pd.DataFrame:
    """Select the sites in blocks, with their role in the block: ``relu1`` or ``relu2``."""
    role = table.place.str.rpartition(".")[2]
    is_in_block = role.isin(["relu1", "relu2"]) & table.value.notna()
    return table.assign(role=role).loc[is_in_block]


def _inner_outer(table: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    return table.value[table.role == "relu1"], table.value[table.role == "relu2"]


def _format_values(values: ArrayLike) -> str:
    return ", ".join(f"{value:.1f}" for value in np.asarray(values))


def _test_separation(by_network: Mapping[tuple[str, str], np.ndarray]) -> list[Verdict]:
    residual = by_network["trained", "ResNet20"]
    plain = by_network["trained", "plain20"]
    return [
        Verdict(
            "With shortcuts the first and second ReLUs of blocks are two modes",
            "two modes",
            f"D = {_format_values(residual)}",
            mean_above(residual, MIN_SEPARATION),
            "Ashman's D of the first and the second ReLUs, above 2 if two modes are separated; 95% "
            "t interval over networks",
        ),
        Verdict(
            "Without shortcuts they are one",
            "one mode",
            f"D = {_format_values(plain)}",
            mean_below(plain, MIN_SEPARATION),
            "the same network, recipe and seeds without the additions; D below 2, by the same "
            "interval",
        ),
    ]


def _is_near_one(trained: pd.DataFrame) -> Verdict:
    sites = trained[trained.model == "resnet20"]
    _, outer = _inner_outer(sites)
    medians = [_inner_outer(network)[1].median() for _, network in sites.groupby("seed")]
    return Verdict(
        "One mode is of almost linear activations, those after an addition",
        "centred near 1",
        f"median {np.mean(medians):.3f}, {outer.min():.2f} to {outer.max():.2f}",
        mean_above(medians, NEAR_ONE),
        f"near 1: a median of at least {NEAR_ONE}; 95% t interval over networks",
    )


def _second_is_more_linear(trained: pd.DataFrame) -> Verdict:
    """Compare the two ReLUs of each block."""
    fractions: dict[str, list[float]] = {model: [] for model in NAMES}
    for model, values in fractions.items():
        for _, sites in trained[trained.model == model].groupby("seed"):
            inner, outer = _inner_outer(sites)
            values.append(float(np.mean(outer.to_numpy() > inner.to_numpy())))
    means = {model: f"{np.mean(values):.2f}" for model, values in fractions.items()}
    is_second = np.array(fractions["resnet20"]) > 0.5
    return Verdict(
        "In a block the ReLU after the addition is the more linear one",
        "",
        f"{means['resnet20']} of blocks; without additions {means['plain20']}",
        in_most_networks(is_second),
        "fraction of blocks, mean over networks; agrees if it is more than half of the blocks of "
        "most networks, by a sign test",
    )


def _comes_with_training(by_network: Mapping[tuple[str, str], np.ndarray], drawn: int) -> Verdict:
    before = by_network.get(("drawn", "ResNet20"), np.array([])) if drawn else np.array([])
    after = by_network["trained", "ResNet20"]
    margins = [
        min(MIN_SEPARATION - a, b - MIN_SEPARATION) for a, b in zip(before, after, strict=False)
    ]
    return Verdict(
        "The two modes of ResNet20 come with training",
        "",
        f"D before training {_format_values(before) or '–'}, after {_format_values(after)}",
        mean_above(margins),
        "D is below 2 before training and above 2 after it: the smaller distance to 2, with its "
        "95% t interval over networks; batch norm's statistics before training are those of the "
        "samples",
    )


def _figure(trained: pd.DataFrame) -> Figure:
    from scipy.stats import gaussian_kde

    figure, panels = page_figure(2.7, columns=2, sharex=True, sharey=True)
    grid = np.linspace(float(trained.value.min()) - 0.05, 1.05, 200)
    for axes, model in zip(panels, ("plain20", "resnet20"), strict=True):
        groups = _inner_outer(trained[trained.model == model])
        for place, (values, label) in enumerate(zip(groups, ("first", "second"), strict=True)):
            density = gaussian_kde(values)(grid)
            axes.plot(grid, density, color=COLOURS[place], label=f"{label} ReLU of a block")
            axes.fill_between(grid, density, color=COLOURS[place], alpha=0.2)
            height = np.full(len(values), -0.4 - 0.5 * place)
            axes.plot(values, height, "|", color=COLOURS[place])
        axes.set(title=NAMES[model], xlabel="affinity")
    panels[0].set_ylabel("density")
    panels[0].legend(loc="upper left")
    return figure
