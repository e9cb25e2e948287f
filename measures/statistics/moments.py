"""Centred second moments of an activation's input and output, accumulated over batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor

from nlbench.errors import RequestError
from nlbench.measure import Accumulator, PooledMeasure
from nlbench.measure.left_out import (
    LeftOut,
    check_group_memory,
    fits_group_memory,
    merge_all_but_one,
)
from nlbench.measure.replicates import GROUPS, group_index
from nlbench.probes.sites.site import Pair, SiteBatch

from .prepared import PreparedSamples, Samples, prepare_batch, prepare_samples
from .samples import (
    EPSILON,
    check_count,
    column_units,
    constant_side,
    is_resolved,
    rounding_norms,
    unresolved_side,
    varying,
)


@dataclass(frozen=True)
class Moments:
    """Moments of samples z = (x, y) in R^(d + k), in float64.

    Each column is scaled by its own power of two, its unit, so that squares neither underflow nor
    overflow and no precision is lost.

    Parameters
    ----------
    inputs : int
        d, the number of columns of x.
    origin : tensor of shape (d + k,)
        Subtracted from all samples, so that an offset costs no precision.
    unit : tensor of shape (d + k,)
    mean, low, high : tensor of shape (d + k,)
        Mean and extremes of (z - origin) / unit.
    scatter : tensor of shape (d + k, d + k)
        Sum of (z - mean) (z - mean)ᵀ, in these units.
    rounding : tuple of float
        Relative errors of x and of y; see `PreparedSamples`.
    """

    n: int
    inputs: int
    origin: Tensor
    unit: Tensor
    mean: Tensor
    low: Tensor
    high: Tensor
    scatter: Tensor
    rounding: tuple[float, float] = (EPSILON, EPSILON)

    @classmethod
    def of(
        cls,
        x: Tensor,
        y: Tensor,
        origin: Tensor,
        rounding: tuple[float, float] = (EPSILON, EPSILON),
    ) -> Moments:
        """Compute the moments of samples x (n, d) and y (n, k), both float64.

        Raises
        ------
        nlbench.NotFinite
            If a difference of two samples overflows.

        Examples
        --------
        >>> x, y = torch.eye(2).double(), torch.tensor([[1.0], [3.0]]).double()
        >>> moments = Moments.of(x, y, torch.zeros(3).double())
        >>> moments.unit
        tensor([1., 1., 2.], dtype=torch.float64)
        >>> moments.xy
        tensor([[-0.5000],
                [ 0.5000]], dtype=torch.float64)
        """
        z = torch.cat([x, y], 1) - origin
        unit = column_units(z)
        z = z / unit
        mean = z.mean(0)
        low, high = z.amin(0), z.amax(0)
        z = z - mean
        return cls(len(z), x.shape[1], origin, unit, mean, low, high, z.T @ z, rounding)

    def convert_units(self, unit: Tensor) -> Moments:
        """Convert to larger or equal units (d + k,), powers of two."""
        if torch.equal(unit, self.unit):
            return self
        ratio = self.unit / unit
        scatter = self.scatter * ratio[:, None] * ratio
        sizes = (self.mean * ratio, self.low * ratio, self.high * ratio)
        return Moments(self.n, self.inputs, self.origin, unit, *sizes, scatter, self.rounding)

    def unify_units(self) -> Moments:
        """Convert to one unit for all columns of x and one for all columns of y."""
        x, y = self.unit[: self.inputs], self.unit[self.inputs :]
        return self.convert_units(torch.cat([x.amax().expand_as(x), y.amax().expand_as(y)]))

    def merged(self, other: Moments) -> Moments:
        """Merge with the moments of other samples, which have the same origin.

        References
        ----------
        T. F. Chan, G. H. Golub and R. J. LeVeque, "Updating formulae and a pairwise
        algorithm for computing sample variances", COMPSTAT 1982.
        """
        n = self.n + other.n
        unit = torch.maximum(self.unit, other.unit)
        first = self.convert_units(unit)
        second = other.convert_units(unit)
        step = second.mean - first.mean
        # In place: passes over the widest tensor take longer than the outer product.
        scatter = first.scatter + second.scatter
        scatter += torch.outer(step, step).mul_(self.n * other.n / n)
        return Moments(
            n,
            self.inputs,
            self.origin,
            unit,
            first.mean + step * (other.n / n),
            torch.minimum(first.low, second.low),
            torch.maximum(first.high, second.high),
            scatter,
            (max(self.rounding[0], other.rounding[0]), max(self.rounding[1], other.rounding[1])),
        )

    @property
    def xx(self) -> Tensor:
        """Scatter (d, d) of x, in the columns' units."""
        return self.scatter[: self.inputs, : self.inputs]

    @property
    def xy(self) -> Tensor:
        """Scatter (d, k) of x and y, in the columns' units."""
        return self.scatter[: self.inputs, self.inputs :]

    @property
    def yy(self) -> Tensor:
        """Scatter (k, k) of y, in the columns' units."""
        return self.scatter[self.inputs :, self.inputs :]

    @property
    def unit_y(self) -> Tensor:
        """Units (k,) of y."""
        return self.unit[self.inputs :]

    @property
    def varying_x(self) -> Tensor:
        """True for columns (d,) of x that vary by more than their rounding."""
        return varying(*self._find_extremes("input"), self.rounding[0])

    @property
    def varying_y(self) -> Tensor:
        """True for columns (k,) of y that vary by more than their rounding."""
        return varying(*self._find_extremes("output"), self.rounding[1])

    def check_varies(self, role: str) -> None:
        """Raise `nlbench.Undefined` if the samples vary by no more than rounding.

        See `constant_side` and `is_resolved`.
        """
        low, high = self._find_extremes(role)
        rounding = self.rounding[role == "output"]
        if not varying(low, high, rounding).any():
            raise constant_side(role, rounding, equal=torch.equal(low, high))
        side = slice(self.inputs) if role == "input" else slice(self.inputs, None)
        norms = self.scatter.diagonal()[side].clamp(min=0).sqrt() * self.unit[side]
        if not is_resolved(low, high, norms, self.n, rounding):
            raise unresolved_side(role)

    @property
    def rounding_x(self) -> Tensor:
        """Norms (d,) of rounding errors in the columns of x, in the columns' units."""
        low, high = self._find_extremes("input")
        peaks = torch.maximum(low.abs(), high.abs()) / self.unit[: self.inputs]
        return rounding_norms(peaks, self.n, self.rounding[0])

    def _find_extremes(self, role: str) -> tuple[Tensor, Tensor]:
        side = slice(self.inputs) if role == "input" else slice(self.inputs, None)
        unit = self.unit[side]
        origin = self.origin[side]
        return self.low[side] * unit + origin, self.high[side] * unit + origin


@dataclass(frozen=True, eq=False)
class SamplePairs:
    """Samples x (n, d) and y (n, k), stored as rows and later as moments.

    The first max(d, k) + 1 samples are stored as rows. Beyond that, moments replace them, so that
    memory is bounded by O(d²) for long streams and by O(n d) for very wide features. Instances are
    immutable, so measures that have added the same batches can share one.

    Parameters
    ----------
    moments : Moments, optional
        Moments of the samples that aren't stored as rows.
    batches : tuple of pairs of PreparedSamples
        The rows.
    widths : tuple of int, optional
        d and k, once there are samples.
    distinct : int
        Number of samples in a group that aren't copies.
    """

    n: int = 0
    moments: Moments | None = None
    batches: tuple[tuple[PreparedSamples, PreparedSamples], ...] = ()
    widths: tuple[int, int] | None = None
    distinct: int = 0

    def added(self, batch: Pair) -> SamplePairs:
        """Add one batch, in the form that `SiteBatch.shared` expects."""
        return self.add_samples(*batch.shared(prepare_batch))

    @torch.no_grad()
    def add_samples(self, x: Samples, y: Samples) -> SamplePairs:
        """Add one batch. The tensors are copied."""
        x, y = prepare_samples(x, "x"), prepare_samples(y, "y")
        count = check_count(x, y, at_least=0)
        widths = (x.shape[1], y.shape[1])
        if self.widths not in (None, widths):
            raise RequestError(f"a batch has {widths} columns, earlier ones had {self.widths}")
        if count == 0:
            return self
        if self.moments is not None:
            return self.add_rows(x, y).condensed(self.moments.origin)
        # The caller may modify its tensors later, as an in-place activation does.
        copied_x = PreparedSamples(x.values.clone(), x.rounding)
        copied_y = PreparedSamples(y.values.clone(), y.rounding)
        pairs = self.add_rows(copied_x, copied_y)
        if pairs.n <= pairs.max_rows:
            return pairs
        first_x, first_y = pairs.batches[0]
        return pairs.condensed(torch.cat([first_x.values[0], first_y.values[0]]))

    def add_rows(self, x: PreparedSamples, y: PreparedSamples, distinct: int = 0) -> SamplePairs:
        """Add samples as rows."""
        return SamplePairs(
            self.n + len(x),
            self.moments,
            (*self.batches, (x, y)),
            (x.shape[1], y.shape[1]),
            self.distinct + distinct,
        )

    @property
    def max_rows(self) -> int:
        """Number of samples up to which they are stored as rows."""
        return max(self.widths or (0,)) + 1

    def rows(self) -> tuple[PreparedSamples, PreparedSamples]:
        """Concatenate the rows x (m, d) and y (m, k)."""
        x, y = zip(*self.batches, strict=True)
        return _concatenate(x), _concatenate(y)

    def condensed(self, origin: Tensor) -> SamplePairs:
        """Add the rows to the moments, which have the given origin."""
        if not self.batches:
            return self
        x, y = self.rows()
        moments = Moments.of(x.values, y.values, origin, (x.rounding, y.rounding))
        if self.moments is not None:
            moments = self.moments.merged(moments)
        return replace(self, moments=moments, batches=())

    def merged(self, other: SamplePairs) -> SamplePairs:
        """Merge with other samples, both as rows or both as moments with the same origin."""
        moments = self.moments
        if moments is not None and other.moments is not None:
            moments = moments.merged(other.moments)
        return SamplePairs(
            self.n + other.n,
            moments,
            self.batches + other.batches,
            self.widths,
            self.distinct + other.distinct,
        )


def _concatenate(parts: tuple[PreparedSamples, ...]) -> PreparedSamples:
    values = torch.cat([part.values for part in parts])
    return PreparedSamples(values, max(part.rounding for part in parts))


NO_PAIRS = SamplePairs()
"""Initial state of all measures, a single object so that later states are shared too."""


@dataclass(frozen=True, eq=False)
class GroupedPairs:
    """Samples of each group. Measures that have added the same batches share one.

    Rows are added to the moments max(d, k) + 2 at a time, since each addition changes the whole
    matrix. If the moments of all groups exceed the memory, rows are kept as long as they don't.

    Parameters
    ----------
    memory : int, optional
        Limit in bytes for the moments of all groups.
    """

    memory: int | None = None
    groups: tuple[SamplePairs, ...] = (NO_PAIRS,) * GROUPS
    origin: Tensor | None = None

    @torch.no_grad()
    def added(self, batch: Pair) -> GroupedPairs:
        """Add one batch, in the form that `SiteBatch.shared` expects."""
        x, y = batch.shared(prepare_batch)
        assert batch.sources is not None
        index = group_index(batch.sources.index)
        origin = self.origin
        if origin is None:
            origin = torch.cat([x.values[0], y.values[0]])
        groups = list(self.groups)
        for group in sorted(set(index.tolist())):
            rows = (index == group).nonzero()[:, 0]
            parts = (PreparedSamples(side.values[rows], side.rounding) for side in (x, y))
            pairs = groups[group].add_rows(*parts, batch.sources.select_rows(rows).distinct)
            count = sum(len(rows) for rows, _ in pairs.batches)
            if count > pairs.max_rows:
                if self._fits(pairs):
                    pairs = pairs.condensed(origin)
                else:
                    check_group_memory(8 * GROUPS * sum(pairs.widths or ()) * count, self.memory)
            groups[group] = pairs
        return GroupedPairs(self.memory, tuple(groups), origin)

    def _fits(self, pairs: SamplePairs) -> bool:
        """Return True if moments of all groups fit into the memory."""
        return fits_group_memory(8 * GROUPS * sum(pairs.widths or ()) ** 2, self.memory)

    @torch.no_grad()
    def leave_each_out(self) -> Iterator[SamplePairs]:
        """Yield the samples without each group that occurs."""
        groups = [group for group in self.groups if group.n]
        if len(groups) < 2:
            return
        origin = self.origin
        assert origin is not None
        limit = groups[0].max_rows
        total = sum(group.n for group in groups)
        merged: list[SamplePairs] = []
        if any(total - group.n > limit for group in groups) and self._fits(groups[0]):
            condensed = [group.condensed(origin) for group in groups]
            merged = merge_all_but_one(condensed, SamplePairs.merged)
        for index, left_out in enumerate(groups):
            others = [group for group in groups if group is not left_out]
            if total - left_out.n <= limit:
                yield reduce(SamplePairs.merged, others)
            elif merged:
                yield merged[index]
            else:
                # One group at a time takes seven times as long, and a fourth of the memory.
                yield reduce(SamplePairs.merged, (group.condensed(origin) for group in others))


@lru_cache
def no_grouped_pairs(memory: int | None) -> GroupedPairs:
    """Return the initial state of all measures, a single object as `NO_PAIRS`."""
    return GroupedPairs(memory)


class PairsAccumulator(Accumulator):
    """Accumulator of a site's batches as pairs of samples."""

    def __init__(self) -> None:
        self.pairs = NO_PAIRS

    def add(self, x: Samples, y: Samples) -> None:
        """Add one batch."""
        self.pairs = self.pairs.add_samples(x, y)


class _LeftOutPairs(LeftOut):
    """Samples of each group at one site, shared with other measures."""

    def __init__(self, measure: PairsMeasure) -> None:
        self._measure = measure
        self._pairs = no_grouped_pairs(measure.memory)

    def add(self, observation: SiteBatch, groups: Tensor) -> None:
        """Add one batch."""
        self._pairs = observation.shared(self._pairs.added)

    def replicates(self) -> tuple[float, ...]:
        """Compute the value without each group."""
        values = []
        for pairs in self._pairs.leave_each_out():
            accumulator = self._measure.accumulator()
            assert isinstance(accumulator, PairsAccumulator)
            accumulator.pairs = pairs
            values.append(accumulator.statistics()["value"])
        return tuple(values)


class PairsMeasure(PooledMeasure):
    """A site measure whose accumulators of sample pairs are shared with other measures."""

    def left_out(self, accumulator: Any) -> LeftOut:
        """Create the state for the replicates of one site, given its accumulator."""
        if isinstance(accumulator, PairsAccumulator):
            return _LeftOutPairs(self)
        return super().left_out(accumulator)

    def samples(self, observation: SiteBatch) -> tuple[PreparedSamples, PreparedSamples]:
        """Return the prepared samples of a batch."""
        return observation.shared(prepare_batch)

    def take(self, accumulator: Any, observation: SiteBatch) -> None:
        """Add a batch to an accumulator, reusing the state that another measure has computed."""
        if isinstance(accumulator, PairsAccumulator):
            accumulator.pairs = observation.shared(accumulator.pairs.added)
        else:
            super().take(accumulator, observation)
