"""Error, deviation and density of networks of increasing width, trained with wrong labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from nlbench.request import Request

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import COLOURS, page_figure
from .framework.verdicts import Decision, mean_above, rises_in_networks
from .shared.linear_regions import DATA, MEASURES, SOURCE

WIDTHS = (4, 8, 16)
NOISE = 0.2
MAX_TRAIN_ERROR = 0.05
"""Largest training error at which the labels, including wrong ones, count as fitted."""
LINES = {"lines.number": 4, "lines.anchors": 8, "lines.tolerance": 0.01}


class DoubleDescent(Study):
    """Test error, deviation and density of ResNet18s by width, with wrong labels."""

    question = "Does deviation rise and fall with the width as the test error does?"
    source = SOURCE
    needs = "trains 15 networks"
    minutes = 7.5
    quick_minutes = 0.2
    takes = ("data", "seeds")

    def measure(self, context: Context) -> Runs:
        """Measure the networks of each width along closed paths, and their test accuracy."""
        data = context.data or DATA
        runs = {}
        recipe = "adam" if data == DATA else "linear-regions-double-descent"
        changes: dict[str, Any] = {"label_noise": NOISE, "name": f"noise{NOISE:g}"}
        if context.quick:
            changes |= {"name": f"quick-noise{NOISE:g}", "epochs": 1, "warmup_steps": 20}
        weights = {}
        for width in (4, 8) if context.quick else WIDTHS:
            model = f"resnet18-w{width}"
            weights[model] = tuple(
                str(context.request_training(model, data, recipe, seed, **changes))
                for seed in context.seeds_or(5)
            )
        for model, files in weights.items():
            settings = {**LINES, "lines.number": 1} if context.quick else LINES
            paths = Request(MEASURES, (model,), (data,), files, split="train", settings=settings)
            runs["paths"] = context.run(paths, "paths")
            accuracy = Request(("accuracy",), (model,), (data,), files, samples=0)
            runs["accuracy"] = context.run(accuracy, "accuracy")
        return runs

    def analyse(self, runs: Runs) -> Findings:
        """Test the means for a peak or a trend over the widths."""
        table = _networks(runs)
        means = table.groupby("width").mean(numeric_only=True)
        density = table.pivot_table("density", "seed", "width")
        verdicts = [
            _has_peak("The test error rises to a peak and falls again", table, "test error"),
            _has_peak("Deviation rises to a peak and falls again", table, "absdev"),
            Verdict(
                "Density grows with the width, without a peak",
                "monotonically",
                _format_by_width(means["density"]),
                rises_in_networks(list(density.to_numpy())),
                "mean over seeds; exact trend test within seeds",
            ),
        ]
        errors = table["train error"]
        return Findings(
            verdicts,
            {"Networks": table},
            {"Error and deviation (left) and density (right) by width": _figure(means)},
            [
                f"Small-scale: {len(means)} widths, seeds: {table.seed.nunique()}, few images and "
                "epochs. The published study uses widths up to 64 on CIFAR-10; its narrow networks "
                "can't fit the wrong labels and its wide ones do.",
                f"Error on the training labels, including wrong ones: from {errors.min():.0%} to "
                f"{errors.max():.0%}.",
            ],
        )


def _networks(runs: Runs) -> pd.DataFrame:
    networks: dict[tuple[int, int], dict[str, float]] = {}
    for run in runs.values():
        for record in run.records:
            if record.result.status != "ok":
                continue
            header = record.subject.weights_metadata or {}
            width = int(record.subject.model.rpartition("-w")[2])
            row = networks.setdefault((width, int(header["seed"])), {})
            row["train error"] = 1 - float(header["train_accuracy"])
            row[record.measure.name] = record.result.summary["value"]
    rows = [
        (*key, row["train error"], 1 - row["accuracy"], row["absdev"], row["density"])
        for key, row in sorted(networks.items())
    ]
    columns = ["width", "seed", "train error", "test error", *MEASURES]
    return pd.DataFrame(rows, columns=columns)


def _format_by_width(means: pd.Series) -> str:
    form = ".3f" if means.max() < 10 else ",.0f"
    return ", ".join(f"w{width}: {value:{form}}" for width, value in means.items())


def _has_peak(claim: str, table: pd.DataFrame, column: str) -> Verdict:
    """Test for a peak between the narrowest and the widest network."""
    curves = table.pivot_table(column, "seed", "width").dropna()
    errors = table.groupby("width")["train error"].mean()
    missing = _missing_widths(errors.tolist())
    decision = mean_above(_peak_heights(curves.to_numpy()))
    if decision.agrees is False and missing:
        decision = Decision(None)
    return Verdict(
        claim,
        "peak where the training labels are first fitted",
        _format_by_width(curves.mean()),
        decision,
        "means over seeds; height of each seed above the higher of its ends, at the inner width "
        "that is highest on average over the other seeds, with its 95% t interval; refuted only if "
        "the narrowest networks don't fit the training labels and the two widest do"
        + (f", which needs {missing}" if missing and decision.agrees is None else ""),
    )


def _missing_widths(errors: Sequence[float]) -> str:
    """Name the networks without which a missing peak is not refuted, by the training errors.

    The narrowest width that fits the labels may be the peak itself.

    Examples
    --------
    >>> _missing_widths([0.2, 0.03, 0.0]), _missing_widths([0.01, 0.0, 0.0])
    ('', 'narrower networks')
    """
    if len(errors) < 3:
        return "three widths"
    if errors[0] <= MAX_TRAIN_ERROR:
        return "narrower networks"
    return "wider or longer trained ones" if max(errors[-2:]) > MAX_TRAIN_ERROR else ""


def _peak_heights(curves: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each curve's height above its ends, at the place where the other curves peak.

    A place chosen by the curve itself would be high by chance.

    Parameters
    ----------
    curves : array of shape (seeds, widths)
    """
    seeds, widths = curves.shape
    if seeds < 2 or widths < 3:
        return np.array([])
    others = (curves.sum(0) - curves)[:, 1:-1]
    heights = curves[np.arange(seeds), 1 + others.argmax(1)]
    return np.asarray(heights - np.maximum(curves[:, 0], curves[:, -1]))


def _figure(means: pd.DataFrame) -> Figure:
    figure, (left, right) = page_figure(2.9, columns=2)
    for number, name in enumerate(("train error", "test error")):
        left.plot(means.index, 100 * means[name], "o-", color=COLOURS[number], label=name)
    left.set_ylabel("error, %")
    twin = left.twinx()
    twin.plot(means.index, means["absdev"], "s--", color=COLOURS[2], label="deviation")
    twin.set_ylabel("absolute deviation")
    lines = [*left.lines, *twin.lines]
    left.legend(lines, [str(line.get_label()) for line in lines], fontsize=7.5)
    right.plot(means.index, means["density"], "o-", color=COLOURS[0])
    right.set_ylabel("crossings")
    for axes in (left, right):
        axes.set_xlabel("base width")
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(means.index), [str(width) for width in means.index])
    return figure
