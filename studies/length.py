"""Length distortion of random networks compared with the theories of Hanin and Raghu."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from nlbench.citation import Source
from nlbench.request import Request
from nlbench.store.run import Run

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import COLOURS, page_figure
from .framework.verdicts import Decision, all_hold, below, in_most_networks, rises, within

WIDTH = 32
DEPTH = 8
"""Units of a layer, and hidden layers, of the networks ``ladders/gaussian-V``."""
PATHS = 4
MAX_GROWTH = 1.05
"""Maximum factor per layer that counts as no growth."""
VARIANCES = {"2": "He's initialisation", "4": "weights √2 times as large"}
LENGTHS = Source(
    "B. Hanin, R. Jeong, D. Rolnick, Deep ReLU Networks Preserve Expected Length, ICLR 2022, and "
    "M. Raghu et al., On the Expressive Power of Deep Neural Networks, ICML 2017",
    "expected length of trajectories in random networks",
)


class Length(Study):
    """Length distortion of random ReLU networks by depth, compared with its closed form."""

    question = "Does the image of a path grow exponentially with depth in a random network?"
    source = LENGTHS
    needs = "nothing"
    minutes = 0.5
    quick_minutes = 0.2
    takes = ("seeds",)

    def measure(self, context: Context) -> Runs:
        """Measure the length distortion of segments between normally distributed points."""
        request = Request(
            ("length-distortion",),
            tuple(f"ladders/gaussian-{variance}" for variance in VARIANCES),
            ("normal/0:1",),
            ("init",),
            seeds=context.seeds_or(60, 6),
            samples=2 * PATHS,
            settings={
                "normal.shape": str(WIDTH),
                "normal.spacing": "random",
                "lines.paths": "pairs",
                "lines.number": PATHS,
            },
            precision="float64",
        )
        return {"run": context.run(request)}

    def analyse(self, runs: Runs) -> Findings:
        """Compare the mean length at each layer with theory, and test its growth."""
        curves = _curves(runs["run"])
        table = _table(curves)
        he, large = (table[table.variance == variance] for variance in VARIANCES)
        networks = int(table.networks.min())
        error = ((table["mean"] - table.theory) / table["standard error"]).abs().max()
        growth = np.exp(np.polyfit(large.layer, np.log(large["mean"]), 1)[0])
        is_exponential = [fits_exponential(curve) for curve in curves["4"]]
        last = he.iloc[-1]
        ends = last["mean"] + 2 * last["standard error"] * np.array([-1, 1])
        ends = ends ** (1 / DEPTH)
        # Four standard errors, if they were known exactly; that of a few networks is not.
        limit = stats.t.ppf(stats.norm.cdf(4), networks - 1)
        verdicts = [
            Verdict(
                "What is measured is what was derived",
                "Π √(v / n) χ_B, B binomial",
                f"at most {error:.1f} standard errors off, {len(table)} layers",
                within(error, 0, limit),
                f"{networks} networks, {PATHS} segments each",
            ),
            Verdict(
                "Under He's initialisation the expected length does not grow with depth",
                "at most 1 time a layer",
                f"{last['mean'] ** (1 / DEPTH):.3f} times a layer, "
                f"interval {ends[0]:.3f} to {ends[1]:.3f}",
                below(ends, MAX_GROWTH),
                f"a factor below {MAX_GROWTH:g} per layer counts as no growth",
            ),
            Verdict(
                "With larger weights it grows exponentially with depth",
                "exponential",
                f"{growth:.2f} times a layer; a line fits the logarithm better in "
                f"{sum(is_exponential)} of {len(is_exponential)} networks",
                all_hold([Decision(rises(large["mean"])), in_most_networks(is_exponential)]),
                "variance 4: the weights are larger by a factor of √2; agrees if the mean rises "
                "at each layer, and a line leaves less of the variance of the logarithm of the "
                "length than of that of the length in most networks, by a sign test",
            ),
        ]
        figures = {"Length of the image relative to the path, by layer": _figure(table)}
        return Findings(verdicts, {"Mean length of images": table.round(4)}, figures)


def _curves(run: Run) -> dict[str, NDArray[np.float64]]:
    """Return the length at each layer of each network, by variance."""
    scores = run.scores
    sites = scores[(scores.place == "") & scores.statistic.str.startswith("site:")]
    curves = {}
    for variance in VARIANCES:
        lengths = sites[sites.model == f"ladders/gaussian-{variance}"]
        by_layer = lengths.pivot_table("value", "seed", "statistic")
        layers = [f"site:{2 * layer - 1}" for layer in range(1, DEPTH + 1)]
        curves[variance] = by_layer[layers].to_numpy()
    return curves


def fits_exponential(curve: ArrayLike) -> bool:
    """Test whether a line fits the logarithm of a curve better than the curve itself.

    Examples
    --------
    >>> fits_exponential([1, 2, 4, 8]), fits_exponential([1, 2, 3, 4])
    (True, False)
    """
    lengths = np.asarray(curve, dtype=np.float64)
    return _unexplained_by_line(np.log(lengths)) < _unexplained_by_line(lengths)


def _unexplained_by_line(values: NDArray[np.float64]) -> float:
    """Compute the fraction of the variance that a line through the values leaves."""
    return float(1 - np.corrcoef(np.arange(len(values)), values)[0, 1] ** 2)


def _table(curves: Mapping[str, NDArray[np.float64]]) -> pd.DataFrame:
    rows = []
    for variance, networks in curves.items():
        theory = 1.0
        for layer, values in enumerate(networks.T, start=1):
            theory *= layer_factor(float(variance))
            error = values.std(ddof=1) / math.sqrt(len(values))
            rows.append((variance, layer, values.mean(), error, theory, len(values)))
    columns = ["variance", "layer", "mean", "standard error", "theory", "networks"]
    return pd.DataFrame(rows, columns=columns)


def layer_factor(variance: float) -> float:
    """Compute E √(variance / n) χ_B with B ~ Binomial(n, 1/2) and n = `WIDTH`.

    The sign of a unit's input carries no information about the size of its derivative, so the
    derivatives of the active units are independent normal random variables.
    """
    sizes = (
        math.comb(WIDTH, k) * math.exp(math.lgamma((k + 1) / 2) - math.lgamma(k / 2))
        for k in range(1, WIDTH + 1)
    )
    return float(math.sqrt(2 * variance / WIDTH) * sum(sizes) / 2**WIDTH)


def _figure(table: pd.DataFrame) -> Figure:
    figure, axes = page_figure(2.8)
    for colour, (variance, label) in zip(COLOURS, VARIANCES.items(), strict=False):
        rows = table[table.variance == variance]
        axes.plot(rows.layer, rows.theory, color="0.6")
        axes.errorbar(
            rows.layer, rows["mean"], 2 * rows["standard error"], fmt="o", color=colour, label=label
        )
    axes.set(yscale="log", xlabel="layer", ylabel="length relative to the path")
    axes.axhline(1, color="0.8", linewidth=0.8)
    axes.legend()
    return figure
