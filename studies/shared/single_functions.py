"""Settings, recorded scores and theoretical scores for single activations."""

from __future__ import annotations

import math

import pandas as pd

from nlbench.store.run import Run

PUBLISHED_NORMAL_SCORES = {
    "sigmoid": 0.91,
    "tanh": 0.81,
    "hardtanh": 0.78,
    "hardswish": 0.70,
    "silu": 0.67,
    "leaky-relu": 0.63,
    "relu": 0.62,
    "relu6": 0.62,
    "gelu": 0.61,
}
"""Scores of activations on many independent, normally distributed inputs, from the slides."""
PAPER_ACTIVATIONS = tuple(PUBLISHED_NORMAL_SCORES)
"""Activations in the paper.

The model for each is ``functions/NAME``.
"""


def one_batch(samples: int, shrinkage: str = "none") -> dict[str, str | int]:
    """Return settings for computing a single score from all samples."""
    return {"affinity.shrinkage": shrinkage, "sites.batch": samples}


def summary_values(run: Run) -> pd.DataFrame:
    """Read the affinity of each cell.

    Returns
    -------
    DataFrame
        One row per cell with the columns ``function`` (the model's name without its family),
        ``data``, ``seed``, ``value`` (NaN if undefined) and ``reason``.
    """
    rows = [
        (
            record.subject.model.removeprefix("functions/"),
            record.subject.data,
            record.subject.seed,
            float(record.result.summary.get("value", math.nan)),
            record.result.reason,
        )
        for record in run.records
        if record.measure.name == "affinity"
    ]
    return pd.DataFrame(rows, columns=["function", "data", "seed", "value", "reason"])


def correlation_score(r: float) -> float:
    """Compute the affinity 1 - √(1 - r) of a map that optimal transport matches pointwise.

    In one dimension this holds for every increasing map. In many independent dimensions it holds
    for every map, because each point is nearest to its own image. r is the correlation between x
    and y; if T scales var x to var y, W2² = 2 var(y) (1 - r).

    Examples
    --------
    >>> correlation_score(0.84)
    0.6
    """
    return 1 - math.sqrt(max(0.0, 1 - r))


def normal_score(function: str) -> float:
    """Compute the affinity of an activation on many independent standard normal inputs.

    Examples
    --------
    >>> round(normal_score("relu"), 4)
    0.6211
    """
    import torch

    from nlbench.studies.networks.functions import ACTIVATIONS

    x = torch.linspace(-12, 12, 48_001, dtype=torch.float64)
    density = (-x.square() / 2).exp()
    density /= density.sum()
    y = getattr(torch.nn, ACTIVATIONS[function])()(x)
    y = y - density @ y
    return correlation_score(float(density @ (x * y) / (density @ y.square()).sqrt()))


def relu_on_uniform(low: float, high: float) -> tuple[float, float, float]:
    """Compute the affinity of ReLU on the uniform distribution on an interval containing 0.

    Returns the transport distance, its bound √(2 var y), and the score.

    Examples
    --------
    >>> [round(each, 4) for each in relu_on_uniform(-1, 1)]
    [0.1483, 0.4564, 0.6751]
    """
    length = high - low
    middle = (high + low) / 2
    mean = high**2 / 2 / length
    square = high**3 / 3 / length
    # x y = y², since y is x or 0.
    covariance = square - middle * mean
    variance = square - mean**2
    score = correlation_score(covariance / math.sqrt(variance * length**2 / 12))
    bound = math.sqrt(2 * variance)
    return (1 - score) * bound, bound, score
