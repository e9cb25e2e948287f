"""Affinity of random ReLU and tanh perceptrons with weights of different size."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nlbench.citation import Source
from nlbench.request import Request

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import page_figure
from .framework.verdicts import interval_text, mean_above, mean_near
from .shared.single_functions import one_batch
from .shared.subjects import load_on_cpu

GRID_SIDE = 32

# Model, and mean and standard deviation over the layers of one network (slides), by panel.
PANELS = {
    ("ReLU", "× 1", "original"): ("redshift-mlp", 0.90, 0.04),
    ("tanh", "× 1", "original"): ("redshift-mlp-tanh", 0.96, 0.02),
    ("ReLU", "× 6", "original"): ("redshift-mlp-x6", 0.82, 0.07),
    ("tanh", "× 6", "original"): ("redshift-mlp-tanh-x6", 0.73, 0.05),
    ("ReLU", "× 1", "shifted"): ("redshift-mlp-shifted", 0.90, 0.05),
    ("tanh", "× 1", "shifted"): ("redshift-mlp-shifted-tanh", 0.96, 0.01),
    ("ReLU", "× 6", "shifted"): ("redshift-mlp-shifted-x6", 0.65, 0.10),
    ("tanh", "× 6", "shifted"): ("redshift-mlp-shifted-tanh-x6", 0.74, 0.05),
}

# Each claim states that a signed sum of panels is positive (paper, section 3.2).
_ORIGINAL = "original"
_SHIFTED = "shifted"
CONTRASTS = {
    "Larger weights lower ReLU's scores": [
        (1, ("ReLU", "× 1", _ORIGINAL)),
        (-1, ("ReLU", "× 6", _ORIGINAL)),
    ],
    "They lower tanh's more": [
        (1, ("tanh", "× 1", _ORIGINAL)),
        (-1, ("tanh", "× 6", _ORIGINAL)),
        (-1, ("ReLU", "× 1", _ORIGINAL)),
        (1, ("ReLU", "× 6", _ORIGINAL)),
    ],
    "Under larger weights ReLU stays above tanh": [
        (1, ("ReLU", "× 6", _ORIGINAL)),
        (-1, ("tanh", "× 6", _ORIGINAL)),
    ],
    "Shifting large weights makes ReLU more nonlinear": [
        (1, ("ReLU", "× 6", _ORIGINAL)),
        (-1, ("ReLU", "× 6", _SHIFTED)),
    ],
    "Then ReLU is more nonlinear than tanh": [
        (1, ("tanh", "× 6", _SHIFTED)),
        (-1, ("ReLU", "× 6", _SHIFTED)),
    ],
}


MAX_DIFFERENCE = 0.05
"""Maximum difference between equal scores: less than the smallest published contrast, 0.08."""


class Redshift(Study):
    """Random ReLU and tanh perceptrons with weights × 1 and × 6, original and shifted."""

    question = "Do larger weights make random networks more nonlinear, and tanh more than ReLU?"
    source = Source(
        citation="Q. Bouniot et al. Understanding deep neural networks through the lens of their "
        "non-linearity. 2023, slides; the networks of D. Teney et al., Neural Redshift, CVPR 2024."
    )
    needs = "nothing"
    minutes = 0.3
    quick_minutes = 0.2
    takes = ("seeds",)

    def measure(self, context: Context) -> Runs:
        """Measure the affinity of eight kinds of random perceptrons, with several seeds each."""
        request = Request(
            ("affinity",),
            tuple(model for model, _, _ in PANELS.values()),
            ("grid",),
            ("init",),
            context.seeds_or(5, quick=3),
            samples=0,
            settings=one_batch(GRID_SIDE**2) | {"grid.side": GRID_SIDE},
        )
        return {"run": context.run(request)}

    def analyse(self, runs: Runs) -> Findings:
        """Compare mean scores with the slides, and test each contrast between panels."""
        scores = runs["run"].scores
        means = scores[(scores.place == "") & (scores.statistic == "value")]
        rows = []
        verdicts = []
        for (activation, factor, version), (model, published, spread) in PANELS.items():
            ours = means[means.model == model].value
            rows.append((activation, factor, version, published, spread, ours.mean(), ours.std()))
            verdicts.append(
                Verdict(
                    f"{activation}, weights {factor}, {version}",
                    f"{published:.2f} ± {spread:.2f}",
                    interval_text(ours),
                    mean_near(ours, published, MAX_DIFFERENCE),
                    f"agrees if the 95% t interval over networks lies within {MAX_DIFFERENCE} of "
                    "the published mean over layers, disagrees if it lies outside",
                )
            )
        verdicts += [_contrast(claim, signs, means) for claim, signs in CONTRASTS.items()]
        columns = ["activation", "weights", "version", "published", "± over layers", "here"]
        table = pd.DataFrame(rows, columns=[*columns, "sd over seeds"])
        return Findings(
            verdicts,
            {"Mean affinity": table},
            {
                "Mean affinity, published (bars) and measured here (dots)": _figure(table),
                "Functions of the networks of one seed, as grey-scale images of the inputs' square "
                "(figure 4)": _images(int(scores.seed.min()), table),
            },
            [
                "The published values are for one network each, ± over its layers; here: 95% t "
                f"intervals over {scores.seed.nunique()} seeds, the {GRID_SIDE**2:,} points of the "
                "grid in one batch."
            ],
        )


def _contrast(
    claim: str, signs: list[tuple[int, tuple[str, str, str]]], means: pd.DataFrame
) -> Verdict:
    """Test a contrast between panels, paired by the networks' seeds."""
    by_seed = means.pivot_table("value", "seed", "model")
    published = sum(sign * PANELS[panel][1] for sign, panel in signs)
    ours = sum((sign * by_seed[PANELS[panel][0]] for sign, panel in signs), 0 * by_seed.iloc[:, 0])
    return Verdict(
        claim,
        f"{published:+.2f}",
        interval_text(ours, "+.3f"),
        mean_above(ours),
        "difference in mean affinity, 95% interval over networks with the same seeds; "
        "undecided if it contains 0",
    )


def _figure(table: pd.DataFrame) -> Figure:
    figure, axes = page_figure(2.7)
    places = range(len(table))
    axes.bar(places, table.published, yerr=table["± over layers"], color="0.8", ecolor="0.5")
    axes.errorbar(places, table.here, yerr=table["sd over seeds"], fmt="o", color="C0")
    names = [f"{row.activation} {row.weights}\n{row.version}" for row in table.itertuples()]
    axes.set_xticks(places, names, fontsize=7)
    axes.set(ylim=(0, 1.05), ylabel="affinity")
    return figure


def _images(seed: int, table: pd.DataFrame) -> Figure:
    """Draw the output of each network over the grid of its inputs, from its least to its most."""
    import torch

    figure, grid = page_figure(4.0, rows=2, columns=4)
    options = (("side", GRID_SIDE),)
    rows = table.set_index(["activation", "weights", "version"])
    for axes, (panel, (model, _, _)) in zip(grid.flat, PANELS.items(), strict=True):
        subject = load_on_cpu(model, "init", "grid", seed=seed, samples=None, options=options)
        with torch.no_grad():
            values = np.asarray(subject.model(subject.inputs))
        # Samples are drawn in random order.
        pixels = values[np.lexsort(np.asarray(subject.inputs).T)].reshape(GRID_SIDE, GRID_SIDE)
        axes.imshow(pixels, cmap="gray")
        axes.set_title(f"{panel[0]} {panel[1]}, {rows.here[panel]:.2f}", fontsize=9)
        axes.set(xticks=[], yticks=[])
    grid[0, 0].set_ylabel("original")
    grid[1, 0].set_ylabel("shifted")
    return figure
