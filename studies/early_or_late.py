"""Linearising a trained network against training a linearised one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy.stats import t as student

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import page_figure
from .shared.linearised_networks import (
    MAX_ACCURACY_LOSS,
    MIN_LINEAR_SHARE,
    SOURCE,
    as_trained,
    by_omega,
    conclusive,
    epochs_remark,
    linearise,
    measure_networks,
    network_table,
    omegas,
    stays_accurate,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


MODEL, DATA = "vgg8", "digits"
MIN_GAP = 0.01
"""Smallest difference of accuracies that counts as a gap."""
MIN_ROOM = 0.05
"""Loss of the most linear networks from which a task can refute a gap."""


class EarlyOrLate(Study):
    """Accuracy at the same path length: made linear after training, or from its start."""

    question = "Is a network more accurate if it is made linear late rather than early?"
    source = SOURCE
    needs = "linearises 15 networks (9 shared with core-networks)"
    minutes, quick_minutes = 4.0, 0.4
    takes = ("seeds",)

    def measure(self, context: Context) -> Runs:
        """Measure networks under several penalties, after training and from the start."""
        checkpoints = [
            linearise(context, MODEL, mode, omega, seed)
            for mode in ("post-training", "from-start")
            for omega in omegas(context, mode)
            for seed in context.seeds_or(3)
        ]
        return {"run": measure_networks(context, {MODEL: ["trained", *checkpoints]}, DATA)}

    def analyse(self, runs: Runs) -> Findings:
        """Compare accuracies where the path lengths are equal."""
        table = network_table(runs["run"]).sort_values(["mode", "omega", "seed"], ignore_index=True)
        reference = float(as_trained(table).accuracy)
        late = by_omega(table)
        linear = late[late["linear-units"] >= MIN_LINEAR_SHARE].sort_values("accuracy")
        ours = f"fewer than {MIN_LINEAR_SHARE:.0%} became linear"
        if len(linear):
            best = linear.iloc[-1]
            ours = f"{best['linear-units']:.0%} linear at {best.accuracy:.1%}"
        verdicts = [
            _gap(table),
            Verdict(
                "After training many units can be made linear while accuracy stays high",
                "a significant number of them",
                ours,
                stays_accurate(table),
                f"the trained network has {reference:.1%}; agrees if some ω makes "
                f"{MIN_LINEAR_SHARE:.0%} of the units linear and loses no more than "
                f"{100 * MAX_ACCURACY_LOSS:g} points, mean over seeds",
            ),
        ]
        return Findings(
            verdicts,
            {"Networks": table},
            {"Accuracy against path length": _figure(table, reference)},
            [
                f"Small data: {MODEL} on {DATA}, seeds: {table.seed.nunique()}; late networks all "
                "start from the shipped one, early ones from the initialisation of their seed.",
                epochs_remark(table),
            ],
        )


def _gap(table: pd.DataFrame) -> Verdict:
    """Test whether late networks are more accurate at the path lengths of the early ones."""
    late = table[table["mode"] != "from-start"].assign(omega=lambda rows: rows.omega.fillna(-1))
    curve = late.groupby("omega")[["pathlength", "accuracy"]].mean().sort_values("pathlength")
    early = table[table["mode"] == "from-start"]
    early = early[early.pathlength.between(curve.pathlength.min(), curve.pathlength.max())]
    gaps = np.interp(early.pathlength, curve.pathlength, curve.accuracy) - early.accuracy
    claim = "At the same path length networks made linear late are more accurate"
    published = "a significant gap in performance"
    remark = (
        "each early network against the mean curve of the late ones, interpolated at its path "
        "length; mean with Student's 95 % interval over early networks; does not agree where any "
        f"gap is below {100 * MIN_GAP:g} point, if the most linear networks lose at least "
        f"{100 * MIN_ROOM:g}: on an easier task nothing can be lost"
    )
    if len(gaps) < 3:
        return Verdict(claim, published, f"{len(gaps)} comparisons", remark=remark)
    mean, spread = float(gaps.mean()), float(gaps.std(ddof=1)) / math.sqrt(len(gaps))
    half = float(student.ppf(0.975, len(gaps) - 1)) * spread
    low, high = mean - half, mean + half
    return Verdict(
        claim,
        published,
        f"{100 * mean:+.2f} points ({100 * low:+.2f} to {100 * high:+.2f}), "
        f"{len(gaps)} comparisons",
        _refuted(table) if high < MIN_GAP else True if low > 0 else None,
        remark,
    )


def _refuted(table: pd.DataFrame) -> bool | None:
    """Return False if the task could have shown a larger gap, else None."""
    late = by_omega(table)
    has_room = float(as_trained(table).accuracy - late.accuracy.min()) >= MIN_ROOM
    return conclusive(table, False) if has_room else None


def _figure(table: pd.DataFrame, reference: float) -> Figure:
    modes = {
        "post-training": ("after training", "#0072B2", "o"),
        "from-start": ("from the start", "#D55E00", "s"),
    }
    figure, axes = page_figure(3.2)
    axes.axhline(100 * reference, color="#777777", linestyle="--", label="as trained")
    for mode, (label, colour, mark) in modes.items():
        rows = table[table["mode"] == mode]
        style = {"color": colour, "marker": mark}
        axes.plot(rows.pathlength, 100 * rows.accuracy, ls="", alpha=0.45, markersize=4, **style)
        means = rows.groupby("omega")[["pathlength", "accuracy"]].mean()
        axes.plot(means.pathlength, 100 * means.accuracy, label=label, **style)
    axes.set(xlabel="average path length", ylabel="test accuracy, %")
    axes.legend(loc="lower right")
    return figure
