"""What shortcuts do to a network's signature."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from nlbench.reports.agreement import Correlation, paired_share

from .drawing import page_figure
from .site_scores import AFFINITY, site_scores
from .small_networks import measured_networks
from .study import Context, Findings, Study, Verdict, above

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nlbench.store.run_folder import Run

__all__ = ["Residual", "modes", "separation"]


SEPARATE = 2.0
"""Ashman's D from which two normal distributions are told apart cleanly."""

NAMES = {"resnet20": "ResNet20", "plain20": "plain20"}


def separation(one: ArrayLike, other: ArrayLike) -> float:
    """Ashman's D of two groups: √2 |μ1 - μ2| / √(σ1² + σ2²); above 2 they are two modes.

    References
    ----------
    K. M. Ashman, C. M. Bird, S. E. Zepf, "Detecting bimodality in astronomical datasets",
    The Astronomical Journal 108, 1994.

    Examples
    --------
    >>> round(separation([0.0, 2.0], [4.0, 6.0]), 4)
    4.0
    """
    x, y = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    width = math.sqrt(float(x.var() + y.var()))
    return math.sqrt(2) * abs(float(x.mean() - y.mean())) / width if width else math.inf


def modes(values: ArrayLike) -> float:
    """By how much the BIC prefers two normal distributions to one: above 0, two modes.

    Examples
    --------
    >>> apart = np.concatenate([np.linspace(0, 1, 20), np.linspace(9, 10, 20)])
    >>> modes(apart) > 10 > modes(np.linspace(0, 1, 40))
    True
    """
    from sklearn.mixture import GaussianMixture

    column = np.asarray(values, dtype=np.float64)[:, None]
    column = (column - column.mean()) / (column.std() or 1.0)
    one, two = (
        GaussianMixture(k, n_init=5, random_state=0, reg_covar=1e-3).fit(column).bic(column)
        for k in (1, 2)
    )
    return float(one - two)


class Residual(Study):
    """ResNet20 against the same network without shortcuts: two modes of affinity against one."""

    question = "Do residual connections split a network's activations into two kinds?"
    source = AFFINITY
    needs = "digits; trains 6 networks"
    minutes, quick_minutes = 2.5, 0.4
    takes = ("seeds",)

    def measure(self, context: Context) -> Mapping[str, Run]:
        """Affinity of ResNet20 and plain20, drawn and trained on digits, three seeds each."""
        seeds = dict.fromkeys(NAMES, context.seeds_or(3))
        return {"run": measured_networks(context, seeds, drawn=seeds)}

    def analyse(self, runs: Mapping[str, Run]) -> Findings:
        """Scores after an addition against scores within a block."""
        table = _by_role(site_scores(runs["run"]))
        trained, drawn = table[table.state == "trained"], table[table.state == "drawn"]
        rows = [
            (
                state,
                NAMES[str(model)],
                seed,
                inner.mean(),
                outer.mean(),
                separation(inner, outer),
            )
            for (state, model, seed), part in table.groupby(["state", "model", "seed"])
            for inner, outer in [_inner_outer(part)]
        ]
        apart = pd.DataFrame(
            rows, columns=["weights", "network", "seed", "first ReLU", "second ReLU", "D"]
        )
        of = {
            (str(state), str(network)): part.D.to_numpy()
            for (state, network), part in apart.groupby(["weights", "network"])
        }
        verdicts = [
            *_separations(of),
            *_counted(trained),
            _near_one(trained),
            _above(trained),
            _by_training(of, len(drawn)),
        ]
        few = trained.seed.nunique()
        return Findings(
            verdicts,
            {"Separation of first and second ReLUs of blocks": apart},
            {"Affinity of the first and second ReLUs of blocks, trained": _figure(trained)},
            [
                f"Trained on digits for a few epochs, {few} seed{'s'[: few != 1]} each; the "
                "published figure is of CIFAR."
                if few
                else "Nothing trained."
            ],
        )


def _by_role(table: pd.DataFrame) -> pd.DataFrame:
    """Sites of blocks alone, each with its place in the block: ``relu1`` or ``relu2``."""
    role = table.place.str.rpartition(".")[2]
    kept = role.isin(["relu1", "relu2"]) & table.value.notna()
    return table.assign(role=role).loc[kept]


def _inner_outer(table: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    return table.value[table.role == "relu1"], table.value[table.role == "relu2"]


def _listed(values: ArrayLike) -> str:
    return ", ".join(f"{value:.1f}" for value in np.asarray(values))


def _separations(of: Mapping[tuple[str, str], np.ndarray]) -> list[Verdict]:
    residual, plain = of["trained", "ResNet20"], of["trained", "plain20"]
    return [
        Verdict(
            "With shortcuts the first and second ReLUs of blocks are two modes",
            "two modes",
            f"D = {_listed(residual)}",
            bool((residual > SEPARATE).all()),
            "Ashman's D of each seed: above 2 two modes are told apart",
        ),
        Verdict(
            "Without shortcuts they are one",
            "one mode",
            f"D = {_listed(plain)}",
            bool((plain < SEPARATE).all()),
            "the same network, recipe and seeds without the additions",
        ),
    ]


def _counted(trained: pd.DataFrame) -> list[Verdict]:
    """Modes found without being told which ReLU is which."""
    verdicts = []
    for model, published in (("resnet20", "two modes"), ("plain20", "one mode")):
        gain = modes(trained.value[trained.model == model])
        two = gain > 0
        verdicts.append(
            Verdict(
                f"Scores of {NAMES[model]}, whichever ReLU they are of, have {published}",
                published,
                f"{'two' if two else 'one'} (BIC {gain:+.0f} for two)",
                None if abs(gain) < 2 else two == (published == "two modes"),
                "a mixture of two normal distributions against one, all seeds; a difference of "
                "BIC below 2 tells nothing",
            )
        )
    return verdicts


def _near_one(trained: pd.DataFrame) -> Verdict:
    _, outer = _inner_outer(trained[trained.model == "resnet20"])
    middle = float(outer.median())
    return Verdict(
        "One mode is of almost linear activations, those after an addition",
        "centred near 1",
        f"median {middle:.3f}, {outer.min():.2f} to {outer.max():.2f}",
        middle >= 0.9,
        "near 1: a median of at least 0.9",
    )


def _above(trained: pd.DataFrame) -> Verdict:
    """Whether an activation after an addition is above one within a block, pair by pair."""
    shares: dict[str, Correlation] = {}
    for model in NAMES:
        pairs = [
            b - a
            for _, part in trained[trained.model == model].groupby("seed")
            for inner, outer in [_inner_outer(part)]
            for a, b in zip(inner, outer, strict=True)
        ]
        shares[model] = paired_share(pairs)
    one, other = shares["resnet20"], shares["plain20"]
    return Verdict(
        "In a block the ReLU after the addition is the more linear one",
        "",
        f"{one.text} of blocks; without additions {other.text}",
        above(one.low, one.high, 0.5),
        "share of blocks with Wilson's interval",
    )


def _by_training(of: Mapping[tuple[str, str], np.ndarray], drawn: int) -> Verdict:
    before = of.get(("drawn", "ResNet20"), np.array([])) if drawn else np.array([])
    after = of["trained", "ResNet20"]
    same = len(before) == len(after)
    return Verdict(
        "The two modes of ResNet20 come with training",
        "",
        f"D before training {_listed(before) or '–'}, after {_listed(after)}",
        bool((before < SEPARATE).all() and (after > SEPARATE).all()) if same else None,
        "batch norm's statistics before training are those of the samples",
    )


def _figure(trained: pd.DataFrame) -> Figure:
    from scipy.stats import gaussian_kde

    figure, panels = page_figure(2.7, columns=2, sharex=True, sharey=True)
    low = float(trained.value.min()) - 0.05
    grid = np.linspace(low, 1.05, 200)
    for axes, (model, name) in zip(
        panels, (("plain20", "plain20"), ("resnet20", "ResNet20")), strict=True
    ):
        groups = _inner_outer(trained[trained.model == model])
        for place, (values, label) in enumerate(zip(groups, ("first", "second"), strict=True)):
            colour = ("#0072B2", "#D55E00")[place]
            density = gaussian_kde(values)(grid)
            axes.plot(grid, density, color=colour, label=f"{label} ReLU of a block")
            axes.fill_between(grid, density, color=colour, alpha=0.2)
            axes.plot(values, np.full(len(values), -0.4 - 0.5 * place), "|", color=colour)
        axes.set_title(name)
        axes.set_xlabel("affinity")
    panels[0].set_ylabel("density")
    panels[0].legend(loc="upper left")
    return figure
