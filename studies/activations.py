"""Nine activations over sliding means and widths of their input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from nlbench.request import Request

from .drawing import page_figure
from .single_functions import NINE, one_batch, values
from .site_scores import AFFINITY
from .study import Context, Findings, Study, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nlbench.store.run_folder import Run

__all__ = ["Activations"]


FARTHEST = 20
POINTS = 1000
GRIDS = {"full": (20, (1, 2, 4)), "quick": (9, (1, 4))}
"""How many means, and which widths."""
BENT = 0.9
"""Below it an activation counts as nonlinear, for the width of its nonlinear range."""
NEAR_ZERO = 0.15


class Activations(Study):
    """Affinity of nine activations on normal inputs, by mean and width."""

    question = "How low does each activation's affinity fall, and over how wide a range of inputs?"
    source = AFFINITY
    needs = "nothing"
    minutes, quick_minutes = 0.4, 0.2

    def measure(self, context: Context) -> Mapping[str, Run]:
        """Affinity at each mean and width; once more with the published code's absolute ridge."""
        count, widths = GRIDS["quick" if context.quick else "full"]
        means = np.linspace(-FARTHEST, FARTHEST, count)
        request = Request(
            ("affinity",),
            tuple(f"functions/{name}" for name in NINE),
            tuple(f"normal/{mean:.4f}:{width}" for mean in means for width in widths),
            ("init",),
            samples=0,
            settings=one_batch(POINTS) | {"normal.count": POINTS},
            precision="float64",
        )
        absolute = Request(
            request.measures,
            request.models,
            request.data,
            request.weights,
            samples=0,
            settings={**request.settings, "affinity.ridge_unit": "absolute"},
            precision="float64",
        )
        return {"run": context.run(request), "absolute": context.run(absolute, "absolute")}

    def analyse(self, runs: Mapping[str, Run]) -> Findings:
        """Lowest score and nonlinear range of each, and what the paper says of them."""
        curves = {part: _curves(run) for part, run in runs.items()}
        found = {part: _summary(curve) for part, curve in curves.items()}
        own, theirs = found["run"], found["absolute"]
        means = curves["run"]["mean"].nunique()
        table = own.join(theirs.lowest.rename("lowest, absolute ridge")).reset_index()
        wide = own.range
        verdicts = [
            Verdict(
                "ReLU and GELU come close to 0",
                "close to 0",
                f"lowest {own.lowest['relu']:.3f} and {own.lowest['gelu']:.3f}",
                bool(own.lowest["relu"] < NEAR_ZERO and own.lowest["gelu"] < NEAR_ZERO),
                f"below {NEAR_ZERO}; with the published code's absolute ridge "
                f"{theirs.lowest['relu']:.3f} and {theirs.lowest['gelu']:.3f}",
            ),
            Verdict(
                "The sigmoid does not come close to 0",
                "not the case",
                f"lowest {own.lowest['sigmoid']:.3f}",
                bool(own.lowest["sigmoid"] >= NEAR_ZERO),
                f"{theirs.lowest['sigmoid']:.3f} with the published code's absolute ridge, which "
                "lifts the far ends, where the sigmoid is an exponential of tiny values, to "
                "1 - 1/√2 = 0.293, whatever happens there",
            ),
            Verdict(
                "tanh falls much lower than the sigmoid",
                "much lower",
                f"lowest {own.lowest['tanh']:.3f} against {own.lowest['sigmoid']:.3f}",
                bool(own.lowest["tanh"] < own.lowest["sigmoid"] - 0.05),
                "tanh(x) = 2 sigmoid(2x) - 1: its scores are the sigmoid's at twice the mean and "
                f"width; with an absolute ridge {theirs.lowest['tanh']:.3f} against "
                f"{theirs.lowest['sigmoid']:.3f}",
            ),
            Verdict(
                "Sigmoid and GELU are nonlinear over a wide range, ReLU over a narrow one",
                "wide; narrow",
                f"{wide['sigmoid']:.1f} and {wide['gelu']:.1f} against {wide['relu']:.1f}",
                bool(min(wide["sigmoid"], wide["gelu"]) > wide["relu"]),
                f"range of means where the score is below {BENT}, mean over widths; a window "
                f"without a score is not in it; steps of {2 * FARTHEST / (means - 1):.1f}",
            ),
            Verdict(
                "SiLU and HardSwish are nonlinear over larger ranges than ReLU",
                "large subdomains",
                f"{wide['silu']:.1f} and {wide['hardswish']:.1f} against {wide['relu']:.1f}",
                bool(min(wide["silu"], wide["hardswish"]) > wide["relu"]),
            ),
            Verdict(
                "LeakyReLU is on average more linear than ReLU and ReLU6",
                "on average more linear",
                *_paired(curves["run"], "leaky-relu", ("relu", "relu6")),
                "mean score over the windows where all three have one",
            ),
        ]
        return Findings(
            verdicts,
            {"Lowest score and nonlinear range": table},
            {f"Affinity of nine activations on N(mean, width²), {means} means": _figure(curves)},
            ["The paper's widths are not stated in its text; those here are in the legend."],
        )


def _curves(run: Run) -> pd.DataFrame:
    """One row a function, mean and width."""
    found = values(run)
    places = found.data.str.partition("/")[2].str.partition(":")
    return found.assign(mean=places[0].astype(float), width=places[2].astype(float))


def _summary(curves: pd.DataFrame) -> pd.DataFrame:
    step = np.diff(np.sort(curves["mean"].unique())).mean()
    rows = {}
    for name, of in curves.groupby("function", sort=False):
        lowest = of.sort_values("value").iloc[0]
        bent = (of.value < BENT).sum() / of.width.nunique() * step
        rows[name] = (
            lowest.value,
            f"N({lowest['mean']:.2f}, {lowest.width:g}²)",
            bent,
            int(of.value.isna().sum()),
        )
    columns = ["lowest", "at", "range", "without score"]
    return pd.DataFrame.from_dict(rows, "index", columns=columns).rename_axis("function")


def _paired(curves: pd.DataFrame, one: str, others: tuple[str, ...]) -> tuple[str, bool]:
    """Compare the mean scores over the windows where all have one."""
    table = curves.pivot_table(index=["mean", "width"], columns="function", values="value")
    mean = table[[one, *others]].dropna().mean()
    said = f"{mean[one]:.4f} against " + " and ".join(f"{mean[other]:.4f}" for other in others)
    return said, bool(all(mean[one] > mean[other] for other in others))


def _figure(curves: Mapping[str, pd.DataFrame]) -> Figure:
    figure, grid = page_figure(5.4, rows=3, columns=3, sharex=True, sharey=True)
    for axes, name in zip(grid.flat, NINE, strict=True):
        for part, style in (("absolute", ":"), ("run", "-")):
            of = curves[part][curves[part].function == name]
            for color, (width, row) in enumerate(of.groupby("width")):
                axes.plot(
                    row["mean"],
                    row.value,
                    style,
                    marker="." if part == "run" else "",
                    ms=4,
                    lw=1.2,
                    color=f"C{color}",
                    label=f"width {width:g}" + (", absolute ridge" if part == "absolute" else ""),
                )
        axes.set_title(name)
        axes.set_ylim(-0.03, 1.05)
    for axes in grid[-1]:
        axes.set_xlabel("mean of the input")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure
