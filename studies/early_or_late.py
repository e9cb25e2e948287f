"""Linearising a trained network against training a linearised one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy.stats import t as student

from .drawing import page_figure
from .linearised_networks import (
    FEWEST_LINEAR,
    MOST_LOST,
    SOURCE,
    as_trained,
    by_omega,
    effort,
    linearised,
    measured,
    networks,
    omegas,
    or_short,
    stays_accurate,
)
from .study import Context, Findings, Study, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nlbench.store.run_folder import Run

__all__ = ["EarlyOrLate"]


MODEL, DATA = "vgg8", "digits"
SMALL = 0.01
"""A gap in accuracy that is too small to be called one."""


class EarlyOrLate(Study):
    """Accuracy at the same path length: made linear after training, or from its start."""

    question = "Is a network more accurate if it is made linear late rather than early?"
    source = SOURCE
    needs = "linearises 15 networks, of which core-networks shares 9"
    minutes, quick_minutes = 4.0, 0.4
    takes = ("seeds",)

    def measure(self, context: Context) -> Mapping[str, Run]:
        """Networks under several penalties, after training and from the start."""
        made = [
            linearised(context, MODEL, mode, omega, seed)
            for mode in ("post-training", "from-start")
            for omega in omegas(context, mode)
            for seed in context.seeds_or(3)
        ]
        return {"run": measured(context, {MODEL: ["trained", *made]}, DATA)}

    def analyse(self, runs: Mapping[str, Run]) -> Findings:
        """Compare accuracies where the path lengths are the same."""
        table = networks(runs["run"]).sort_values(["mode", "omega", "seed"], ignore_index=True)
        reference = float(as_trained(table).accuracy)
        late = by_omega(table)
        far = late[late["linear-units"] >= FEWEST_LINEAR]
        verdicts = [
            _gap(table),
            Verdict(
                "After training many units can be made linear while accuracy stays high",
                "a significant number of them",
                _most(far) if len(far) else f"fewer than {FEWEST_LINEAR:.0%} became linear",
                stays_accurate(table),
                f"the trained network has {reference:.1%}; agrees if some ω makes "
                f"{FEWEST_LINEAR:.0%} of the units linear and loses no more than "
                f"{100 * MOST_LOST:g} points, mean over seeds",
            ),
        ]
        return Findings(
            verdicts,
            {"Networks": table},
            {"Accuracy against path length": _figure(table, reference)},
            [
                f"Small data: {MODEL} on {DATA}, seeds: {table.seed.nunique()}; late networks all "
                "start from the one that ships, early ones from the initialisation of their seed.",
                effort(table),
            ],
        )


def _most(far: pd.DataFrame) -> str:
    best = far.sort_values("accuracy").iloc[-1]
    return f"{best['linear-units']:.0%} linear at {best.accuracy:.1%}"


def _gap(table: pd.DataFrame) -> Verdict:
    """How much more accurate late networks are, at the path lengths of the early ones."""
    late = table[table["mode"] != "from-start"].assign(omega=lambda one: one.omega.fillna(-1))
    curve = late.groupby("omega")[["pathlength", "accuracy"]].mean().sort_values("pathlength")
    early = table[table["mode"] == "from-start"]
    within = early[early.pathlength.between(curve.pathlength.min(), curve.pathlength.max())]
    gaps = np.interp(within.pathlength, curve.pathlength, curve.accuracy) - within.accuracy
    claim = "At the same path length networks made linear late are more accurate"
    published = "a significant gap in performance"
    how = (
        "each early network beside the mean curve of the late ones, interpolated at its path "
        "length; mean with Student's 95 % interval over early networks; does not agree where any "
        f"gap is below {100 * SMALL:g} point"
    )
    if len(gaps) < 3:
        return Verdict(claim, published, f"{len(gaps)} comparisons", None, how)
    mean, spread = float(gaps.mean()), float(gaps.std(ddof=1)) / math.sqrt(len(gaps))
    half = float(student.ppf(0.975, len(gaps) - 1)) * spread
    low, high = mean - half, mean + half
    return Verdict(
        claim,
        published,
        f"{100 * mean:+.2f} points ({100 * low:+.2f} to {100 * high:+.2f}), "
        f"{len(gaps)} comparisons",
        or_short(table, agrees=False) if high < SMALL else True if low > 0 else None,
        how,
    )


def _figure(table: pd.DataFrame, reference: float) -> Figure:
    modes = {
        "post-training": ("after training", "#0072B2", "o"),
        "from-start": ("from the start", "#D55E00", "s"),
    }
    figure, axes = page_figure(3.2)
    axes.axhline(100 * reference, color="#777777", linestyle="--", label="as trained")
    for mode, (label, colour, mark) in modes.items():
        one = table[table["mode"] == mode]
        axes.plot(one.pathlength, 100 * one.accuracy, mark, color=colour, alpha=0.45, markersize=4)
        means = one.groupby("omega")[["pathlength", "accuracy"]].mean()
        axes.plot(means.pathlength, 100 * means.accuracy, color=colour, marker=mark, label=label)
    axes.set_xlabel("average path length")
    axes.set_ylabel("test accuracy, %")
    axes.legend(loc="lower right")
    return figure
