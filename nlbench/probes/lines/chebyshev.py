"""Functions of one variable as Chebyshev interpolants, and their integrals without quadrature.

On an interval a smooth function is close to the polynomial of degree 16 through its values
at the Chebyshev points. Where that polynomial is positive, where negative, and how far it
moves are then questions about a polynomial, which need no more values of the function.

All arrays are float64 and the interval is [-1, 1]; axes are m intervals and k functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.polynomial import chebyshev
from numpy.typing import NDArray

__all__ = ["DEGREE", "NODES", "Parts", "coefficients", "evaluate", "parts", "tail"]


Array = NDArray[np.floating[Any]]

DEGREE = 16
NODES: Array = chebyshev.chebpts2(DEGREE + 1)
"""Increasing, both ends included; the middle one is 0."""

_CELLS = 2 * DEGREE
_GRID: Array = chebyshev.chebpts2(_CELLS + 1)
_FROM_VALUES: Array = np.linalg.inv(chebyshev.chebvander(NODES, DEGREE))
_LATE = 2 * DEGREE // 3 + 1
_HALVINGS = 40
_BLOCK = 2**21  # numbers worked on at once


@dataclass(frozen=True)
class Parts:
    """What there is to know of functions on their intervals.

    Parameters
    ----------
    above, below : float64 array of shape (m, k)
        Integrals over [-1, 1] of the positive part and of the negative part, both positive.
    variation : float64 array of shape (m, k)
        Total variation.
    """

    above: Array
    below: Array
    variation: Array


def coefficients(values: Array) -> Array:
    """Interpolate values at the Chebyshev points.

    Parameters
    ----------
    values : array of shape (m, 17, k)
        At `NODES`.

    Returns
    -------
    array of shape (17, m, k)
        Coefficients of the Chebyshev polynomials, lowest degree first.

    Examples
    --------
    >>> c = coefficients(NODES[None, :, None] ** 2)
    >>> np.abs(c[:4, 0, 0]).round(12).tolist()
    [0.5, 0.0, 0.5, 0.0]
    """
    return np.asarray(np.einsum("dn,mnk->dmk", _FROM_VALUES, values))


def evaluate(c: Array, x: float | Array) -> Array:
    """Give the interpolants' values (m, k) at one place, or at one of its own each, (m, 1)."""
    return np.asarray(chebyshev.chebval(x, c, tensor=False))


def tail(c: Array) -> Array:
    """Sum the sizes of the last third of the coefficients: (m, k).

    What an interpolant leaves out is less than this wherever coefficients decay, be it
    geometrically (analytic functions) or as slowly as at a bend (Trefethen, "Approximation
    Theory and Approximation Practice", 2013, chapters 7 and 8).
    """
    return np.asarray(np.abs(c[_LATE:]).sum(0))


def parts(c: Array) -> Parts:
    """Integrate the positive and the negative part of interpolants, and their variation.

    Each interval is cut at a grid, at inflections and at turning points, so that the polynomial is
    monotone on each piece and changes sign there at most once.

    Parameters
    ----------
    c : array of shape (17, m, k)
        See `coefficients`.

    Examples
    --------
    >>> found = parts(coefficients(NODES[None, :, None] ** 3))
    >>> [round(float(x[0, 0]), 12) for x in (found.above, found.below, found.variation)]
    [0.25, 0.25, 2.0]
    """
    count = max(1, _BLOCK // (4 * _CELLS * c.shape[2] + 1))
    blocks = [_parts(c[:, i : i + count]) for i in range(0, c.shape[1], count)]
    return Parts(
        np.concatenate([block.above for block in blocks]),
        np.concatenate([block.below for block in blocks]),
        np.concatenate([block.variation for block in blocks]),
    )


def _parts(c: Array) -> Parts:
    points: Array = np.broadcast_to(_GRID[:, None, None], (_CELLS + 1, *c.shape[1:]))
    # Between inflections the slope is monotone: two turning points in one cell are both found.
    for order in (2, 1):
        points = _interleaved(points, _roots(chebyshev.chebder(c, order, axis=0), points))
    values = chebyshev.chebval(points, c, tensor=False)
    integral = chebyshev.chebint(c, axis=0)
    until = chebyshev.chebval(points, integral, tensor=False)
    until_cut = chebyshev.chebval(_roots(c, points), integral, tensor=False)
    areas = np.stack([until_cut - until[:-1], until[1:] - until_cut])
    return Parts(
        np.maximum(areas, 0).sum((0, 1)),
        np.maximum(-areas, 0).sum((0, 1)),
        np.abs(np.diff(values, axis=0)).sum(0),
    )


def _interleaved(points: Array, between: Array) -> Array:
    joined = np.empty((len(points) + len(between), *points.shape[1:]))
    joined[::2], joined[1::2] = points, between
    return joined


def _roots(c: Array, points: Array) -> Array:
    """Zero of each polynomial between neighbouring points where it changes sign, else the middle.

    Parameters
    ----------
    c : array of shape (d, m, k)
    points : array of shape (p + 1, m, k)

    Returns
    -------
    array of shape (p, m, k)
    """
    left, right = points[:-1], points[1:]
    found = (left + right) / 2
    signs = np.sign(chebyshev.chebval(points, c, tensor=False))
    where = np.nonzero(signs[:-1] * signs[1:] < 0)
    if not len(where[0]):
        return np.asarray(found)
    a, b, sign, mine = left[where], right[where], signs[:-1][where], c[:, where[1], where[2]]
    for _ in range(_HALVINGS):
        middle = (a + b) / 2
        before = np.sign(chebyshev.chebval(middle, mine, tensor=False)) == sign
        a, b = np.where(before, middle, a), np.where(before, b, middle)
    found[where] = (a + b) / 2
    return np.asarray(found)
