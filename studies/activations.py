"""Nine activations on normally distributed inputs with several means and standard deviations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nlbench.request import Request
from nlbench.store.run import Run

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import page_figure
from .framework.verdicts import above, ordered
from .shared.single_functions import PAPER_ACTIVATIONS, one_batch, summary_values
from .shared.site_scores import AFFINITY

MAX_MEAN = 20
POINTS = 1000
SHAPES = ("relu", "tanh", "sigmoid")
CENTRED_WIDTHS = (1, 4, 16)
NONLINEAR_BELOW = 0.9
"""Affinity below which an activation counts as nonlinear."""
NEAR_ZERO = 0.15
MUCH_LOWER = 0.05


class Activations(Study):
    """Affinity of nine activations on normally distributed inputs, by mean and width."""

    question = "How low does each activation's affinity fall, and over how wide a range of inputs?"
    source = AFFINITY
    needs = "nothing"
    minutes = 0.4
    quick_minutes = 0.2

    def measure(self, context: Context) -> Runs:
        """Measure affinity by mean and width, and again with the published absolute ridge."""
        # Number of means, and the standard deviations, in full and quick studies.
        count, widths = (5, (4,)) if context.quick else (20, (1, 2, 4))
        means = np.linspace(-MAX_MEAN, MAX_MEAN, count)
        request = Request(
            ("affinity",),
            tuple(f"functions/{name}" for name in PAPER_ACTIVATIONS),
            tuple(f"normal/{mean:.4f}:{width}" for mean in means for width in widths),
            ("init",),
            samples=0,
            settings=one_batch(POINTS) | {"normal.count": POINTS},
            precision="float64",
        )
        settings = {**request.settings, "affinity.ridge_unit": "absolute"}
        absolute = replace(request, settings=settings)
        centred = replace(
            request,
            models=tuple(f"functions/{name}" for name in SHAPES),
            data=tuple(f"normal/0:{width}" for width in CENTRED_WIDTHS),
        )
        return {
            "run": context.run(request),
            "absolute": context.run(absolute, "absolute"),
            "centred": context.run(centred, "centred"),
        }

    def analyse(self, runs: Runs) -> Findings:
        """Compare the activations by lowest score and nonlinear range."""
        curves = {part: _curves(runs[part]) for part in ("run", "absolute")}
        relative = _summary(curves["run"])
        absolute = _summary(curves["absolute"])
        lowest = relative.lowest
        ridged = absolute.lowest
        width = relative.range
        means = curves["run"]["mean"].nunique()
        table = relative.join(ridged.rename("lowest, absolute ridge")).reset_index()
        by_width = curves["run"].pivot_table("value", "width", "function", aggfunc="min")
        widths = ", ".join(f"{width:g}" for width in by_width.index)
        averages, averages_text = _averages(curves["run"], ("leaky-relu", "relu", "relu6"))
        verdicts = [
            Verdict(
                "ReLU and GELU come close to 0",
                "close to 0",
                f"lowest {lowest['relu']:.3f} and {lowest['gelu']:.3f}",
                ordered(by_width[["relu", "gelu"]], NEAR_ZERO),
                f"below {NEAR_ZERO} at each width; with the published code's absolute ridge "
                f"{ridged['relu']:.3f} and {ridged['gelu']:.3f}",
            ),
            Verdict(
                "The sigmoid does not come close to 0",
                "not the case",
                f"lowest {_text(by_width['sigmoid'])}",
                _at_all_widths(by_width["sigmoid"] - NEAR_ZERO),
                f"decided only if all widths agree; {ridged['sigmoid']:.3f} with the published "
                "code's absolute ridge, which raises the score to 1 - 1/√2 = 0.293 for any "
                "function with tiny values, such as the sigmoid far below 0",
            ),
            Verdict(
                "tanh falls much lower than the sigmoid",
                "much lower",
                f"lowest {_text(by_width['tanh'])}",
                _at_all_widths(by_width["sigmoid"] - MUCH_LOWER - by_width["tanh"]),
                f"by {MUCH_LOWER}, decided only if all widths agree; tanh(x) = 2 sigmoid(2x) - 1: "
                f"its scores are the sigmoid's at twice the mean and width; with an absolute ridge "
                f"{ridged['tanh']:.3f} vs. {ridged['sigmoid']:.3f}",
            ),
            Verdict(
                "Sigmoid and GELU are nonlinear over a wide range, ReLU over a narrow one",
                "wide; narrow",
                f"{width['sigmoid']:.1f} and {width['gelu']:.1f} vs. {width['relu']:.1f}",
                ordered(width["relu"], width[["sigmoid", "gelu"]]),
                f"range of means where the score is below {NONLINEAR_BELOW}, averaged over "
                "widths; windows without a score don't count; steps of "
                f"{2 * MAX_MEAN / (means - 1):.1f}",
            ),
            Verdict(
                "SiLU and HardSwish are nonlinear over larger ranges than ReLU",
                "large subdomains",
                f"{width['silu']:.1f} and {width['hardswish']:.1f} vs. {width['relu']:.1f}",
                ordered(width["relu"], width[["silu", "hardswish"]]),
            ),
            Verdict(
                "LeakyReLU is on average more linear than ReLU and ReLU6",
                "on average more linear",
                averages_text,
                ordered(averages[["relu", "relu6"]], averages["leaky-relu"]),
                "mean score over the windows where all three are defined",
            ),
            _compare_centred(_curves(runs["centred"])),
        ]
        return Findings(
            verdicts,
            {"Lowest score and nonlinear range": table},
            {
                f"Affinity of nine activations on N(mean, width²), {means} means: quartiles over "
                "widths, whiskers over all (figure 8)": _figure(curves["run"])
            },
            [f"The paper's text does not state its widths; here: {widths}."],
        )


def _at_all_widths(differences: pd.Series) -> bool | None:
    """Test whether differences are positive at all widths. A single width decides nothing."""
    return above(differences) if len(differences) > 1 else None


def _text(by_width: pd.Series) -> str:
    values = (f"{value:.3f}" for value in by_width)
    return f"{', '.join(values)} at width {', '.join(f'{width:g}' for width in by_width.index)}"


def _compare_centred(curves: pd.DataFrame) -> Verdict:
    """Compare ReLU with tanh and the sigmoid on the same inputs."""
    table = curves.pivot_table(index="width", columns="function", values="value")
    listed = []
    for width, row in table.iterrows():
        values = ", ".join(f"{row[name]:.2f}" for name in SHAPES)
        listed.append(f"{values} at width {width:g}")
    return Verdict(
        "For the same inputs ReLU is more nonlinear than tanh and the sigmoid",
        "more nonlinear (figure 2B)",
        f"{', '.join(SHAPES)}: {'; '.join(listed)}",
        above(table[["tanh", "sigmoid"]].sub(table.relu, axis=0)),
        "normally distributed inputs with mean 0; decided only if all widths agree: for wide "
        "inputs tanh is a step, while ReLU's score does not depend on the width",
    )


def _curves(run: Run) -> pd.DataFrame:
    """Return the scores, one row per function, mean and width."""
    table = summary_values(run)
    parameters = table.data.str.partition("/")[2].str.partition(":")
    return table.assign(mean=parameters[0].astype(float), width=parameters[2].astype(float))


def _summary(curves: pd.DataFrame) -> pd.DataFrame:
    step = np.diff(np.sort(curves["mean"].unique())).mean()
    rows = {}
    for name, group in curves.groupby("function", sort=False):
        lowest = group.sort_values("value").iloc[0]
        nonlinear = (group.value < NONLINEAR_BELOW).sum() / group.width.nunique() * step
        place = f"N({lowest['mean']:.2f}, {lowest.width:g}²)"
        rows[name] = (lowest.value, place, nonlinear, int(group.value.isna().sum()))
    columns = ["lowest", "at", "range", "without score"]
    return pd.DataFrame.from_dict(rows, "index", columns=columns).rename_axis("function")


def _averages(curves: pd.DataFrame, names: tuple[str, ...]) -> tuple[pd.Series, str]:
    """Compute the mean scores over the windows where all functions have a score."""
    table = curves.pivot_table(index=["mean", "width"], columns="function", values="value")
    means = table[list(names)].dropna().mean()
    first, *others = (f"{means[name]:.4f}" for name in names)
    return means, f"{first} vs. {' and '.join(others)}"


def _figure(curves: pd.DataFrame) -> Figure:
    """Draw a box per mean, with its quartiles over widths and whiskers over all of them."""
    figure, grid = page_figure(5.4, rows=3, columns=3, sharex=True, sharey=True)
    for axes, name in zip(grid.flat, PAPER_ACTIVATIONS, strict=True):
        known = curves[(curves.function == name) & curves.value.notna()]
        boxes = {mean: rows.value.to_numpy() for mean, rows in known.groupby("mean")}
        axes.boxplot(
            list(boxes.values()), positions=list(boxes), widths=1.3, whis=(0, 100),
            manage_ticks=False,
        )  # fmt: skip
        axes.set(title=name, ylim=(-0.03, 1.05))
    for axes in grid[-1]:
        axes.set_xlabel("mean of the input")
    return figure
