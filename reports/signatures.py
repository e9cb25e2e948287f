"""Signatures compared: how far apart networks are, which belong together, and a map of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from .leaderboard import Row
from .tables import Scores

__all__ = [
    "MOST",
    "SignatureComparison",
    "compare_signatures",
    "dtw_distances",
    "plane",
    "signature_maps",
]

MOST = 80
"""Networks of a heatmap: beyond, its rows can't be read."""


@dataclass(frozen=True)
class SignatureComparison:
    """Distances between signatures, and what they show.

    Parameters
    ----------
    distances : array of shape (n, n)
    merges : array of shape (n - 1, 4)
        Average linkage, as scipy writes it: the two clusters, their distance, their size.
    order : tuple of int
        Leaves of the dendrogram from left to right.
    points : array of shape (n, 2)
        A map whose distances are near the signatures' (classical scaling).
    """

    distances: NDArray[np.float64]
    merges: NDArray[np.float64]
    order: tuple[int, ...]
    points: NDArray[np.float64]


def dtw_distances(signatures: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """Dynamic-time-warping distance of each pair of signatures.

    The square root of the least sum of squared differences over all ways of walking through
    both in order, in which a site may be matched with several: the distance of
    `nlbench.Signature.dtw`, for all pairs at once.

    Parameters
    ----------
    signatures : sequence of arrays of shape (d_i,)
        At least one number each.

    Returns
    -------
    array of shape (n, n)

    References
    ----------
    H. Sakoe, S. Chiba, "Dynamic programming algorithm optimization for spoken word
    recognition", IEEE Transactions on Acoustics, Speech, and Signal Processing 26, 1978.

    Examples
    --------
    >>> dtw_distances([[0.0, 1.0], [0.0, 1.0, 1.0], [0.0, 3.0]]).tolist()
    [[0.0, 0.0, 2.0], [0.0, 0.0, 2.23606797749979], [2.0, 2.23606797749979, 0.0]]
    """
    values = [np.asarray(one, dtype=np.float64) for one in signatures]
    lengths = np.array([len(one) for one in values])
    n, longest = len(values), int(lengths.max(initial=1))
    # A cell of the recursion depends on earlier ones alone: behind its end a signature may hold
    # anything, and each pair's distance is read off at its own two ends.
    padded = np.zeros((n, longest))
    for place, one in enumerate(values):
        padded[place, : len(one)] = one
    first, second = np.triu_indices(n, 1)
    found = np.zeros(len(first))
    before = np.full((longest + 1, len(first)), np.inf)
    before[0] = 0.0
    for i in range(longest):
        row = np.full_like(before, np.inf)
        for j in range(longest):
            step = (padded[first, i] - padded[second, j]) ** 2
            row[j + 1] = step + np.minimum(np.minimum(before[j], before[j + 1]), row[j])
        ends = np.nonzero(lengths[first] == i + 1)[0]
        found[ends] = row[lengths[second[ends]], ends]
        before = row
    distances = np.zeros((n, n))
    distances[first, second] = distances[second, first] = np.sqrt(found)
    return distances


def plane(distances: ArrayLike) -> NDArray[np.float64]:
    """Lay points out in the plane so that their distances are near the given ones.

    Parameters
    ----------
    distances : array of shape (n, n)

    Returns
    -------
    array of shape (n, 2)

    References
    ----------
    W. S. Torgerson, "Multidimensional scaling: I. Theory and method", Psychometrika 17, 1952.

    Examples
    --------
    >>> points = plane([[0.0, 3.0, 4.0], [3.0, 0.0, 5.0], [4.0, 5.0, 0.0]])
    >>> bool(np.isclose(np.linalg.norm(points[1] - points[2]), 5.0))
    True
    """
    squares = np.asarray(distances, dtype=np.float64) ** 2
    n = len(squares)
    centre = np.eye(n) - 1 / n
    values, vectors = np.linalg.eigh(-0.5 * centre @ squares @ centre)
    points = np.zeros((n, 2))
    for column, which in enumerate(range(n - 1, max(-1, n - 3), -1)):
        vector = vectors[:, which]
        # An eigenvector's sign is nobody's choice: the largest entry is made positive.
        vector = vector * np.sign(vector[np.abs(vector).argmax()] or 1.0)
        points[:, column] = vector * np.sqrt(max(0.0, float(values[which])))
    return points


def compare_signatures(signatures: Sequence[ArrayLike]) -> SignatureComparison:
    """Work out distances, dendrogram and map of at least two signatures."""
    distances = dtw_distances(signatures)
    merges = linkage(squareform(distances, checks=False), "average", optimal_ordering=True)
    order = tuple(int(leaf) for leaf in leaves_list(merges))
    return SignatureComparison(distances, merges, order, plane(distances))


def signature_maps(
    rows: Sequence[Row], scores: Scores, measures: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Compare the signatures of a leaderboard's networks by each measure of activations.

    Returns
    -------
    dict
        By measure, as plain values: ``rows`` (positions on the leaderboard), ``distances``
        (the lower triangle, line by line), ``merges``, ``order`` and ``points``. Measures by
        which fewer than three networks have a signature are left out; of a network with several
        seeds the first is taken; the first `MOST` networks.
    """
    found = {}
    for name in scores.measures:
        if measures.get(name, {}).get("probe") != "sites":
            continue
        signatures = {
            index: scores[row.subjects[0].label, name].place_values
            for index, row in enumerate(rows)
        }
        kept = [index for index, values in signatures.items() if len(values)][:MOST]
        if len(kept) < 3:
            continue
        compared = compare_signatures([signatures[index] for index in kept])
        found[name] = {
            "rows": kept,
            "distances": [
                [float(f"{compared.distances[i, j]:.5g}") for j in range(i)]
                for i in range(len(kept))
            ],
            "merges": [[int(a), int(b), float(f"{d:.5g}")] for a, b, d, _ in compared.merges],
            "order": list(compared.order),
            "points": [[float(f"{x:.5g}") for x in point] for point in compared.points],
        }
    return found
