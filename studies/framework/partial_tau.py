"""Partial rank correlation within groups of networks, with its interval and p-value."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

from nlbench.parsers import unique

from .trends import SIGNIFICANCE

MIN_NETWORKS = 4

Array = NDArray[np.float64]
Group = tuple[ArrayLike, ArrayLike, Sequence[ArrayLike], Sequence[Hashable]]
"""Two variables, the controls and the cluster of each network, all of shape (n,)."""


@dataclass(frozen=True)
class Association:
    """Mean partial rank correlation over groups.

    Parameters
    ----------
    value, low, high : float
        The mean and its 95% interval.
    p : float
        Two-sided p-value for no association; 1 if there are too few clusters.
    by_group : tuple of float
        NaN for a group that was excluded.
    """

    value: float
    low: float
    high: float
    p: float
    by_group: tuple[float, ...]
    networks: int
    clusters: int


def _tau_with_influence(variables: Array) -> tuple[float, Array]:
    """Return the partial tau of two variables and its gradient with respect to network weights.

    All variables are replaced by normal scores Φ⁻¹(rank / (n + 1)), then the first two by their
    residuals from a linear regression on the others; tau is Kendall's tau-b of the residuals, and
    NaN if the controls determine a variable. It is invariant under increasing maps of any variable.
    Under a Gaussian copula it tends to 0 if the two are independent given the controls, whereas
    Kendall's partial coefficient retains part of the confounding. In small samples it is attenuated
    by noise in the ranks. For the gradient every weight is 1, and the residuals are constant.

    References
    ----------
    B. L. van der Waerden. Order tests for the two-sample problem. Indagationes Mathematicae, 1952.
    """
    ranks = stats.rankdata(variables, axis=-1)
    scores = special.ndtri(ranks / (ranks.shape[-1] + 1))
    design = np.stack([np.ones_like(scores[0]), *scores[2:]], -1)
    residuals = scores[:2] - scores[:2] @ (design @ np.linalg.pinv(design))
    # Number of decimals to which residual scores (of order 1) are rounded, to restore exact ties.
    residuals = np.round(residuals, 10)
    first, second = np.sign(residuals[:, :, None] - residuals[:, None])
    concordant = (first * second).sum(1)
    untied = np.abs(first).sum(1), np.abs(second).sum(1)
    pairs = untied[0].sum(), untied[1].sum()
    if not min(pairs):
        return math.nan, np.full(len(concordant), math.nan)
    scale = math.sqrt(pairs[0] * pairs[1])
    tau = float(concordant.sum() / scale)
    ties = untied[0] / pairs[0] + untied[1] / pairs[1]
    return tau, 2 * concordant / scale - tau * ties


def associate(groups: Sequence[Group]) -> Association:
    """Compute the mean partial tau over groups, with its interval and p-value.

    Networks in the same cluster may depend on each other, within and between groups. The interval
    and the p-value use the t distribution with one degree of freedom fewer than clusters. The
    standard error is cluster-robust, with a factor c / (c - 1 - controls) for the c clusters of a
    group, and no smaller than for independent networks without association. If a group has too few
    clusters for that factor, the interval is NaN and the p-value is 1.

    Networks with a non-finite value are excluded, as are groups with fewer than four networks or a
    constant variable.

    References
    ----------
    K.-Y. Liang, S. L. Zeger. Longitudinal data analysis using generalized linear models.
    Biometrika 73, 1986.

    Examples
    --------
    >>> x = np.arange(12.0)
    >>> associate([(x, x, [], range(12)), (x, -x, [], range(12))]).by_group
    (1.0, -1.0)
    """
    values = []
    influences = []
    labels = []
    null_variance = 0.0
    has_interval = True
    for x, y, controls, clusters in groups:
        variables = np.array([x, y, *controls], dtype=np.float64)
        finite = np.flatnonzero(np.isfinite(variables).all(0))
        value = math.nan
        influence = np.empty(0)
        if len(finite) >= MIN_NETWORKS:
            value, influence = _tau_with_influence(variables[:, finite])
        values.append(value)
        if math.isnan(value):
            continue
        group_labels = [clusters[place] for place in finite.tolist()]
        labels += group_labels
        count = len(set(group_labels))
        spare = count - 1 - len(controls)
        has_interval &= spare > 0
        influences.append(influence * math.sqrt(count / max(spare, 1)))
        # Kendall's variance, with the degrees of freedom reduced by the controls.
        freedom = max(len(finite) - len(controls), 2)
        null_variance += 2 * (2 * freedom + 5) / (9 * freedom * (freedom - 1))
    mean = float(np.nanmean(values)) if labels else math.nan
    low = math.nan
    high = math.nan
    p = 1.0
    places = {label: place for place, label in enumerate(unique(labels))}
    if labels and has_interval:
        by_cluster = np.bincount([places[label] for label in labels], np.concatenate(influences))
        error = math.sqrt(max((by_cluster**2).sum(), null_variance)) / len(influences)
        student = stats.t(len(places) - 1)
        half = float(student.ppf(1 - SIGNIFICANCE / 2)) * error
        low, high = max(mean - half, -1.0), min(mean + half, 1.0)
        p = float(2 * student.sf(abs(mean) / error))
    return Association(mean, low, high, p, tuple(values), len(labels), len(places))
