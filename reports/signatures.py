"""Comparison of signatures: distances and dendrogram."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nlbench.store.signature import dtw_distances

from .leaderboard import Row
from .tables import Scores

MIN_NETWORKS = 4
MAX_NETWORKS = 80
"""Numbers of networks in a heatmap; with more, the rows would be unreadable."""


@dataclass(frozen=True)
class SignatureComparison:
    """Distances between signatures and their clustering.

    Parameters
    ----------
    distances : array of shape (n, n)
    merges : array of shape (n - 1, 4)
        Average linkage in SciPy's format: the two clusters, their distance and their joint size.
    order : tuple of int
        Leaves of the dendrogram from left to right.
    """

    distances: NDArray[np.float64]
    merges: NDArray[np.float64]
    order: tuple[int, ...]


def compare_signatures(signatures: Sequence[ArrayLike]) -> SignatureComparison:
    """Compute the distances and the dendrogram of at least two signatures."""
    distances = dtw_distances(signatures)
    # Imported here, since pages of a single network don't need it.
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    merges = linkage(squareform(distances, checks=False), "average", optimal_ordering=True)
    order = tuple(int(leaf) for leaf in leaves_list(merges))
    return SignatureComparison(distances, merges, order)


def signature_maps(rows: Sequence[Row], scores: Scores) -> dict[str, dict[str, Any]]:
    """Compare the signatures of a leaderboard's networks for each measure of activations.

    The JSON-compatible values are ``rows`` (indices in the leaderboard), ``distances`` (the lower
    triangle, row by row), ``merges`` and ``order``, for the first `MAX_NETWORKS` networks and the
    first seed of each. Measures with fewer than `MIN_NETWORKS` signatures are omitted.
    """
    maps = {}
    for name, info in scores.measures.items():
        if info.probe != "sites":
            continue
        signatures = {
            index: scores[row.subjects[0].label, name].place_values
            for index, row in enumerate(rows)
        }
        drawn = [index for index, values in signatures.items() if len(values)][:MAX_NETWORKS]
        if len(drawn) < MIN_NETWORKS:
            continue
        compared = compare_signatures([signatures[index] for index in drawn])
        distances = []
        for i in range(len(drawn)):
            distances.append([float(f"{distance:.5g}") for distance in compared.distances[i, :i]])
        maps[name] = {
            "rows": drawn,
            "distances": distances,
            "merges": [[int(a), int(b), float(f"{d:.5g}")] for a, b, d, _ in compared.merges],
            "order": list(compared.order),
        }
    return maps
