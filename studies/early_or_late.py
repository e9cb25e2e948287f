"""Linearising a trained network against training a linearised one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import page_figure
from .framework.trends import network_interval
from .framework.verdicts import above
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
RANDOM_SHARES = (0.2, 0.4, 0.6)
"""Shares of linear units of the random control."""
MIN_GAP = 0.01
"""Smallest difference of accuracies that counts as a gap."""
MIN_ROOM = 0.05
"""Loss of the most linear networks from which a task can refute a gap."""


class EarlyOrLate(Study):
    """Accuracy at the same path length: made linear after training, or from its start."""

    question = "Is a network more accurate if it is made linear late rather than early?"
    source = SOURCE
    needs = "linearises 24 networks (9 shared with core-networks)"
    minutes, quick_minutes = 5.5, 0.4
    takes = ("seeds",)

    def measure(self, context: Context) -> Runs:
        """Measure networks under several penalties, after training and from the start."""
        checkpoints = [
            linearise(context, MODEL, mode, omega, seed)
            for mode in ("post-training", "from-start")
            for omega in omegas(context, mode)
            for seed in context.seeds_or(3)
        ]
        if not context.quick:
            checkpoints += [
                context.request_training(
                    MODEL, DATA, "post-training", seed, weights="trained",
                    name=f"random{share:g}", random_share=share,
                )
                for share in RANDOM_SHARES
                for seed in context.seeds_or(3)
            ]  # fmt: skip
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
            _control(table),
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


def _advantages(table: pd.DataFrame, mode: str, column: str) -> NDArray[np.float64]:
    """Return by how much late networks are more accurate than those of a mode, at equal values.

    The mean curve of the late networks over ω, including no penalty, is interpolated.
    """
    late = table[table["mode"].isin(["reference", "post-training"])]
    late = late.assign(omega=late.omega.fillna(-1))
    curve = late.groupby("omega")[[column, "accuracy"]].mean().sort_values(column)
    others = table[table["mode"] == mode]
    others = others[others[column].between(curve[column].min(), curve[column].max())]
    accuracy = np.interp(others[column], curve[column], curve.accuracy)
    gaps: NDArray[np.float64] = accuracy - others.accuracy.to_numpy(dtype=np.float64)
    return gaps


def _points(gaps: NDArray[np.float64]) -> str:
    low, high = network_interval(gaps)
    if np.isnan(low):
        return f"{len(gaps)} comparisons"
    return (
        f"{100 * gaps.mean():+.2f} points ({100 * low:+.2f} to {100 * high:+.2f}), "
        f"{len(gaps)} comparisons"
    )


def _gap(table: pd.DataFrame) -> Verdict:
    """Test whether late networks are more accurate at the path lengths of the early ones."""
    gaps = _advantages(table, "from-start", "pathlength")
    low, high = network_interval(gaps)
    return Verdict(
        "At the same path length networks made linear late are more accurate",
        "a significant gap in performance",
        _points(gaps),
        _refuted(table) if high < MIN_GAP else True if low > 0 else None,
        "each early network against the mean curve of the late ones, interpolated at its path "
        "length; mean with Student's 95 % interval over early networks; does not agree where any "
        f"gap is below {100 * MIN_GAP:g} point, if the most linear networks lose at least "
        f"{100 * MIN_ROOM:g}: on an easier task nothing can be lost",
    )


def _control(table: pd.DataFrame) -> Verdict:
    """Test whether the units that the penalty makes linear cost less than random ones."""
    gaps = _advantages(table, "control", "linear-units")
    return Verdict(
        "With as many linear units, chosen ones cost less accuracy than random ones",
        "",
        _points(gaps),
        above(network_interval(gaps)),
        "each network with a random share of linear units, trained on as long, against the mean "
        "curve of those chosen by the penalty; mean with Student's 95 % interval over the former",
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
        "control": ("random units, after training", "#009E73", "^"),
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
