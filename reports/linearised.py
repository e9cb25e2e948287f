"""Linearised networks: accuracy against path length, and the nonlinear units of each layer."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nlbench.errors import one_line

from .layout import NamedRun, Table, TextCell
from .svg import STYLE, in_page_colours, to_svg
from .text import count

MODES = {
    "post-training": ("linearised after training", "#0072B2", "o"),
    "from-start": ("linearised from the start", "#D55E00", "s"),
    "random": ("random units linear", "#777777", "^"),
}
_MAX_NAMED_LAYERS = 40  # with more their names are unreadable
_MAX_PANELS = 6


@dataclass(frozen=True)
class Network:
    """One network of a run of ``nlbench linearize``.

    Parameters
    ----------
    mode : str
        ``reference``, ``post-training``, ``from-start`` or ``random``.
    omega : float or None
    seed : int
    accuracy, length, linear : float
        Accuracy in [0, 1]; path length; share of linear units.
    layers : mapping of str to (float, float)
        Number of nonlinear units and of all units.
    """

    mode: str
    omega: float | None
    seed: int
    accuracy: float
    length: float
    linear: float
    layers: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class LinearisedFamily:
    """Networks that differ only in mode, ω and seed."""

    label: str
    networks: tuple[Network, ...]

    def groups(self, mode: str) -> list[tuple[float, list[Network]]]:
        """Return the networks of a mode grouped by ω, in increasing order."""
        omegas = {n.omega for n in self.networks if n.mode == mode and n.omega is not None}
        return [
            (omega, [n for n in self.networks if (n.mode, n.omega) == (mode, omega)])
            for omega in sorted(omegas)
        ]


@dataclass(frozen=True)
class Tradeoff:
    """Figures, table and sentences of a family on the page."""

    label: str
    svg: str
    caption: str
    shape: str
    shape_caption: str
    table: Table
    sentences: tuple[str, ...]


def tradeoffs(runs: Sequence[NamedRun]) -> list[Tradeoff]:
    """Draw the families in runs of ``nlbench linearize``; other runs have none."""
    drawn = []
    for number, family in enumerate(families(runs)):
        seeds = len({network.seed for network in family.networks})
        drawn.append(
            Tradeoff(
                label=family.label,
                svg=in_page_colours(
                    to_svg(
                        draw_tradeoff(family),
                        prefix=f"linearised-{number}",
                        title=f"Accuracy against path length of {family.label}",
                    )
                ),
                caption=(
                    f"Test accuracy against average path length, {count(seeds, 'seed')}. Small "
                    "marks are networks, large marks the mean and standard deviation for one ω."
                ),
                shape=in_page_colours(
                    to_svg(
                        draw_shape(family),
                        prefix=f"shape-{number}",
                        title=f"Nonlinear units of each layer of {family.label}",
                    )
                ),
                shape_caption=(
                    "The core network: share of each layer's units that are still nonlinear, "
                    "averaged over seeds, for growing ω. The input is at the top."
                ),
                table=_table(family),
                sentences=tuple(compared(family)),
            )
        )
    return drawn


def families(runs: Sequence[NamedRun]) -> list[LinearisedFamily]:
    """Collect linearised networks by run, model and dataset."""
    members: dict[str, list[Network]] = {}
    for run in runs:
        subjects = run.manifest.get("subjects") or []
        if not any(_training(subject)[0] in MODES for subject in subjects):
            continue
        numbers = _numbers(run)
        for subject in subjects:
            key = (subject["model"], subject["weights"], subject["data"], int(subject["seed"]))
            values = [
                numbers.get((*key, measure, "", "value"))
                for measure in ("accuracy", "pathlength", "linear-units")
            ]
            if None in values:
                continue
            label = f"{subject['model']} on {subject['data']}"
            label += f" ({run.name})" if len(runs) > 1 else ""
            layers = {
                name[5]: (value, numbers[(*key, "linear-units", name[5], "units")])
                for name, value in numbers.items()
                if name[:5] == (*key, "linear-units") and name[5] and name[6] == "nonlinear"
            }
            accuracy, length, linear = (float(value) for value in values if value is not None)
            network = Network(*_training(subject), accuracy, length, linear, layers)
            members.setdefault(label, []).append(network)
    return [
        LinearisedFamily(one_line(label), tuple(networks))
        for label, networks in members.items()
        if any(network.mode in MODES for network in networks)
    ]


def _training(subject: Mapping[str, Any]) -> tuple[str, float | None, int]:
    """Return mode, ω and seed of a network's training from its checkpoint's header."""
    header, own_seed = subject.get("weights_metadata") or {}, int(subject.get("seed", 0))
    try:
        seed = int(header.get("seed", own_seed))
        if "omega" not in header:
            return "reference", None, seed
        mode = "random" if "random" in header else str(header.get("recipe", ""))
        return mode, float(header["omega"]), seed
    except (TypeError, ValueError):  # a checkpoint of another program
        return "reference", None, own_seed


def _numbers(run: NamedRun) -> dict[tuple[Any, ...], float]:
    table = run.scores[run.scores["status"] == "ok"]
    columns = ["model", "weights", "data", "seed", "measure", "place", "statistic", "value"]
    return {
        (str(m), str(w), str(d), int(s), str(measure), str(place or ""), str(statistic)): float(v)
        for m, w, d, s, measure, place, statistic, v in table[columns].itertuples(index=False)
        if measure in ("accuracy", "pathlength", "linear-units")
    }


def compared(family: LinearisedFamily) -> Iterator[str]:
    """Compare the accuracy of the modes at equal path length, one sentence per mode.

    The means over seeds of post-training networks are interpolated linearly at the path lengths
    of the other mode that lie in their range.
    """
    post_training = _curve(family, "post-training")
    for mode in ("from-start", "random"):
        # Without a penalty both modes give the same network.
        other = _curve(family, mode, above=0.0)
        if len(post_training) < 2 or not other:
            continue
        lengths, accuracies = zip(*sorted(post_training), strict=True)
        differences = [
            accuracy - float(np.interp(length, lengths, accuracies))
            for length, accuracy in other
            if lengths[0] <= length <= lengths[-1]
        ]
        name = {"random": "with random units linear"}.get(mode, MODES[mode][0])
        if not differences:
            yield f"Networks {name} share no path length with those linearised after training."
            continue
        better = sum(difference < 0 for difference in differences)
        mean = -100 * statistics.fmean(differences)
        yield (
            "At the same path length, networks linearised after training are more accurate than "
            f"those {name} at {better} of {count(len(differences), 'value')} of ω; the mean "
            f"difference is {mean:+.2f} percentage points."
        )


def _curve(family: LinearisedFamily, mode: str, above: float = -1.0) -> list[tuple[float, float]]:
    return [
        (
            statistics.fmean(network.length for network in group),
            statistics.fmean(network.accuracy for network in group),
        )
        for omega, group in family.groups(mode)
        if omega > above
    ]


def draw_tradeoff(family: LinearisedFamily) -> Figure:
    """Draw accuracy against path length, one series per mode."""
    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=(7.2, 3.6), layout="constrained")
        axes = figure.add_subplot()
        reference = [n.accuracy for n in family.networks if n.mode == "reference"]
        if reference:
            axes.axhline(
                100 * statistics.fmean(reference),
                color="#444444",
                linewidth=0.8,
                linestyle=(0, (4, 2)),
                label="as trained, no linear units",
            )
        for mode in MODES:
            _draw_mode(axes, family, mode)
        axes.margins(x=0.06, y=0.12)  # room for the annotations
        axes.set_xlabel("average path length: active nonlinearities on a path")
        axes.set_ylabel("test accuracy, %")
        axes.grid(color="#e4e4e4", linewidth=0.6)
        figure.legend(loc="outside upper left", ncols=2)
        figure.draw_without_rendering()  # lays out, once, while the style is in force
        figure.set_layout_engine("none")
    return figure


def _draw_mode(axes: Axes, family: LinearisedFamily, mode: str) -> None:
    label, colour, mark = MODES[mode]
    means = []
    for omega, group in family.groups(mode):
        lengths = [network.length for network in group]
        accuracies = [100 * network.accuracy for network in group]
        axes.plot(lengths, accuracies, mark, color=colour, markersize=3, alpha=0.45)
        mean = statistics.fmean(lengths), statistics.fmean(accuracies)
        means.append(mean)
        axes.errorbar(
            *mean,
            xerr=statistics.pstdev(lengths),
            yerr=statistics.pstdev(accuracies),
            fmt=mark,
            color=colour,
            markersize=6.5,
            elinewidth=1,
            capsize=2,
        )
        if mode != "random":
            axes.annotate(
                f"ω={omega:g}",
                mean,
                xytext=(4, 6 if mode == "post-training" else -11),
                textcoords="offset points",
                fontsize=7.5,
                color=colour,
            )
    if means:
        axes.plot(*zip(*means, strict=True), color=colour, linewidth=1, marker=mark, label=label)


def draw_shape(family: LinearisedFamily) -> Figure:
    """Draw the share of nonlinear units of each layer, one panel per ω."""
    mode = "post-training" if family.groups("post-training") else "from-start"
    groups = [(omega, group) for omega, group in family.groups(mode) if group[0].layers]
    groups = groups or [(o, g) for o, g in family.groups("random") if g[0].layers]
    if len(groups) > _MAX_PANELS:
        shown = np.linspace(0, len(groups) - 1, _MAX_PANELS).round().astype(int)
        groups = [groups[i] for i in shown]
    layers = list(groups[0][1][0].layers) if groups else []
    with matplotlib.style.context(["default", STYLE]):
        height = 0.8 + 0.17 * max(len(layers), 4)
        figure = Figure(figsize=(7.2, height))
        panels = figure.subplots(1, max(len(groups), 1), sharey=True, squeeze=False)[0]
        for axes, (omega, group) in zip(panels, groups, strict=False):
            shares = [
                statistics.fmean(n.layers[layer][0] / n.layers[layer][1] for n in group)
                for layer in layers
            ]
            places = range(len(layers))
            axes.barh(places, [1.0] * len(layers), color="#eeeeee", height=0.8)
            axes.barh(places, shares, color=MODES[mode][1], height=0.8)
            axes.set_xlim(0, 1)
            axes.set_xticks([0, 1], ["0", "100 %"])
            axes.set_title(f"ω = {omega:g}", fontsize=8.5)
            if len(layers) <= _MAX_NAMED_LAYERS:
                sizes = [int(group[0].layers[layer][1]) for layer in layers]
                names = [
                    f"{layer[-26:]} ({size})" for layer, size in zip(layers, sizes, strict=True)
                ]
                axes.set_yticks(places, names, fontsize=7)
        if layers:
            panels[0].invert_yaxis()
        longest = max((len(text.get_text()) for text in panels[0].get_yticklabels()), default=0)
        # Inches of the names on the left, the title above and the numbers below.
        figure.subplots_adjust(
            left=(0.15 + 0.062 * longest) / 7.2,
            right=0.96,
            bottom=0.35 / height,
            top=1 - 0.32 / height,
            wspace=0.2,
        )
    return figure


def _table(family: LinearisedFamily) -> Table:
    head = ("mode", "ω", "seeds", "accuracy, %", "linear units, %", "path length")
    rows = []
    for mode in ("reference", *MODES):
        groups: list[tuple[float | None, list[Network]]] = [*family.groups(mode)]
        if mode == "reference":
            reference = [n for n in family.networks if n.mode == mode]
            groups = [(None, reference)] if reference else []
        for omega, group in groups:
            numbers = [
                [100 * network.accuracy for network in group],
                [100 * network.linear for network in group],
                [network.length for network in group],
            ]
            rows.append(
                (
                    TextCell(mode),
                    TextCell("" if omega is None else f"{omega:g}"),
                    TextCell(str(len(group)), str(len(group))),
                    *(_mean(values) for values in numbers),
                )
            )
    return Table(tuple(TextCell(text) for text in head), tuple(rows), 2, True)


def _mean(values: Sequence[float]) -> TextCell:
    mean = statistics.fmean(values)
    if len(values) == 1:
        return TextCell(f"{mean:.2f}", repr(mean))
    return TextCell(f"{mean:.2f} ± {statistics.pstdev(values):.2f}", repr(mean))
