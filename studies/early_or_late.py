"""Comparison of networks linearised after training with networks linearised from the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import page_figure
from .framework.trends import MIN_NETWORKS, network_interval
from .framework.verdicts import Decision, above, mean_above, mean_below
from .shared.linearised_networks import (
    MAX_ACCURACY_LOSS,
    MIN_LINEAR_FRACTION,
    SOURCE,
    as_trained,
    average_by_omega,
    curves_by_seed,
    epochs_remark,
    floor_losses,
    floor_text,
    is_short,
    linear_floor,
    linearise,
    measure_networks,
    network_table,
    omegas,
    original_network,
    stays_accurate,
)

MODEL = "vgg8"
DATA = "digits"
MIN_GAP = 0.01
"""Minimum difference in accuracy that counts as a gap."""
MIN_LINEAR_LOSS = 0.05
"""Accuracy that networks whose units are all linear must lose for a task to count as hard enough to
refute a gap."""
HARDER_DATA = "mnist1d"
HARDER_MODEL = "small/relu-w32-d6"
"""A task that needs more nonlinearity: logistic regression reaches 32% on it, compared with
96% on digits."""
HARDER_OMEGAS = {"post-training": (0.003, 0.03, 0.1), "from-start": (3e-5, 1e-4, 3e-4)}
LATE_CLAIM = "At the same path length networks made linear late are more accurate"
DEPTHS = (1, 2, 4)
"""Numbers of hidden layers in the ordinary networks, which are as wide as `HARDER_MODEL`."""


class EarlyOrLate(Study):
    """Accuracy of networks linearised after training or from the start, at equal path lengths."""

    question = "Is a network more accurate if it is linearised late rather than early?"
    source = SOURCE
    needs = "digits, mnist1d; linearises 101 networks (20 shared with core-networks), trains 37"
    minutes = 18.0
    quick_minutes = 0.3
    takes = ("seeds",)

    def measure(self, context: Context) -> Runs:
        """Measure networks linearised under several penalties, and ordinary ones."""
        starts = dict.fromkeys(
            original_network(context, MODEL, seed) for seed in context.seeds_or(5)
        )
        checkpoints = [
            linearise(context, MODEL, mode, omega, seed)
            for mode in ("post-training", "from-start")
            for omega in omegas(context, mode)
            for seed in context.seeds_or(5)
        ]
        checkpoints += [linear_floor(context, MODEL, seed) for seed in context.seeds_or(5)]
        if not context.quick:
            for fraction in (0.2, 0.4, 0.6):
                changes: dict[str, Any] = {"name": f"random{fraction:g}", "random_share": fraction}
                for seed in context.seeds_or(5):
                    original = original_network(context, MODEL, seed)
                    checkpoints.append(
                        context.request_training(
                            MODEL, DATA, "post-training", seed, weights=original, **changes
                        )
                    )
        harder = request_networks(context, DEPTHS[: 2 if context.quick else None])
        return {
            "run": measure_networks(context, {MODEL: [*starts, *checkpoints]}, DATA),
            "harder": measure_networks(context, harder, HARDER_DATA, part="harder"),
        }

    def analyse(self, runs: Runs) -> Findings:
        """Compare accuracies at equal path lengths."""
        order = ["mode", "omega", "seed"]
        table, harder = (
            network_table(runs[part]).sort_values(order, ignore_index=True)
            for part in ("run", "harder")
        )
        harder.loc[harder.model != HARDER_MODEL, "mode"] = "shallow"
        reference = float(as_trained(table).accuracy)
        late = average_by_omega(table)
        linear = late[late["linear-units"] >= MIN_LINEAR_FRACTION].sort_values("accuracy")
        ours = f"fewer than {MIN_LINEAR_FRACTION:.0%} became linear"
        if len(linear):
            best = linear.iloc[-1]
            ours = f"{best['linear-units']:.0%} linear at {best.accuracy:.1%}"
        ours += f"; {floor_text(table)}"
        verdicts = [
            _test_gap(table, "from-start", LATE_CLAIM, "a significant gap in performance"),
            _test_gap(
                harder,
                "from-start",
                f"{HARDER_DATA}: {LATE_CLAIM[0].lower()}{LATE_CLAIM[1:]}",
                "a significant gap in performance",
            ),
            _test_difficulty(table, harder),
            _test_gap(
                harder,
                "shallow",
                f"{HARDER_DATA}: at the same path length deep networks made linear late are more "
                "accurate than ordinary shallow ones",
            ),
            _test_control(table),
            Verdict(
                "After training many units can be made linear while accuracy stays high",
                "a significant number of them",
                ours,
                stays_accurate(table),
                f"the trained network reaches {reference:.1%}; agrees if some ω makes "
                f"{MIN_LINEAR_FRACTION:.0%} of the units linear and costs at most "
                f"{100 * MAX_ACCURACY_LOSS:g} points, and linear units alone cost more; 95% t "
                "intervals over seeds",
            ),
        ]
        return Findings(
            verdicts,
            {"Networks": pd.concat([table, harder], ignore_index=True)},
            {"Accuracy vs. path length": _figure({DATA: table, HARDER_DATA: harder})},
            [
                f"Small-scale: {MODEL} on {DATA} and {HARDER_MODEL} on {HARDER_DATA}. Late "
                "networks start from their seed's trained network, early ones from its "
                "initialisation.",
                epochs_remark(table),
                f"{HARDER_DATA}, {floor_text(harder)}.",
                _duration_remark(table, DATA),
                _duration_remark(harder, HARDER_DATA),
            ],
        )


def request_networks(context: Context, depths: Sequence[int]) -> dict[str, list[Path]]:
    """Request deep networks linearised late and early, and ordinary shallow ones.

    All are trained for the same number of epochs; for late networks, half of them precede
    linearisation.
    """
    name, epochs = ("quick", 1) if context.quick else ("plain", 30)
    count = 1 if context.quick else None
    family = HARDER_MODEL.rpartition("-d")[0]
    files: dict[str, list[Path]] = {}
    for seed in context.seeds_or(8):
        for model in (HARDER_MODEL, *(f"{family}-d{depth}" for depth in depths)):
            plain_epochs = epochs if model == HARDER_MODEL else 2 * epochs
            plain = context.request_training(
                model, HARDER_DATA, "adam", seed, name=name, epochs=plain_epochs
            )
            files.setdefault(model, []).append(plain)
        start = files[HARDER_MODEL][-1]
        same: dict[str, Any] = {"data": HARDER_DATA, "weights": str(start)}
        for mode, mode_omegas in HARDER_OMEGAS.items():
            mode_epochs = 2 * epochs if mode == "from-start" else epochs
            for omega in mode_omegas[:count]:
                files[HARDER_MODEL].append(
                    linearise(context, HARDER_MODEL, mode, omega, seed, epochs=mode_epochs, **same)
                )
        files[HARDER_MODEL].append(linear_floor(context, HARDER_MODEL, seed, epochs=epochs, **same))
    return files


def late_advantages(
    table: pd.DataFrame, mode: str, column: str, value: str = "accuracy"
) -> NDArray[np.float64]:
    """Return, per seed, the advantage in `value` of late networks over `mode` at equal `column`.

    For each seed, the curve traced by its late networks as ω varies, beginning at the network they
    start from, is interpolated. Networks with the same seed but different ω or depth are not
    independent, so they are averaged.
    """
    gaps = []
    for seed, curve in curves_by_seed(table).items():
        line = curve.sort_values(column)
        others = table[(table["mode"] == mode) & (table.seed == seed)]
        others = others[others[column].between(line[column].min(), line[column].max())]
        if len(others):
            expected = np.interp(others[column], line[column], line[value])
            gaps.append(float((expected - others[value]).mean()))
    return np.array(gaps)


def _format_points(gaps: NDArray[np.float64]) -> str:
    low, high = network_interval(gaps)
    if np.isnan(low):
        return f"seeds: {len(gaps)}"
    return (
        f"{100 * gaps.mean():+.2f} points ({100 * low:+.2f} to {100 * high:+.2f}), "
        f"{len(gaps)} seeds"
    )


def _test_gap(table: pd.DataFrame, mode: str, claim: str, published: str = "") -> Verdict:
    """Test whether late networks are more accurate than those of `mode` at equal path lengths."""
    gaps = late_advantages(table, mode, "pathlength")
    decision = mean_above(gaps, MIN_GAP)
    if decision.agrees is False and not mean_below(gaps).agrees:
        is_hard = mean_above(floor_losses(table), MIN_LINEAR_LOSS).agrees
        decision = Decision(False if is_hard else None)
    return Verdict(
        claim,
        published,
        _format_points(gaps),
        Decision(None) if is_short(table) else decision,
        "each network compared with the curve of the late networks with its seed, interpolated at "
        "its path length; mean over each seed, then the 95% t interval over seeds; agrees if it "
        f"lies above {100 * MIN_GAP:g} point; disagrees if it lies below 0, or below "
        f"{100 * MIN_GAP:g} point if networks whose units are all linear lose more than "
        f"{100 * MIN_LINEAR_LOSS:g} (on an easier task there is nothing to lose)",
    )


def _test_difficulty(easy: pd.DataFrame, hard: pd.DataFrame) -> Verdict:
    """Test whether the gap between late and early networks is larger on the harder task."""
    from scipy import stats

    gaps = [late_advantages(table, "from-start", "pathlength") for table in (hard, easy)]
    answer = None
    ours = "too few seeds"
    if min(map(len, gaps)) >= MIN_NETWORKS:
        low, high = stats.ttest_ind(*gaps, equal_var=False).confidence_interval()
        answer = None if is_short(easy) or is_short(hard) else above([low, high])
        ours = f"by {100 * low:+.2f} to {100 * high:+.2f} points"
    return Verdict(
        "The gap between late and early networks is larger on the harder task",
        "",
        ours,
        answer,
        f"{HARDER_MODEL} on {HARDER_DATA} vs. {MODEL} on {DATA}: 95% Welch interval for the "
        "difference over seeds; the task and the architecture both differ",
    )


def _test_control(table: pd.DataFrame) -> Verdict:
    """Test whether the units that the penalty linearises cost less than random ones."""
    gaps = late_advantages(table, "control", "linear-units")
    return Verdict(
        "With as many linear units, chosen ones cost less accuracy than random ones",
        "",
        _format_points(gaps),
        mean_above(gaps),
        "networks with a random fraction of linear units, trained further for as long, compared "
        "with the curve of the networks with the same seed whose units the penalty selected; mean "
        "over each seed, then the 95% t interval over seeds",
    )


def _duration_remark(table: pd.DataFrame, data: str) -> str:
    """Return a remark on the number of epochs of late networks, over both phases, and of others."""
    epochs = table.groupby("mode").epochs.max()
    late = int(epochs.get("reference", 0) + epochs.get("post-training", 0))
    names = {"from-start": "early", "shallow": "shallow"}
    others = {names[mode]: int(epochs[mode]) for mode in names if mode in epochs}
    listed = ", ".join(f"{name} ones for {count}" for name, count in others.items())
    is_longer = any(count < late for count in others.values())
    return (
        f"{data}: late networks were trained for {late} epochs in total, {listed}."
        + is_longer * " An advantage of the late networks may be due to longer training."
    )


def _figure(tables: Mapping[str, pd.DataFrame]) -> Figure:
    modes = {
        "post-training": ("after training", "#0072B2", "o"),
        "from-start": ("from the start", "#D55E00", "s"),
        "control": ("random units, after training", "#009E73", "^"),
        "floor": ("all linear", "#000000", "x"),
        "shallow": ("ordinary shallow networks", "#CC79A7", "D"),
    }
    figure, panels = page_figure(3.2, columns=2)
    for axes, (data, table) in zip(panels, tables.items(), strict=True):
        reference = float(as_trained(table).accuracy)
        axes.axhline(100 * reference, color="#777777", linestyle="--", label="as trained")
        for mode, (label, colour, mark) in modes.items():
            rows = table[table["mode"] == mode]
            if rows.empty:
                continue
            style = {"color": colour, "marker": mark}
            axes.plot(rows.pathlength, 100 * rows.accuracy, ls="", alpha=0.45, ms=4, **style)
            groups = rows.groupby("model" if mode == "shallow" else "omega")
            means = groups[["pathlength", "accuracy"]].mean()
            axes.plot(means.pathlength, 100 * means.accuracy, label=label, **style)
        axes.set(title=data, xlabel="average path length")
        axes.legend(loc="lower right", fontsize=7.5)
    panels[0].set_ylabel("test accuracy, %")
    return figure
