"""Affinity of ReLU on input windows that slide across its kink."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nlbench.request import Request

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import draw_theory
from .framework.verdicts import rises, within
from .shared.single_functions import one_batch, relu_on_uniform, summary_values
from .shared.site_scores import AFFINITY

# Scores in the authors' notebook, each from one draw, by window index.
PUBLISHED = {5: 0.1339, 8: 0.5263, 11: 0.7921, 13: 0.9401, 15: 1.0000}
SLIDES = "0.13, 0.45, 0.77, 0.96 and 1.0"
CENTRES = np.linspace(-4, 4, 20)
HALF_WIDTH = 2
POINTS = 1000
ROUNDING = 1e-6


def window(index: int) -> str:
    """Return the dataset name for a window.

    Examples
    --------
    >>> window(0), window(19)
    ('interval/-6.000000:-2.000000', 'interval/2.000000:6.000000')
    """
    low, high = _ends(index)
    return f"interval/{low:.6f}:{high:.6f}"


def _ends(index: int) -> tuple[float, float]:
    return CENTRES[index] - HALF_WIDTH, CENTRES[index] + HALF_WIDTH


class ReluDomain(Study):
    """Affinity of ReLU on windows of width 4 from negative to positive inputs."""

    question = "Does ReLU's nonlinearity depend on the range of its inputs?"
    source = AFFINITY
    needs = "nothing"
    minutes = 0.2
    quick_minutes = 0.1
    takes = ("seeds",)

    def measure(self, context: Context) -> Runs:
        """Measure the affinity of ReLU on 1,000 points in each window, drawn for each seed."""
        windows = tuple(map(window, PUBLISHED if context.quick else range(len(CENTRES))))
        request = Request(
            ("affinity",),
            ("functions/relu",),
            (window(0), *windows) if context.quick else windows,
            ("init",),
            context.seeds_or(10, quick=3),
            samples=POINTS,
            settings=one_batch(POINTS) | {"interval.spacing": "random", "interval.count": 100_000},
            precision="float64",
        )
        return {"run": context.run(request)}

    def analyse(self, runs: Runs) -> Findings:
        """Compare each window's score with the notebook and the closed form."""
        scores = summary_values(runs["run"])
        verdicts = [_compare_with_draws(scores, index, score) for index, score in PUBLISHED.items()]
        table = _table(scores)
        known = table["here"].dropna()
        steps = known.diff().dropna()
        is_one = bool(known.iloc[-1] > 1 - ROUNDING)
        negative = table[table["to"] < 0]["here"]
        verdicts += [
            Verdict(
                "The further the window lies to the right, the more linear ReLU is",
                "rises to 1",
                f"{known.iloc[0]:.3f} to {known.iloc[-1]:.3f}, "
                f"{(steps >= -ROUNDING).sum()} of {len(steps)} steps up",
                rises(known, ROUNDING) and is_one,
            ),
            Verdict(
                "Where all inputs are negative the score is a number",
                "",
                f"{negative.isna().sum()} of {len(negative)} windows undefined: constant output",
                bool(negative.notna().all()) if len(negative) else None,
                "by definition: the score of a constant output is 0 / 0, which nlbench leaves "
                "undefined; the published code's ridge in the numerator and the denominator makes "
                "it 1 - 1/√2 = 0.2929",
            ),
        ]
        return Findings(
            verdicts,
            {"Affinity of ReLU by window": table},
            {"Affinity of ReLU on windows of width 4": _figure(table)},
            [
                f"Draws of {POINTS:,} points per window: {scores.seed.nunique()}.",
                "Published scores are those of the authors' notebook. The slides have "
                f"{SLIDES}, for windows that they don't state.",
            ],
        )


def _compare_with_draws(scores: pd.DataFrame, index: int, published: float) -> Verdict:
    """Test whether a published score is plausible for one draw."""
    from scipy.stats import t

    ours = scores[scores.data == window(index)].value
    mean = ours.mean()
    spread = ours.std()
    n = len(ours)
    margin = t.ppf(0.995, n - 1) * spread * math.sqrt(1 + 1 / n) if n > 1 else math.nan
    low, high = _ends(index)
    return Verdict(
        f"Inputs from {low:.2f} to {high:.2f}",
        f"{published:.4f}",
        f"{mean:.4f} ± {spread:.4f}",
        within(mean if n >= 3 else math.nan, published, margin + 5e-4),
        f"± sd over draws; closed form {_closed_form(index):.4f}; agrees if the published score is "
        f"plausible for a draw of {POINTS:,} points (99% prediction interval ± {margin:.4f})",
    )


def _closed_form(index: int) -> float:
    low, high = _ends(index)
    return 1.0 if low >= 0 else math.nan if high <= 0 else relu_on_uniform(low, high)[2]


def _table(scores: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for index in range(len(CENTRES)):
        ours = scores[scores.data == window(index)].value
        if len(ours):
            rows.append((*_ends(index), ours.mean(), ours.std(), _closed_form(index)))
    return pd.DataFrame(rows, columns=["from", "to", "here", "sd over draws", "closed form"])


def _figure(table: pd.DataFrame) -> Figure:
    centres = np.linspace(-1.99, 2, 200)
    theory = [relu_on_uniform(c - HALF_WIDTH, c + HALF_WIDTH)[2] for c in centres]
    figure, axes = draw_theory(
        ([*centres, 4], [*theory, 1.0]),
        ((table["from"] + table["to"]) / 2, table["here"]),
        (CENTRES[list(PUBLISHED)], list(PUBLISHED.values())),
        spread=table["sd over draws"],
    )
    axes.axvspan(-4.2, -2, color="0.93", label="no positive input: undefined")
    axes.set(xlim=(-4.2, 4.2), xlabel="centre of the window")
    axes.legend()
    return figure
