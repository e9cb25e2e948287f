"""Classical multidimensional scaling."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def scale_to_plane(distances: ArrayLike) -> NDArray[np.float64]:
    """Place points in the plane by classical multidimensional scaling.

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
    >>> points = scale_to_plane([[0.0, 3.0, 4.0], [3.0, 0.0, 5.0], [4.0, 5.0, 0.0]])
    >>> bool(np.isclose(np.linalg.norm(points[1] - points[2]), 5.0))
    True
    """
    squares = np.asarray(distances, dtype=np.float64) ** 2
    n = len(squares)
    centre = np.eye(n) - 1 / n
    values, vectors = np.linalg.eigh(-0.5 * centre @ squares @ centre)
    points = np.zeros((n, 2))
    for column, index in enumerate(range(n - 1, max(-1, n - 3), -1)):
        vector = vectors[:, index]
        # The sign of an eigenvector is arbitrary: make its largest entry positive.
        vector = vector * np.sign(vector[np.abs(vector).argmax()] or 1.0)
        points[:, column] = vector * np.sqrt(max(0.0, float(values[index])))
    return points
