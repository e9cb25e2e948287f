"""ReLU on a window of inputs that slides over its kink."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from nlbench.request import Request

from .drawing import page_figure
from .single_functions import one_batch, relu_on_uniform, values
from .site_scores import AFFINITY
from .study import Context, Findings, Study, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nlbench.store.run_folder import Run

__all__ = ["ReluDomain"]


# By the centre's place among the twenty: of one draw of 1,000 points each (notebook).
PUBLISHED = {5: 0.1339, 8: 0.5263, 11: 0.7921, 13: 0.9401, 15: 1.0000}
CENTRES = np.linspace(-4, 4, 20)
HALF = 2
POINTS = 1000
FROM = 100_000


def window(place: int) -> str:
    """Name the data around one of the centres.

    Examples
    --------
    >>> window(0), window(19)
    ('interval/-6.000000:-2.000000', 'interval/2.000000:6.000000')
    """
    return f"interval/{CENTRES[place] - HALF:.6f}:{CENTRES[place] + HALF:.6f}"


class ReluDomain(Study):
    """Affinity of ReLU on windows of width 4 from negative to positive inputs."""

    question = "Does ReLU's nonlinearity depend on the range of its inputs?"
    source = AFFINITY
    needs = "nothing"
    minutes, quick_minutes = 0.2, 0.1
    takes = ("seeds",)

    def measure(self, context: Context) -> Mapping[str, Run]:
        """Affinity of ReLU on 1,000 points of each window, drawn anew for each seed."""
        request = Request(
            ("affinity",),
            ("functions/relu",),
            tuple(map(window, PUBLISHED if context.quick else range(len(CENTRES)))),
            ("init",),
            context.seeds_or(10, quick=3),
            samples=POINTS,
            settings=one_batch(POINTS) | {"interval.spacing": "random", "interval.count": FROM},
            precision="float64",
        )
        if context.quick:
            request = _with(request, window(0))
        return {"run": context.run(request)}

    def analyse(self, runs: Mapping[str, Run]) -> Findings:
        """Each window's score beside the notebook's and the closed form."""
        from scipy.stats import t

        found = values(runs["run"])
        verdicts = []
        for place, published in PUBLISHED.items():
            ours = found[found.data == window(place)].value
            mean, spread, n = ours.mean(), ours.std(), len(ours)
            reach = t.ppf(0.995, n - 1) * spread * math.sqrt(1 + 1 / n) if n > 1 else math.nan
            verdicts.append(
                Verdict(
                    f"Inputs from {CENTRES[place] - HALF:.2f} to {CENTRES[place] + HALF:.2f}",
                    f"{published:.4f}",
                    f"{mean:.4f} ± {spread:.4f}",
                    bool(abs(mean - published) <= reach + 5e-4) if n >= 3 else None,
                    f"closed form {_in_theory(place):.4f}; agrees if the published one is a likely "
                    f"draw of {POINTS:,} points (99 % prediction interval ± {reach:.4f})",
                )
            )
        table = _table(found)
        positive = table[table["here"].notna()]
        steps = positive["here"].diff().dropna()
        below = table[table["to"] < 0]
        verdicts.append(
            Verdict(
                "The further the window lies to the right, the more linear is ReLU",
                "rises to 1",
                f"{positive['here'].iloc[0]:.3f} to {positive['here'].iloc[-1]:.3f}, "
                f"{(steps >= -1e-6).sum()} of {len(steps)} steps up",
                bool((steps >= -1e-6).all() and positive["here"].iloc[-1] > 1 - 1e-6),
            )
        )
        verdicts.append(
            Verdict(
                "Where all inputs are negative the score is a number",
                "0.2929, by the published code",
                f"{below['here'].isna().sum()} of {len(below)} windows undefined: constant output",
                bool(below["here"].notna().all()) if len(below) else None,
                "an output that doesn't vary leaves nothing to score; 1 - 1/√2 = 0.2929 is what a "
                "ridge added to both sides of the fraction leaves",
            )
        )
        return Findings(
            verdicts,
            {"Affinity of ReLU by window": table},
            {"Affinity of ReLU on windows of width 4": _figure(table)},
            [f"Draws of {POINTS:,} points a window: {found.seed.nunique()}."],
        )


def _with(request: Request, data: str) -> Request:
    from dataclasses import replace

    return replace(request, data=(data, *request.data))


def _in_theory(place: int) -> float:
    low, high = CENTRES[place] - HALF, CENTRES[place] + HALF
    return 1.0 if low >= 0 else math.nan if high <= 0 else relu_on_uniform(low, high)[2]


def _table(found: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for place, centre in enumerate(CENTRES):
        ours = found[found.data == window(place)].value
        if len(ours):
            rows.append((centre - HALF, centre + HALF, ours.mean(), ours.std(), _in_theory(place)))
    return pd.DataFrame(rows, columns=["from", "to", "here", "±draws", "closed form"])


def _figure(table: pd.DataFrame) -> Figure:
    figure, axes = page_figure(2.7)
    theory = [(c, relu_on_uniform(c - HALF, c + HALF)[2]) for c in np.linspace(-1.99, 2, 200)]
    axes.plot(*zip(*theory, (4, 1.0), strict=True), color="0.6", label="closed form")
    centre = (table["from"] + table["to"]) / 2
    axes.errorbar(centre, table["here"], yerr=table["±draws"], fmt="o", color="C0", label="here")
    axes.plot(
        CENTRES[[*PUBLISHED]], [*PUBLISHED.values()], "x", color="C1", ms=9, label="published"
    )
    axes.axvspan(-4.2, -2, color="0.93", label="no positive input: undefined")
    axes.set_xlim(-4.2, 4.2)
    axes.set_xlabel("centre of the window")
    axes.set_ylabel("affinity")
    axes.set_ylim(0, 1.05)
    axes.legend()
    return figure
