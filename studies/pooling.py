"""Affinity of tensors averaged over positions compared with that of whole tensors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nlbench.request import Request

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import page_figure
from .framework.verdicts import within
from .shared.single_functions import PAPER_ACTIVATIONS, normal_score, one_batch, summary_values
from .shared.site_scores import AFFINITY, site_scores
from .shared.small_networks import trained_vgg8

# Mean and standard deviation over pooling methods (slides).
PUBLISHED = {
    "sigmoid": (0.91, 0.001),
    "tanh": (0.81, 0.001),
    "hardtanh": (0.78, 0.002),
    "hardswish": (0.70, 0.002),
    "silu": (0.68, 0.002),
    "leaky-relu": (0.63, 0.003),
    "relu": (0.62, 0.004),
    "relu6": (0.62, 0.002),
    "gelu": (0.61, 0.003),
}
REDUCTIONS = {"spatial": "pooled", "flatten": "whole"}
SAMPLES = 256
MANY_CHANNELS = 16
FEW_CHANNELS = 3
TOLERANCE = 0.015


class Pooling(Study):
    """Affinity of nine activations and of a trained vgg8, pooled over positions or not."""

    question = "Does averaging over positions preserve the affinity score?"
    source = AFFINITY
    needs = "digits"
    minutes = 0.3
    quick_minutes = 0.2
    takes = ("data", "seeds")

    def measure(self, context: Context) -> Runs:
        """Measure noise with many and with few channels, and a network, under both reductions."""
        data, weights = trained_vgg8(context)
        seeds = context.seeds_or(3)
        runs = {}
        for reduction in REDUCTIONS:
            settings = {**one_batch(SAMPLES, "ledoit-wolf"), "sites.reduction": reduction}
            for channels in (MANY_CHANNELS, FEW_CHANNELS):
                request = Request(
                    ("affinity",),
                    tuple(f"functions/{name}" for name in PAPER_ACTIVATIONS),
                    ("normal/0:1",),
                    ("init",),
                    seeds,
                    samples=SAMPLES,
                    settings=settings
                    | {
                        "normal.shape": f"{channels}x4x4",
                        "normal.spacing": "random",
                        "normal.count": 4 * SAMPLES,
                    },
                )
                part = f"{channels}-channels-{reduction}"
                runs[part] = context.run(request, part)
            request = Request(
                ("affinity",), ("vgg8",), (data,), (weights,), seeds, SAMPLES, settings=settings
            )
            runs[f"network-{reduction}"] = context.run(request, f"network-{reduction}")
        return runs

    def analyse(self, runs: Runs) -> Findings:
        """Compare the scores of pooled and whole tensors."""
        noise = {
            channels: _noise_scores(runs, channels) for channels in (MANY_CHANNELS, FEW_CHANNELS)
        }
        network = _network_scores(runs)
        verdicts = []
        for name, (published, spread) in PUBLISHED.items():
            pooled, whole = noise[MANY_CHANNELS].loc[name, ["pooled", "whole"]].to_numpy()
            verdicts.append(
                Verdict(
                    f"{name} has one score, pooled or not ({MANY_CHANNELS} channels of noise)",
                    f"{published:.2f} ± {spread:.3f}",
                    f"pooled {pooled:.3f}, whole {whole:.3f}",
                    within([pooled, whole], published, TOLERANCE),
                    f"in theory {normal_score(name):.4f} for both; agrees if both are within "
                    f"{TOLERANCE} of the published value",
                )
            )
        verdicts += [
            _is_preserved(
                f"Pooling preserves the score with {FEW_CHANNELS} channels of noise",
                noise[FEW_CHANNELS],
                "a pooled tensor has one value per channel; with few values, an input may be "
                "nearer to another sample's output than to its own, which reduces the distance",
            ),
            _is_preserved(
                "Pooling preserves the scores of a trained network's activations",
                network,
                "unlike those of noise, the positions in vgg8 are not independent",
            ),
        ]
        tables = {
            f"{channels} channels of noise": scores.reset_index(names="function")
            for channels, scores in noise.items()
        }
        draws = summary_values(runs[f"{MANY_CHANNELS}-channels-spatial"]).seed.nunique()
        return Findings(
            verdicts,
            {**tables, "vgg8": network.reset_index(names="site")},
            {"Affinity, pooled and whole": _figure(noise, network)},
            [f"{SAMPLES} samples; noise with 4x4 independent positions; draws: {draws}."],
        )


def _noise_scores(runs: Runs, channels: int) -> pd.DataFrame:
    columns = {}
    for reduction, name in REDUCTIONS.items():
        scores = summary_values(runs[f"{channels}-channels-{reduction}"])
        columns[name] = scores.groupby("function").value.mean()
    return pd.DataFrame(columns).loc[list(PUBLISHED)]


def _network_scores(runs: Runs) -> pd.DataFrame:
    columns = {}
    for reduction, name in REDUCTIONS.items():
        scores = site_scores(runs[f"network-{reduction}"])
        columns[name] = scores.groupby("place", sort=False).value.mean()
    return pd.DataFrame(columns)


def _is_preserved(claim: str, scores: pd.DataFrame, reason: str) -> Verdict:
    difference = scores.pooled - scores.whole
    worst = str(difference.abs().idxmax())
    return Verdict(
        claim,
        "preserves",
        f"pooled - whole: {difference.min():+.3f} to {difference.max():+.3f}; {worst} "
        f"{scores.pooled[worst]:.3f} vs. {scores.whole[worst]:.3f}",
        within(difference, 0, TOLERANCE),
        f"agrees if no score differs by more than {TOLERANCE}; {reason}",
    )


def _figure(noise: Mapping[int, pd.DataFrame], network: pd.DataFrame) -> Figure:
    figure, panels = page_figure(3.2, columns=3, sharey=True)
    titles = [*(f"{channels} channels of noise" for channels in noise), "vgg8, trained"]
    for axes, title, scores in zip(panels, titles, [*noise.values(), network], strict=True):
        places = np.arange(len(scores))
        axes.plot(places, scores.whole, "o", color="C0", label="whole")
        axes.plot(places, scores.pooled, "x", color="C1", label="pooled")
        axes.set_xticks(places, scores.index, fontsize=7, rotation=60, ha="right")
        axes.set_title(title)
    panels[0].set_ylabel("affinity")
    panels[0].legend()
    return figure
