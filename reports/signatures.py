"""Comparison of signatures: distances and dendrogram."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

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


def dtw_distances(signatures: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """Compute the dynamic-time-warping distance (n, n) between all pairs of signatures (d_i,).

    This is the square root of the minimum sum of squared differences over all monotone alignments,
    as in `nlbench.Signature.dtw`, but for all pairs at once.

    References
    ----------
    H. Sakoe, S. Chiba, "Dynamic programming algorithm optimization for spoken word
    recognition", IEEE Transactions on Acoustics, Speech, and Signal Processing 26, 1978.

    Examples
    --------
    >>> dtw_distances([[0.0, 1.0], [0.0, 1.0, 1.0], [0.0, 3.0]]).tolist()
    [[0.0, 0.0, 2.0], [0.0, 0.0, 2.23606797749979], [2.0, 2.23606797749979, 0.0]]
    """
    values = [np.asarray(signature, dtype=np.float64) for signature in signatures]
    lengths = np.array([len(signature) for signature in values])
    n = len(values)
    longest = int(lengths.max(initial=1))
    # Entries of the recursion depend only on earlier ones, so padding changes nothing: each pair's
    # distance is read at the ends of its two signatures.
    padded = np.zeros((n, longest))
    for position, signature in enumerate(values):
        padded[position, : len(signature)] = signature
    first, second = np.triu_indices(n, 1)
    squares = np.zeros(len(first))
    previous = np.full((longest + 1, len(first)), np.inf)
    previous[0] = 0.0
    for i in range(longest):
        row = np.full_like(previous, np.inf)
        for j in range(longest):
            step = (padded[first, i] - padded[second, j]) ** 2
            row[j + 1] = step + np.minimum(np.minimum(previous[j], previous[j + 1]), row[j])
        ends = np.nonzero(lengths[first] == i + 1)[0]
        squares[ends] = row[lengths[second[ends]], ends]
        previous = row
    distances = np.zeros((n, n))
    distances[first, second] = distances[second, first] = np.sqrt(squares)
    return distances


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
