"""The asymmetry of ReLU's affinity about its kink, and its cause."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nlbench.request import Request
from nlbench.store.run import Run

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import page_figure
from .framework.verdicts import ordered, within
from .shared.single_functions import one_batch, relu_on_uniform, summary_values
from .shared.site_scores import AFFINITY

LENGTH = 5.0
POINTS = 2000
LAST_STEPS = (4.9, 4.99)
"""Additional steps where almost no input is positive."""
MIN_ASYMMETRY = 0.1


class Asymmetry(Study):
    """Affinity of ReLU on [-a, -a + 5], its two terms, and their closed forms."""

    question = "Which term makes ReLU's affinity asymmetric about the origin?"
    source = AFFINITY
    needs = "nothing"
    minutes = quick_minutes = 0.1

    def measure(self, context: Context) -> Runs:
        """Measure ReLU's affinity on evenly spaced intervals of length 5 that contain 0."""
        steps = np.linspace(0, LENGTH, 11 if context.quick else 21)[:-1]
        request = Request(
            ("affinity",),
            ("functions/relu",),
            tuple(f"interval/{-a:.6g}:{LENGTH - a:.6g}" for a in (*steps, *LAST_STEPS)),
            ("init",),
            samples=0,
            settings=one_batch(POINTS) | {"interval.count": POINTS},
            precision="float64",
        )
        return {"run": context.run(request), "independent": _measure_independent(context)}

    def analyse(self, runs: Runs) -> Findings:
        """Compare the score and its terms with their mirror images about the kink."""
        table = _table(summary_values(runs["run"]))
        error = (table.score - table["score, closed form"]).abs().max()
        inner = table[~table.a.isin(LAST_STEPS) & (table.a > 0)]
        skew = {name: _skew(inner[name].to_numpy()) for name in ("distance", "bound", "score")}
        last = table.iloc[-1]
        verdicts = [
            Verdict(
                "What is measured is what was derived (appendix A.2)",
                "empirical on analytical",
                f"maximum difference {error:.4f}, {len(table)} intervals",
                within(error, 0, 0.01),
                f"{POINTS:,} evenly spaced points per interval",
            ),
            Verdict(
                "The score is not symmetric about the origin",
                "not symmetric",
                f"asymmetry {skew['score']:.3f}",
                ordered(MIN_ASYMMETRY, skew["score"]),
                "asymmetry: Σ|f(a) - f(5 - a)| / Σ(f(a) + f(5 - a)); 0 is symmetric",
            ),
            Verdict(
                "The numerator, the transport's distance, is roughly symmetric",
                "roughly symmetric",
                f"asymmetry {skew['distance']:.3f}",
                ordered(skew["distance"], MIN_ASYMMETRY),
                "1 minus the measured score, times the derived √(2 var y) of the output",
            ),
            Verdict(
                "The asymmetry comes from the denominator, the output's spread",
                "mainly",
                f"asymmetry {skew['bound']:.3f}, {skew['bound'] / skew['distance']:.0f} "
                "times the numerator's",
                ordered(3 * skew["distance"], skew["bound"]),
            ),
            Verdict(
                "The score comes near 0 only where all inputs become negative",
                "approaches 0",
                f"{last.score:.3f} at a = {last.a:g}; lowest elsewhere {inner.score.min():.3f}",
                bool(last.score < 0.1 and table.score.idxmin() == table.index[-1]),
                f"closed form {last['score, closed form']:.3f}; the score is undefined if no input "
                "is positive",
            ),
            _independent_verdict(runs["independent"]),
        ]
        figures = {"ReLU on [-a, -a + 5]: terms of the score, measured and derived": _figure(table)}
        return Findings(verdicts, {"ReLU on [-a, -a + 5]": table}, figures)


def _measure_independent(context: Context) -> Run:
    """Measure an activation that returns the inputs of other samples."""
    import torch
    from torch import nn

    from .networks.formulas import SampleShift

    inputs = torch.randn(POINTS, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return context.evaluate(
        nn.Sequential(SampleShift()),
        inputs,
        ("affinity", "r2"),
        "independent",
        settings=one_batch(POINTS),
        name="shuffled",
    )


def _independent_verdict(run: Run) -> Verdict:
    values = {record.measure.name: record.result.summary["value"] for record in run.records}
    affinity = values["affinity"]
    r2 = values["r2"]
    return Verdict(
        "The score of independent inputs and outputs is 0",
        "0",
        f"{affinity:.3f}, R² {r2:.3f}",
        within(affinity, 0, 0.1),
        f"{POINTS:,} normally distributed inputs; each output is the input of another sample: the "
        "score compares the distributions of inputs and outputs, not how samples are paired",
    )


def _table(scores: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for data, value in zip(scores.data, scores.value.to_numpy(), strict=True):
        low, high = map(float, data.partition("/")[2].split(":"))
        distance, bound, score = relu_on_uniform(low, high)
        rows.append((abs(low), (1 - value) * bound, value, distance, bound, score))
    columns = ["a", "distance", "score", "distance, closed form", "bound", "score, closed form"]
    return pd.DataFrame(rows, columns=columns).sort_values("a", ignore_index=True)


def _skew(values: np.ndarray) -> float:
    """Compute the relative distance between evenly spaced values and their mirror image."""
    return float(np.abs(values - values[::-1]).sum() / (values + values[::-1]).sum())


def _figure(table: pd.DataFrame) -> Figure:
    a = np.linspace(0, LENGTH - 1e-3, 300)
    theory = np.array([relu_on_uniform(-each, LENGTH - each) for each in a])
    names = {"distance": "W2(T x, y)", "bound": "√(2 var y)", "score": "affinity"}
    figure, panels = page_figure(2.4, columns=3)
    for column, (axes, (name, title)) in enumerate(zip(panels, names.items(), strict=True)):
        axes.plot(a, theory[:, column], color="0.6", label="closed form")
        if name != "bound":
            axes.plot(table.a, table[name], "o", ms=3.5, color="C0", label="measured")
        axes.set(title=title, xlabel="a")
        axes.set_ylim(bottom=0)
    panels[2].legend()
    return figure
