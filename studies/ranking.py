"""How density and absolute deviation rank tasks of growing difficulty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd

from nlbench.reports.agreement import kendall

from .drawing import COLOURS, page_figure
from .linear_regions import AXES, MEASURES, ClosedPaths, medians, path_values, size_of, unfitted
from .study import Findings, Verdict, above, over_networks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nlbench.store.run_folder import Run

__all__ = ["Ranking"]


class Ranking(ClosedPaths):
    """Median density and deviation against the share of wrong labels."""

    question = "Do density and deviation rank tasks by their share of wrong labels?"

    def analyse(self, runs: Mapping[str, Run]) -> Findings:
        """Correlate each measure's median with the share of wrong labels, over networks."""
        values = {name: path_values(runs["paths"], name) for name in MEASURES}
        ladder = {name: _ladder(table) for name, table in values.items()}
        found = {name: kendall(table.level, table.value) for name, table in ladder.items()}
        rises = {name: above(one.low, one.high) for name, one in found.items()}
        verdicts = [
            Verdict(
                "Deviation rises with the share of wrong labels",
                "rises; 0.2 and 0.4 are not told apart for VGG8",
                over_networks("τ", found["absdev"]),
                rises["absdev"],
                _HOW,
            ),
            Verdict(
                "Density falls with the share of wrong labels",
                "falls for VGG8, rises for ResNet18",
                over_networks("τ", found["density"]),
                None if rises["density"] is None else not rises["density"],
                _HOW,
            ),
        ]
        table = pd.concat(
            [one.assign(measure=name) for name, one in ladder.items()], ignore_index=True
        )
        return Findings(
            verdicts,
            {"Median over paths of each network": table},
            {"Median over paths against the share of wrong labels": _figure(ladder)},
            [size_of(values["absdev"]), *unfitted(runs["paths"])],
        )


_HOW = (
    "Kendall's tau-b between the share of wrong labels and a network's median over paths, with "
    "its 95 % interval over networks; undecided where that holds 0 or there are too few networks"
)


def _ladder(values: pd.DataFrame) -> pd.DataFrame:
    """Share of wrong labels and median of each network trained without augmentation."""
    middle = medians(values).reset_index()
    kept = middle[middle.setting.isin(["clean"]) | middle.setting.str.startswith("noise")]
    levels = [0.0 if name == "clean" else float(name.split()[1]) for name in kept.setting]
    return kept.assign(level=levels)[["level", "seed", "value"]].sort_values(["level", "seed"])


def _figure(ladder: Mapping[str, pd.DataFrame]) -> Figure:
    figure, panels = page_figure(2.9, columns=2)
    for axes, (name, table) in zip(panels, ladder.items(), strict=True):
        axes.plot(table.level, table.value, "o", color=COLOURS[0], markersize=4, alpha=0.5)
        levels = table.groupby("level").value
        axes.errorbar(
            levels.mean().index,
            levels.mean(),
            levels.std(ddof=0),
            color=COLOURS[0],
            capsize=2,
        )
        axes.set_xlabel("share of wrong labels")
        label = AXES[name]
        axes.set_ylabel(f"median {label}")
    return figure
