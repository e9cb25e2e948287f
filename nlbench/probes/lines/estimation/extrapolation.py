"""Extrapolation from nested uniform grids: pure functions of counts and of values.

**Crossings.** Let n(h) be the number of units on different pieces at neighbouring nodes of a grid
with step h. It is a lower bound on the number of boundaries N, since a unit that crosses twice
within a step is missed. The number of missed pairs is proportional to the step, so N - n(h) ≈ c h:
each halving adds half as much as the previous one, and the last two halvings predict the remainder,

    N - n(h) ≈ (a1 + a2) / (2 + 1),    a1 = n(2h) - n(4h),    a2 = n(h) - n(2h),

since a1 is expected to be twice the remainder, and a2 equal to it. Pairs occur at random, like a
Poisson process. The error therefore has a statistical part (the variance of the remainder and of
its estimate), a systematic part (the deviation of a1 / a2 from 2), and a part due to units that are
undecided because of rounding. The systematic part allows for additions that fall more slowly, in
their observed ratio. `PRIOR_CROSSINGS` are added to both so that a few crossings don't decide.

Crossings that may be repeats of others are counted in `total`, since nearly all of them are
boundaries of their own, but not in `at_least`, which remains a lower bound. The error covers them.

**Deviation.** The integral of |f - g| for the network f and the chord g is computed with the
piecewise-linear interpolant. Its error falls to a quarter when the step is halved, which allows
Richardson extrapolation from two grids. Kinks sometimes reduce that order. The error estimate is
therefore at least the last change in the extrapolated value and a quarter of the change before it,
and the network is compared with the interpolant at `check_places`, where no grid has a node.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nlbench.probes.lines.chord import ChordParts, chord_parts

CHECK_PLACES = 16
"""Number of positions between the nodes at which an estimate is compared with the network."""
ERROR_SIGMAS = 2.0
"""Number of standard deviations in an error bound."""
MIN_REMAINING_CROSSINGS = 0.05
"""Expected remaining crossings below which their variance is left out of the error."""
PRIOR_CROSSINGS = 4.0
"""Crossings added to those of the last halving, and twice to those before, for their ratio."""
MAX_RATIO = 0.95
"""Maximum ratio of the crossings added by successive halvings."""
HIDDEN_PAIR_PROBABILITY = 1 / 4
"""Assumed probability that a unit hides a pair of crossings where rounding leaves its side unknown.
It is 0.08 to 0.28 in networks whose units vary by a few roundings of their layer."""
NEGLIGIBLE_CROSSINGS = 0.02
"""Expected remaining crossings that are neglected: one pair per hundred segments."""
PAIRED_FRACTION = 1.5e-2
"""Assumed ratio of the crossings that the first grid misses in pairs to those that it detects, if
no pair was detected. It is 1.4e-2 in networks with two layers of 24 units."""
RANKED_FRACTION = 0.4
"""`PAIRED_FRACTION` for sorted units, since three units that swap ranks together look like two."""


def check_places() -> Tensor:
    """Return positions in [0, 1] at which to check estimates, one at random in each 16th.

    Examples
    --------
    >>> t = check_places()
    >>> len(t), bool((t.diff() > 0).all())
    (16, True)
    """
    generator = torch.Generator().manual_seed(CHECK_PLACES)
    offset = torch.rand(CHECK_PLACES, dtype=torch.float64, generator=generator)
    return (torch.arange(CHECK_PLACES) + offset) / CHECK_PLACES


@dataclass(frozen=True)
class CrossingEstimate:
    """Number of boundaries on one segment, extrapolated from nested grids.

    Parameters
    ----------
    at_least : int
        Number of crossings detected on the finest grid.
    total : float
        Estimated number of boundaries.
    error : float
        Estimated error of `total`.
    scatter : float
        Part of the error that further halving reduces, apart from `pair`.
    fixed : float
        Part of the error that remains, due to rounding.
    pair : float
        2 if a pair of crossings may be missing although the finest grids added none, else 0.
    by_site : tensor of shape (sites,)
        Estimated number for each site; these sum to `total`.
    twice : int
        Number of units found to cross twice within a step of the second finest grid.
    undecided : int
        Number of units within rounding error of a boundary at a node.
    """

    at_least: int
    total: float
    error: float
    scatter: float
    fixed: float
    pair: float
    by_site: Tensor
    twice: int
    undecided: int

    def is_close(self, tolerance: float) -> bool:
        """Return True if the error is within the tolerance."""
        return self.error <= tolerance * self.total

    def is_resolved(self, tolerance: float, decided: float = 0.0) -> bool:
        """Return True if further halving would not bring the error within the tolerance.

        `decided` is a part of `scatter` that is left out. This is so once it is within it, or where
        what halving reduces is the smaller part. The search for a pair has a limit of its own.
        """
        scatter = self.scatter - decided
        return scatter <= max(tolerance * self.total - self.fixed, self.fixed, self.pair)

    def is_settled(self, tolerance: float) -> bool:
        """Return True if missing a pair of crossings would be within the tolerance."""
        return self.pair <= tolerance * self.total

    @classmethod
    def of(
        cls,
        counts: Tensor,
        undecided: float,
        miscounted: float,
        repeated: float = 0.0,
        paired_fraction: float = PAIRED_FRACTION,
    ) -> CrossingEstimate:
        """Extrapolate from counts (levels, sites), where each level halves the previous grid.

        Parameters
        ----------
        undecided : float
            Units that may hide a pair of crossings where rounding leaves their side unknown.
        miscounted : float
            Crossings that rounding may have merged or hidden.
        repeated : float
            Crossings that may be repeats of others.
        paired_fraction : float
            See `PAIRED_FRACTION`.
        """
        totals = counts.sum(1)
        seen = float(totals[-1])
        added = totals.diff().clamp(min=0)
        last = added[-2:]
        remainder = float(last.sum() / (2 ** torch.arange(len(last), dtype=added.dtype)).sum())
        # Where the last two halvings added nothing, estimate how likely a pair is from all of them.
        weight = 2 ** len(added) - 1
        likely = max(remainder, float(added.sum()) / weight)
        # The variance of crossings that occur in pairs is twice their mean. The estimate of the
        # remainder adds 1/3 of it; 2/3 is assumed, since pairs occur in clusters.
        statistical = ERROR_SIGMAS * math.sqrt(2 * likely * (1 + 2 / 3))
        if likely <= MIN_REMAINING_CROSSINGS:
            statistical = 0.0
        systematic = max(abs(remainder - float(added[-1])) / 2, _slow_remainder(last) - remainder)
        # Pairs are missed as a whole; where none was detected, up to half a pair was expected.
        expected = likely + min(1.0, paired_fraction * seen) / weight
        pair = 2.0 if expected > NEGLIGIBLE_CROSSINGS else 0.0
        gain = counts[-1] - counts[-2]
        fraction = gain / gain.sum() if float(gain.sum()) > 0 else torch.zeros_like(gain)
        by_site = counts[-1] + remainder * fraction
        total = seen + remainder
        if float(by_site.sum()) > 0:
            by_site = by_site * (total / float(by_site.sum()))
        # Without crossings there are none to merge.
        fixed = hidden_crossings(undecided) + (miscounted if total + undecided > 0 else 0.0)
        return cls(
            round(seen - repeated),
            total,
            max(pair, statistical) + systematic + repeated + fixed,
            statistical + systematic + repeated,
            fixed,
            pair,
            by_site,
            round(float(added[-1]) / 2),
            round(undecided),
        )


def hidden_crossings(undecided: float) -> float:
    """Return a bound on the crossings that undecided units hide, each a pair or none.

    It is the binomial mean plus `ERROR_SIGMAS` standard deviations.

    Examples
    --------
    >>> hidden_crossings(0), round(hidden_crossings(16), 1), round(hidden_crossings(256), 1)
    (0.0, 14.9, 155.7)
    """
    p = HIDDEN_PAIR_PROBABILITY
    return 2 * (undecided * p + ERROR_SIGMAS * math.sqrt(undecided * p * (1 - p)))


def _slow_remainder(added: Tensor) -> float:
    """Return the remainder after the last additions (2,) if their ratio stays as observed.

    Examples
    --------
    >>> _slow_remainder(torch.tensor([200.0, 100.0]))
    100.0
    >>> round(_slow_remainder(torch.tensor([2.0, 2.0])), 12)
    3.0
    """
    before, after = (float(x) for x in (*[2 * added[-1]] * (2 - len(added)), *added))
    ratio = (after + PRIOR_CROSSINGS) / (before + 2 * PRIOR_CROSSINGS)
    ratio = min(ratio, MAX_RATIO)
    return after * ratio / (1 - ratio)


@dataclass(frozen=True)
class DeviationEstimate:
    """Deviation from the chord and its error, (k,) each, extrapolated from nested grids."""

    parts: ChordParts
    error: Tensor

    @classmethod
    def of(cls, values: Tensor, checks: Tensor | None) -> DeviationEstimate:
        """Extrapolate from values (n + 1, k) on a grid.

        Parameters
        ----------
        checks : tensor of shape (m, k) or None
            Values at `check_places`.
        """
        t = torch.linspace(0, 1, len(values), dtype=torch.float64, device=values.device)
        grids = [chord_parts(t[::by], values[::by]) for by in (1, 2, 4, 8)]
        parts, middle, coarse = (_richardson(*pair) for pair in itertools.pairwise(grids))
        total = parts.total
        # A change may be small by chance. Changes are expected to fall to a quarter.
        changes = [total - middle.total, total - grids[0].total, (middle.total - coarse.total) / 4]
        error = torch.stack(changes).abs().amax(0)
        if checks is not None:
            # A check that is further from the interpolant than any node added by the last halving
            # reveals a feature between the nodes.
            known = (values[1::2] - (values[:-1:2] + values[2::2]) / 2).abs().amax(0)
            distance = (checks - _interpolate(values, check_places().to(values.device))).abs()
            error = error + (distance - known).clamp(min=0).mean(0)
        return cls(parts, error)


def _richardson(fine: ChordParts, coarse: ChordParts) -> ChordParts:
    """Extrapolate from two grids, where the fine grid has half the step.

    The integrals are of second order, and the variation, which misses kinks within a step, of
    first.
    """
    pairs = (fine.above, coarse.above), (fine.below, coarse.below)
    above, below = ((half + (half - full) / 3).clamp(min=0) for half, full in pairs)
    return ChordParts(above, below, 2 * fine.variation - coarse.variation)


def _interpolate(values: Tensor, t: Tensor) -> Tensor:
    """Interpolate values (n + 1, k) on a uniform grid linearly at t (m,).

    Return a tensor of shape (m, k).
    """
    at = t * (len(values) - 1)
    left = at.floor().long().clamp(0, len(values) - 2)
    weight = (at - left)[:, None]
    return (1 - weight) * values[left] + weight * values[left + 1]
