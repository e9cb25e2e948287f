"""Wrong labels: how density and absolute deviation are distributed over paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from .drawing import COLOURS, draw_shares, page_figure
from .linear_regions import (
    AXES,
    MEASURES,
    ClosedPaths,
    medians,
    over_seeds,
    path_values,
    settings_in,
    size_of,
    unfitted,
)
from .study import Findings, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nlbench.store.run_folder import Run

__all__ = ["Noise"]


class Noise(ClosedPaths):
    """Distribution over paths of density and deviation, for clean and for wrong labels."""

    question = "Are networks that memorise wrong labels more nonlinear, along the same paths?"

    def analyse(self, runs: Mapping[str, Run]) -> Findings:
        """Compare the medians of networks, setting by setting."""
        values = {name: path_values(runs["paths"], name) for name in MEASURES}
        middle = {name: medians(table) for name, table in values.items()}
        deviation, density = middle["absdev"], middle["density"]
        noisy = [name for name in settings_in(values["absdev"].setting) if "noise" in name]
        verdicts = [
            _apart(
                "Networks of wrong labels deviate more than those of clean ones",
                "deviation lowest for clean labels, higher the more labels are wrong",
                deviation,
                ("clean", noisy),
            ),
            _apart(
                "VGG8 has more regions for clean labels than for any share of wrong ones",
                "yes, on CIFAR-10",
                density,
                (noisy, "clean"),
            ),
        ]
        if "augmented" in deviation.index.get_level_values(0):
            verdicts.insert(
                1,
                _apart(
                    "Augmented training deviates less than plain training",
                    "clearly apart",
                    deviation,
                    ("augmented", "clean"),
                ),
            )
        return Findings(
            verdicts,
            {"Median over paths": _table(middle)},
            {"Share of paths with at most so much: deviation left, density right": _figure(values)},
            [size_of(values["absdev"]), *unfitted(runs["paths"])],
        )


def _apart(
    claim: str,
    published: str,
    middle: pd.Series,
    sides: tuple[str | Sequence[str], str | Sequence[str]],
) -> Verdict:
    """Whether every network of one side has a lower median than every one of the other."""
    lower, higher = ([side] if isinstance(side, str) else list(side) for side in sides)
    below = [v for name in lower for v in middle[name]]
    above = [v for name in higher for v in middle[name]]
    ours = "; ".join(f"{name}: {over_seeds(middle[name])}" for name in (*lower, *higher))
    agrees = True if max(below) < min(above) else False if min(below) > max(above) else None
    counted = sum(a > b for b in below for a in above)
    return Verdict(
        claim,
        published,
        ours,
        agrees,
        f"median over paths, mean ± deviation over networks; so ordered in {counted} of "
        f"{len(below) * len(above)} pairs of networks; yes or no only where all pairs agree",
    )


def _table(middle: Mapping[str, pd.Series]) -> pd.DataFrame:
    names = settings_in(next(iter(middle.values())).index.get_level_values(0))
    rows = [
        (name, len(middle["absdev"][name]), *(over_seeds(middle[m][name]) for m in MEASURES))
        for name in names
    ]
    return pd.DataFrame(rows, columns=["setting", "networks", "absolute deviation", "density"])


def _figure(values: Mapping[str, pd.DataFrame]) -> Figure:
    figure, panels = page_figure(2.9, columns=2)
    for axes, (measure, table) in zip(panels, values.items(), strict=True):
        for number, name in enumerate(settings_in(table.setting)):
            colour = COLOURS[number % len(COLOURS)]
            draw_shares(axes, table[table.setting == name].value, color=colour, label=name)
        axes.set_xlabel(AXES[measure])
    panels[0].set_ylabel("share of paths")
    panels[0].legend(loc="lower right", fontsize=7.5)
    return figure
