"""Adaptive quadrature of a network's distance to its chord on a segment.

A network that is not piecewise affine has no breakpoints, but its distance to the chord can be
integrated. The segment is divided into intervals, which are halved until a polynomial approximates
the network on each. The polynomials are integrated exactly, with positive and negative parts
separate. Crossings of the chord therefore cost nothing extra, whereas quadrature of the absolute
value would have to refine around each crossing of each logit.
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
from nlbench.introspection.memory import bytes_per_sample, halve_on_oom, is_out_of_memory
from nlbench.introspection.model_copy import double_copy, precise_device
from nlbench.introspection.precision import each_exact

from .recording.agreement import is_same, run_alone
from .recording.point_memory import PointMemory, share_out
from .segments import points_at
from .trace import SegmentEstimate

Array = NDArray[np.floating[Any]]

DEGREE = 16
NODES: Array = chebyshev.chebpts2(DEGREE + 1)
"""Chebyshev points in increasing order, both ends included; the middle one is 0."""

_CELLS = 2 * DEGREE
_GRID: Array = chebyshev.chebpts2(_CELLS + 1)
_VALUES_TO_COEFFICIENTS: Array = np.linalg.inv(chebyshev.chebvander(NODES, DEGREE))
_TAIL_START = 2 * DEGREE // 3 + 1
_BLOCK_SIZE = 2**21
"""Number of elements processed at a time."""


class IntervalIntegrals(NamedTuple):
    """Integrals of interpolants over their intervals."""

    # above, below: float64 (m, k): integrals over [-1, 1] of the positive and negative parts, both
    # non-negative
    above: Array
    below: Array
    variation: Array  # float64 (m, k): total variation


def coefficients(values: Array) -> Array:
    """Compute Chebyshev coefficients (17, m, k), lowest first, of values (m, 17, k) at `NODES`.

    Examples
    --------
    >>> c = coefficients(NODES[None, :, None] ** 2)
    >>> np.abs(c[:4, 0, 0]).round(12).tolist()
    [0.5, 0.0, 0.5, 0.0]
    """
    return np.asarray(np.einsum("dn,mnk->dmk", _VALUES_TO_COEFFICIENTS, values))


def evaluate(c: Array, x: float | Array) -> Array:
    """Evaluate interpolants (m, k) at one x, or at one x per interval, (m, 1)."""
    return np.asarray(chebyshev.chebval(x, c, tensor=False))


def tail(c: Array) -> Array:
    """Sum the magnitudes of the last third of the coefficients: (m, k).

    The error of an interpolant is smaller than this sum if its coefficients decay, geometrically
    (analytic functions) or as slowly as those of a function with a kink (Trefethen, "Approximation
    Theory and Approximation Practice", 2013, chapters 7 and 8).
    """
    return np.asarray(np.abs(c[_TAIL_START:]).sum(0))


def integrate_parts(c: Array) -> IntervalIntegrals:
    """Integrate the positive and negative parts of interpolants, and compute their variation.

    Each interval is divided at grid points, inflections and turning points. On each part the
    polynomial is monotone, so it changes sign at most once.

    Examples
    --------
    >>> cubic = integrate_parts(coefficients(NODES[None, :, None] ** 3))
    >>> [round(float(x[0, 0]), 12) for x in (cubic.above, cubic.below, cubic.variation)]
    [0.25, 0.25, 2.0]
    """
    count = max(1, _BLOCK_SIZE // (4 * _CELLS * c.shape[2] + 1))
    blocks = [_integrate_block(c[:, i : i + count]) for i in range(0, c.shape[1], count)]
    return IntervalIntegrals(*map(np.concatenate, zip(*blocks, strict=True)))


def _integrate_block(c: Array) -> IntervalIntegrals:
    points: Array = np.broadcast_to(_GRID[:, None, None], (_CELLS + 1, *c.shape[1:]))
    # Between inflections the slope is monotone, so no turning point is missed.
    for order in (2, 1):
        roots = _roots(chebyshev.chebder(c, order, axis=0), points)
        points = np.insert(points, range(1, len(points)), roots, axis=0)
    values = chebyshev.chebval(points, c, tensor=False)
    integral = chebyshev.chebint(c, axis=0)
    at_points = chebyshev.chebval(points, integral, tensor=False)
    at_roots = chebyshev.chebval(_roots(c, points), integral, tensor=False)
    areas = np.stack([at_roots - at_points[:-1], at_points[1:] - at_roots])
    return IntervalIntegrals(
        np.maximum(areas, 0).sum((0, 1)),
        np.maximum(-areas, 0).sum((0, 1)),
        np.abs(np.diff(values, axis=0)).sum(0),
    )


def _roots(c: Array, points: Array) -> Array:
    """Return each polynomial's zero between points where its sign changes, otherwise the midpoint.

    The polynomials are (d, m, k), the points (p + 1, m, k) and the zeros (p, m, k).
    """
    left, right = points[:-1], points[1:]
    roots = (left + right) / 2
    signs = np.sign(chebyshev.chebval(points, c, tensor=False))
    where = np.nonzero(signs[:-1] * signs[1:] < 0)
    if not len(where[0]):
        return np.asarray(roots)
    a = left[where]
    b = right[where]
    sign = signs[:-1][where]
    changing = c[:, where[1], where[2]]
    for _ in range(40):
        middle = (a + b) / 2
        is_before = np.sign(chebyshev.chebval(middle, changing, tensor=False)) == sign
        a = np.where(is_before, middle, a)
        b = np.where(is_before, b, middle)
    roots[where] = (a + b) / 2
    return np.asarray(roots)


DEFAULT_TOLERANCE = 2e-3
DEFAULT_EVALUATIONS = 4096
RELATIVE_ROUNDING = 1e-12
"""Error, relative to a logit's largest magnitude, below which rounding dominates."""
MIN_WIDTH = 1e-12
"""Width below which an interval is not halved."""
CHECK_NODE = 0.31
"""Point in [-1, 1] between two nodes, where an interpolant is compared with the network."""
EVALUATIONS_PER_CUT = 2 * DEGREE
CHECK_PLACES = 256
"""Number of check points, one in each 256th of the segment, in addition to `CHECK_NODE`."""


@each_exact
def integrate_along(
    model: nn.Module,
    starts: Tensor,
    ends: Tensor,
    *,
    tolerance: float = DEFAULT_TOLERANCE,
    evaluations: int = DEFAULT_EVALUATIONS,
    refused: str = "",
    memory: int | None = None,
) -> Iterator[SegmentEstimate]:
    """Integrate the distance to the chord along segments of a network, in float64, in eval mode.

    `refused` is the reason why there are no breakpoints, which the estimates report.

    Examples
    --------
    >>> x = torch.tensor([[-1.0], [1.0]])
    >>> [round(float(s.above + s.below), 6) for s in integrate_along(torch.nn.Tanh(), x, -x)]
    [0.052984, 0.052984]
    """
    network = double_copy(model, torch.stack([starts[0], ends[0]]) if len(starts) else None)
    device = precise_device(network, starts)
    starts = starts.detach().to(device).double()
    ends = ends.detach().to(device).double()
    # On every segment, since whether a network mixes samples may depend on them.
    t = torch.linspace(0, 1, EVALUATIONS_PER_CUT + 1, dtype=torch.float64, device=device)
    for start, end in zip(starts, ends, strict=True):
        batches = BatchedNetwork.of(network, points_at(start, end, t), memory)
        yield smooth_estimate(
            _restrict_to_segment(batches, start, end),
            float(torch.linalg.vector_norm(end - start)),
            tolerance=tolerance,
            evaluations=evaluations,
            refused=refused,
        )


@dataclass
class BatchedNetwork:
    """A network that is run in batches."""

    network: nn.Module
    size: int  # batch size, halved each time memory runs out

    @classmethod
    def of(cls, network: nn.Module, examples: Tensor, memory: int | None = None) -> BatchedNetwork:
        """Determine the batch size: 1 for a network that mixes the samples in a batch.

        There are at least two examples, such as those that will be run together.

        Examples
        --------
        >>> BatchedNetwork.of(torch.nn.Tanh(), torch.zeros(2, 3)).size
        64
        """
        alone = run_alone(network, examples)
        with torch.no_grad():
            sample_bytes = bytes_per_sample(network, examples[:1])
        needs = PointMemory(sample_bytes, sample_bytes, 0, 0)
        _, size = share_out(needs, examples.device, memory, 64)
        alone = alone.reshape(len(alone), -1)
        if not is_same(cls(network, 1)(examples), alone, torch.float64):
            raise Undefined(
                "the network's output for one input changes from call to call: it is not a "
                "function of the input"
            )
        # On two samples, some networks that mix samples still compute each output correctly.
        # Maximum size of the batch used to check whether a network mixes samples.
        checked = min(max(size, 2), 5)
        batched = cls(network, checked)
        pair = [0, *[1] * (checked - 1)]
        if not batched._reproduces(examples[pair], alone[pair]):
            return cls(network, 1)
        # If memory ran out, larger batches have not been checked.
        batched.size = size if batched.size == checked else batched.size
        # A network may decide for a batch as a whole, so the examples are run as one batch.
        return batched if batched._reproduces(examples, alone) else cls(network, 1)

    def _reproduces(self, inputs: Tensor, expected: Tensor) -> bool:
        try:
            return is_same(self(inputs), expected, torch.float64)
        except RequestError:
            return False

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the outputs (m, k) for inputs (m, *input)."""
        result, self.size = halve_on_oom(
            lambda size: self._outputs(inputs, size), self.size, inputs.device
        )
        if not torch.isfinite(result).all():
            raise NotFinite("the network's output is not finite on the segment")
        return result

    def _outputs(self, inputs: Tensor, size: int) -> Tensor:
        outputs = []
        for batch in torch.split(inputs, size):
            try:
                with torch.no_grad():
                    # The network may modify its input in place.
                    output = self.network(batch.clone())
                    outputs.append(output.detach().reshape(len(batch), -1))
            except (RuntimeError, TypeError, IndexError, ValueError) as error:
                if is_out_of_memory(error):
                    raise
                reason = first_line(error)
                shape = tuple(batch.shape)
                raise RequestError(
                    f"the network can't be run on inputs of shape {shape}: {reason}"
                ) from error
        return torch.cat(outputs)


def _restrict_to_segment(
    batches: BatchedNetwork, start: Tensor, end: Tensor
) -> Callable[[Array], Array]:
    def function(t: Array) -> Array:
        places = torch.as_tensor(t, device=start.device)
        return np.asarray(batches(points_at(start, end, places)).cpu().numpy())

    return function


def smooth_estimate(
    function: Callable[[Array], Array],
    length: float = 1.0,
    *,
    tolerance: float = DEFAULT_TOLERANCE,
    evaluations: int = DEFAULT_EVALUATIONS,
    refused: str = "",
) -> SegmentEstimate:
    r"""Integrate the distance between a function on [0, 1], (m,) to (m, k), and its chord.

    Intervals are halved until, for every logit j, the estimated error of :math:`\int_0^1 |f_j -
    g_j| dt` is within the tolerance, relative to the integral, or within 1e-12 of the logit's
    largest magnitude, where rounding dominates. The estimate adds up the errors of the interpolants
    of degree 16: the magnitudes of the last coefficients or, if larger, the distance to the
    function at check points between the nodes. There is one check point in each interval and, once
    the error is within the tolerance, a random one in each 256th of [0, 1], the same for all
    functions. Neighbouring check points are at most 1.5/256 apart, so wider features are found. A
    feature of smaller width w that lies between nodes is missed with a probability of at most 1 -
    256 w. If `evaluations`, those at check points included, are not enough, ``converged`` is False.

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
    intervals = _Intervals.evaluate(
        function, chord, edges[:-1], edges[1:], at_edges[:-1], at_edges[1:]
    )
    used = len(edges) + EVALUATIONS_PER_CUT
    checks: tuple[Array, Array] | None = None
    while True:
        size = np.maximum(np.abs(chord).max(0), np.abs(intervals.values).max((0, 1)))
        deviation = (intervals.above + intervals.below).sum(0)
        allowed = np.maximum(tolerance * deviation, RELATIVE_ROUNDING * size)
        error = intervals.error.sum(0)
        exceeds = error > allowed
        if not exceeds.any() and checks is None and used + CHECK_PLACES <= evaluations:
            # An interpolant may agree with the function at all nodes and miss a feature in between.
            t = _check_places()
            checks = t, function(t) - _line(chord, t)
            used += len(t)
            intervals = intervals.update_errors(*checks)
            continue
        if not exceeds.any():
            break
        fraction = (intervals.error[:, exceeds] / allowed[exceeds]).max(1)
        fraction[intervals.right - intervals.left < MIN_WIDTH] = 0
        worst = np.argsort(-fraction)
        # At least one interval exceeds the mean.
        inaccurate = int((fraction > 0.5 / len(fraction)).sum())
        affordable = max(evaluations - used, 0) // EVALUATIONS_PER_CUT
        cut = worst[: min(inaccurate, affordable)]
        if not len(cut):
            break
        intervals = intervals.cut(function, cut)
        if checks is not None:
            intervals = intervals.update_errors(*checks)
        used += EVALUATIONS_PER_CUT * len(cut)
    t, values = intervals.nodes()
    return SegmentEstimate(
        t=torch.from_numpy(t),
        values=torch.from_numpy(values),
        length=length,
        above=torch.from_numpy(intervals.above.sum(0)),
        below=torch.from_numpy(intervals.below.sum(0)),
        variation=torch.from_numpy(intervals.variation.sum(0)),
        deviation_error=torch.from_numpy(error),
        tolerance=tolerance,
        evaluations=used,
        converged=not exceeds.any() and checks is not None,
        method="quadrature",
        refused=refused,
    )


class _Intervals(NamedTuple):
    """Intervals of a segment: ends (m,), values at nodes (m, 17, k), errors, integrals (m, k)."""

    chord: Array
    left: Array
    right: Array
    values: Array
    error: Array
    above: Array
    below: Array
    variation: Array

    @classmethod
    def evaluate(
        cls,
        function: Callable[[Array], Array],
        chord: Array,
        left: Array,
        right: Array,
        at_left: Array,
        at_right: Array,
    ) -> _Intervals:
        """Evaluate a function inside intervals, given its values at their ends."""
        half = (right - left)[:, None] / 2
        x = np.append(NODES[1:-1], CHECK_NODE)
        t = left[:, None] + half * (1 + x)
        inside = function(t.ravel()).reshape(*t.shape, -1)
        values = np.concatenate([at_left[:, None], inside[:, :-1], at_right[:, None]], 1)
        c = _interpolants(left, right, values, chord)
        check = inside[:, -1] - _line(chord, t[:, -1])
        error = np.maximum(tail(c), np.abs(evaluate(c, CHECK_NODE) - check))
        above, below, variation = integrate_parts(c)
        integrals = 2 * half * error, half * above, half * below, variation
        return cls(chord, left, right, values, *integrals)

    def cut(
        self, function: Callable[[Array], Array], indices: NDArray[np.integer[Any]]
    ) -> _Intervals:
        """Replace the intervals at `indices` by their halves."""
        left, right = self.left[indices], self.right[indices]
        middle = (left + right) / 2
        first, second, third = self.values[indices][:, [0, DEGREE // 2, DEGREE]].swapaxes(0, 1)
        halves = _Intervals.evaluate(
            function,
            self.chord,
            np.concatenate([left, middle]),
            np.concatenate([middle, right]),
            np.concatenate([first, second]),
            np.concatenate([second, third]),
        )
        pairs = zip(self[1:], halves[1:], strict=True)
        joined = [np.concatenate([np.delete(old, indices, 0), new]) for old, new in pairs]
        return _Intervals(self.chord, *joined)

    def update_errors(self, t: Array, values: Array) -> _Intervals:
        """Update the errors, given distances (m, k) to the chord at check points t (m,)."""
        order = np.argsort(self.left)
        interval = order[np.searchsorted(self.left[order], t, side="right") - 1]
        left = self.left[interval]
        width = (self.right - self.left)[interval]
        c = _interpolants(self.left, self.right, self.values, self.chord)[:, interval]
        x = 2 * (t - left) / width - 1
        difference = width[:, None] * np.abs(evaluate(c, x[:, None]) - values)
        error = self.error.copy()
        np.maximum.at(error, interval, difference)
        return self._replace(error=error)

    def nodes(self) -> tuple[Array, Array]:
        """Return all nodes, from 0 to 1, and the function's values there."""
        order = np.argsort(self.left)
        left = self.left[order, None]
        half = (self.right - self.left)[order, None] / 2
        t = (left + half * (1 + NODES))[:, :-1].ravel()
        values = self.values[order][:, :-1].reshape(len(t), -1)
        return np.append(t, 1.0), np.concatenate([values, self.values[order[-1:], -1]])


def _interpolants(left: Array, right: Array, values: Array, chord: Array) -> Array:
    """Return the coefficients of the interpolated distance to the chord on each interval."""
    nodes = left[:, None] + (right - left)[:, None] / 2 * (1 + NODES)
    return coefficients(values - _line(chord, nodes))


def _check_places() -> Array:
    generator = np.random.Generator(np.random.Philox(CHECK_PLACES))
    offset = 0.25 + generator.random(CHECK_PLACES) / 2
    return np.asarray((np.arange(CHECK_PLACES) + offset) / CHECK_PLACES)


def _line(chord: Array, t: Array) -> Array:
    """Evaluate the chord at t, given its values (2, k) at the ends."""
    return np.asarray(chord[0] + t[..., None] * (chord[1] - chord[0]))
