"""Any network on straight segments: interpolated as closely as is asked, and so integrated.

A network that is not piecewise affine has no breakpoints. Its distance to the chord of a
segment still has integrals: the segment is cut into intervals, each is cut again where a
polynomial does not yet give the network's values, and the polynomials are integrated
exactly, the positive and the negative part by themselves. So a logit may cross its chord
anywhere at no cost, where a rule for the absolute value would have to close in on every
crossing of every logit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.polynomial import chebyshev
from numpy.typing import NDArray
from torch import Tensor, nn

from nlbench.errors import NotFinite, RequestError, Undefined, first_line
from nlbench.introspection.memory import (
    PointMemory,
    bytes_a_sample,
    halving,
    is_out_of_memory,
    share_out,
)
from nlbench.introspection.model_state import precise_device
from nlbench.introspection.precision import each_exact

from .recording.program import double_copy, is_same, run_alone
from .trace import SegmentEstimate, points_at

__all__ = [
    "DEGREE",
    "NODES",
    "BatchedNetwork",
    "Parts",
    "coefficients",
    "evaluate",
    "integrate_along",
    "parts",
    "smooth_estimate",
    "tail",
]


MOST = 64
"""Inputs at once."""
_SEVERAL = 5


@dataclass
class BatchedNetwork:
    """A network that is run in batches.

    Parameters
    ----------
    network : torch.nn.Module
    size : int
        Inputs at once; half as many from each time on that memory runs out.
    """

    network: nn.Module
    size: int

    @classmethod
    def of(cls, network: nn.Module, examples: Tensor, memory: int | None = None) -> BatchedNetwork:
        """Find the size of a batch.

        It is 1 for a network that gives an input another output when it comes with others.

        Parameters
        ----------
        network : torch.nn.Module
            In eval mode.
        examples : tensor of shape (m, *input)
            Two at least.
        memory : int, optional
            Bytes that may be used; by default half of what is free.

        Raises
        ------
        nlbench.RequestError, nlbench.NotFinite
            If the network can't be run on them, or the memory does not suffice for one.
        nlbench.Undefined
            If its output for one input changes from call to call.

        Examples
        --------
        >>> BatchedNetwork.of(torch.nn.Tanh(), torch.zeros(2, 3)).size
        64
        """
        alone = run_alone(network, examples)
        with torch.inference_mode():
            each = bytes_a_sample(network, examples[:1])
        _, size = share_out(PointMemory(each, each, 0, 0), examples.device, memory, MOST)
        # Among several: of two, some that mix samples give each what it has alone.
        most = min(max(size, 2), _SEVERAL)
        several = cls(network, most)
        try:
            together = several(examples[[0, *[1] * (most - 1)]])[:2]
        except RequestError:
            together = None
        alone = alone[:2].reshape(2, -1)
        if together is not None and is_same(together, alone, torch.float64):
            # Where no more fit, nothing is known of how more would do together.
            return cls(network, size if several.size == most else several.size)
        if not is_same(cls(network, 1)(examples[:2]), alone, torch.float64):
            raise Undefined(
                "the network's output for one input changes from call to call: it is no function "
                "of the input"
            )
        return cls(network, 1)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Give the outputs, (m, *input) to (m, k).

        Raises
        ------
        nlbench.RequestError
            If the network can't be run.
        nlbench.NotFinite
            If an output is not finite.
        """
        result, self.size = halving(
            lambda size: self._outputs(inputs, size), self.size, inputs.device
        )
        if not torch.isfinite(result).all():
            raise NotFinite("the network's output is not finite on the segment")
        return result

    def _outputs(self, inputs: Tensor, size: int) -> Tensor:
        outputs = []
        for batch in torch.split(inputs, size):
            try:
                with torch.inference_mode():
                    # A copy: the network may write into its input.
                    output = self.network(batch.clone())
                    outputs.append(output.reshape(len(batch), -1))
            except (RuntimeError, TypeError, IndexError, ValueError) as error:
                if is_out_of_memory(error):
                    raise
                reason = first_line(error)
                shape = tuple(batch.shape)
                raise RequestError(
                    f"the network can't be run on inputs of shape {shape}: {reason}"
                ) from error
        return torch.cat(outputs)


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


class Parts(NamedTuple):
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
    return Parts(*map(np.concatenate, zip(*blocks, strict=True)))


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


TOLERANCE = 1e-3
EVALUATIONS = 4096
_ROUNDING = 1e-12
_NARROWEST = 1e-12
_BESIDE = 0.31
"""A place between two nodes: there the interpolant is compared with the network."""
_A_CUT = 2 * DEGREE
"""Evaluations that cutting an interval takes."""
PROBES = 256
"""Places, one in each 256th of the segment, at which interpolants are compared with the network."""


@each_exact
def integrate_along(
    model: nn.Module,
    starts: Tensor,
    ends: Tensor,
    *,
    tolerance: float = TOLERANCE,
    evaluations: int = EVALUATIONS,
    refused: str = "",
    memory: int | None = None,
) -> Iterator[SegmentEstimate]:
    """Integrate a network's distance to its chord on one segment after another.

    Parameters
    ----------
    model : torch.nn.Module
        Run in eval mode and float64, as a copy on its own device.
    starts, ends : tensor of shape (n, *input)
    tolerance, evaluations
        See `smooth_estimate`.
    refused : str
        Why the segments have no breakpoints; kept in the traces.
    memory : int, optional
        Bytes that may be used; by default half of what is free.

    Yields
    ------
    SegmentEstimate

    Raises
    ------
    nlbench.RequestError
        If the network can't be run on the inputs or returns no tensor.
    nlbench.NotFinite
        If an output is not finite.

    Examples
    --------
    >>> x = torch.tensor([[-1.0], [1.0]])
    >>> [round(float(s.above + s.below), 6) for s in integrate_along(torch.nn.Tanh(), x, -x)]
    [0.052984, 0.052984]
    """
    network = double_copy(model)
    device = precise_device(network, starts)
    starts = starts.detach().to(device).double()
    ends = ends.detach().to(device).double()
    batches: BatchedNetwork | None = None
    for start, end in zip(starts, ends, strict=True):
        if batches is None:
            batches = BatchedNetwork.of(network, torch.stack([start, end]), memory)
        yield smooth_estimate(
            _on_segment(batches, start, end),
            float(torch.linalg.vector_norm(end - start)),
            tolerance=tolerance,
            evaluations=evaluations,
            refused=refused,
        )


def _on_segment(batches: BatchedNetwork, start: Tensor, end: Tensor) -> Callable[[Array], Array]:
    def function(t: Array) -> Array:
        places = torch.as_tensor(t, device=start.device)
        return np.asarray(batches(points_at(start, end, places)).cpu().numpy())

    return function


def smooth_estimate(
    function: Callable[[Array], Array],
    length: float = 1.0,
    *,
    tolerance: float = TOLERANCE,
    evaluations: int = EVALUATIONS,
    refused: str = "",
) -> SegmentEstimate:
    r"""Integrate the distance between a function on [0, 1] and its chord.

    Intervals are cut in halves until for every logit j the estimated error of
    :math:`\int_0^1 |f_j - g_j| dt` is within the tolerance, relative to the integral, or
    within 1e-12 of the logit's largest magnitude, where rounding ends. The estimate sums
    over intervals what the interpolant of degree 16 may leave out: the sizes of its last
    coefficients, or its distance to the function at places where no node has been, whichever
    is largest. Those are one in each interval, and, once that seems to be enough, one drawn in
    each 256th of [0, 1], the same for all functions and no two further apart than 1.5/256. What
    is wider than that is seen. Of something narrower, of width w, that lies between all nodes
    the chance to be missed is 1 - 256 w, at most.

    Parameters
    ----------
    function : callable
        From float64 array of shape (m,) to (m, k).
    length : float
        Kept in the trace.
    tolerance : float
        Above 0.
    evaluations : int
        Most values of the function. If they don't suffice, be it to compare, ``converged`` is
        false.
    refused : str
        Kept in the trace.

    Returns
    -------
    SegmentEstimate

    Examples
    --------
    >>> trace = smooth_estimate(lambda t: t[:, None] ** 2)
    >>> round(float(trace.below), 12), trace.evaluations, trace.converged
    (0.166666666667, 291, True)
    """
    if not 0 < tolerance < 1:
        raise RequestError(f"a tolerance of {tolerance}, expected more than 0 and less than 1")
    edges = np.array([0.0, 0.5, 1.0])
    at_edges = function(edges)
    chord = at_edges[[0, -1]]
    pieces = _Pieces.on(function, chord, edges[:-1], edges[1:], at_edges[:-1], at_edges[1:])
    used = len(edges) + _A_CUT
    beside: tuple[Array, Array] | None = None
    while True:
        size = np.maximum(np.abs(chord).max(0), np.abs(pieces.values).max((0, 1)))
        allowed = np.maximum(tolerance * (pieces.above + pieces.below).sum(0), _ROUNDING * size)
        error = pieces.error.sum(0)
        late = error > allowed
        if not late.any() and beside is None and used + PROBES <= evaluations:
            # An interpolant may agree with the function at all its nodes and miss what lies
            # between them.
            t = _probes()
            beside = t, function(t) - _line(chord, t)
            used += len(t)
            pieces = pieces.compared(*beside)
            continue
        if not late.any():
            break
        share = (pieces.error[:, late] / allowed[late]).max(1)
        share[pieces.right - pieces.left < _NARROWEST] = 0
        worst = np.argsort(-share)
        # One interval at least exceeds the mean.
        wanted = int((share > 0.5 / len(share)).sum())
        cut = worst[: min(wanted, (evaluations - used) // _A_CUT)]
        if not len(cut):
            break
        pieces = pieces.cut(function, cut)
        if beside is not None:
            pieces = pieces.compared(*beside)
        used += _A_CUT * len(cut)
    t, values = pieces.nodes()
    return SegmentEstimate(
        t=torch.from_numpy(t),
        values=torch.from_numpy(values),
        length=length,
        above=torch.from_numpy(pieces.above.sum(0)),
        below=torch.from_numpy(pieces.below.sum(0)),
        variation=torch.from_numpy(pieces.variation.sum(0)),
        deviation_error=torch.from_numpy(error),
        tolerance=tolerance,
        evaluations=used,
        converged=not late.any() and beside is not None,
        method="quadrature",
        refused=refused,
    )


class _Pieces(NamedTuple):
    """A segment in m intervals: (m,) their ends, (m, 17, k) values, (m, k) what comes of them."""

    chord: Array
    left: Array
    right: Array
    values: Array
    error: Array
    above: Array
    below: Array
    variation: Array

    @classmethod
    def on(
        cls,
        function: Callable[[Array], Array],
        chord: Array,
        left: Array,
        right: Array,
        at_left: Array,
        at_right: Array,
    ) -> _Pieces:
        """Evaluate a function inside intervals at whose ends it is known."""
        half = (right - left)[:, None] / 2
        x = np.append(NODES[1:-1], _BESIDE)
        t = left[:, None] + half * (1 + x)
        found = function(t.ravel()).reshape(*t.shape, -1)
        values = np.concatenate([at_left[:, None], found[:, :-1], at_right[:, None]], 1)
        c = _interpolants(left, right, values, chord)
        beside = found[:, -1] - _line(chord, t[:, -1])
        error = np.maximum(tail(c), np.abs(evaluate(c, _BESIDE) - beside))
        above, below, variation = parts(c)
        own = 2 * half * error, half * above, half * below, variation
        return cls(chord, left, right, values, *own)

    def cut(self, function: Callable[[Array], Array], which: NDArray[np.integer[Any]]) -> _Pieces:
        """Put two halves in the place of some intervals."""
        left, right = self.left[which], self.right[which]
        middle = (left + right) / 2
        first, second, third = self.values[which][:, [0, DEGREE // 2, DEGREE]].swapaxes(0, 1)
        halves = _Pieces.on(
            function,
            self.chord,
            np.concatenate([left, middle]),
            np.concatenate([middle, right]),
            np.concatenate([first, second]),
            np.concatenate([second, third]),
        )
        pairs = zip(self[1:], halves[1:], strict=True)
        joined = [np.concatenate([np.delete(old, which, 0), new]) for old, new in pairs]
        return _Pieces(self.chord, *joined)

    def compared(self, t: Array, values: Array) -> _Pieces:
        """Take in the distances (m, k) to the chord at other places t (m,)."""
        order = np.argsort(self.left)
        owner = order[np.searchsorted(self.left[order], t, side="right") - 1]
        left, width = self.left[owner], (self.right - self.left)[owner]
        c = _interpolants(self.left, self.right, self.values, self.chord)[:, owner]
        x = 2 * (t - left) / width - 1
        missed = width[:, None] * np.abs(evaluate(c, x[:, None]) - values)
        error = self.error.copy()
        np.maximum.at(error, owner, missed)
        return self._replace(error=error)

    def nodes(self) -> tuple[Array, Array]:
        """Where the function was interpolated, and its values there, from 0 to 1."""
        order = np.argsort(self.left)
        left, half = self.left[order, None], (self.right - self.left)[order, None] / 2
        t = (left + half * (1 + NODES))[:, :-1].ravel()
        values = self.values[order][:, :-1].reshape(len(t), -1)
        return np.append(t, 1.0), np.concatenate([values, self.values[order[-1:], -1]])


def _interpolants(left: Array, right: Array, values: Array, chord: Array) -> Array:
    """Coefficients of the distance to the chord on each interval."""
    nodes = left[:, None] + (right - left)[:, None] / 2 * (1 + NODES)
    return coefficients(values - _line(chord, nodes))


def _probes() -> Array:
    generator = np.random.Generator(np.random.Philox(PROBES))
    return np.asarray((np.arange(PROBES) + 0.25 + generator.random(PROBES) / 2) / PROBES)


def _line(chord: Array, t: Array) -> Array:
    """Values of the chord, from (2, k) at its ends."""
    return np.asarray(chord[0] + t[..., None] * (chord[1] - chord[0]))
