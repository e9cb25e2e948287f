"""Scales of a measure's values: positions, and the colours of a network's fingerprint."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .text import number, short_decimals

LEVELS = 10
_CLIP_FROM = 200  # number of values from which 0.5 % are clipped at either end


@dataclass(frozen=True)
class Scale:
    """Mapping from a measure's values to positions between least and most nonlinear.

    Parameters
    ----------
    low, high : float
        Ends in the measure's units.
    log : bool
        True for a logarithmic scale.
    sense : int
        -1 if a smaller value is more nonlinear, else 1.
    source : str
        Where the ends come from.
    is_cut : bool
        True if values may lie beyond the more nonlinear end.

    Examples
    --------
    >>> Scale(0.5, 1.0, False, -1).position(0.625)
    0.75
    """

    low: float
    high: float
    log: bool
    sense: int
    source: str = ""
    is_cut: bool = False

    @classmethod
    def of(cls, values: Iterable[float], sense: int, *, clip: bool = False) -> Scale | None:
        """Fit a scale to values.

        Return None if no value is finite. The scale is logarithmic if the values are positive and
        span more than a factor of 50. With `clip`, it ends at the 0.5 % and 99.5 % quantiles if
        there are many values.
        """
        finite = np.array([value for value in values if math.isfinite(value)], dtype=np.float64)
        if not len(finite):
            return None
        low, high = float(finite.min()), float(finite.max())
        if clip and len(finite) >= _CLIP_FROM:
            low, high = (float(end) for end in np.percentile(finite, [0.5, 99.5]))
        return cls(low, high, low > 0 and high > 50 * low, -1 if sense < 0 else 1)

    def position(self, value: float) -> float:
        """Return 0 for the least nonlinear value, 1 for the most, NaN if it isn't finite."""
        if not math.isfinite(value):
            return math.nan
        low, high = self.low, self.high
        if self.log:
            low = math.log(low)
            high = math.log(high)
            value = math.log(max(value, 1e-300))
        if not high > low:
            return 0.5
        fraction = min(1.0, max(0.0, (value - low) / (high - low)))
        return fraction if self.sense > 0 else 1 - fraction

    def level(self, value: float) -> str:
        """Return the colour level as a digit from 0 to `LEVELS` - 1, or ``x`` without a value."""
        position = self.position(value)
        return "x" if math.isnan(position) else str(min(LEVELS - 1, int(position * LEVELS)))

    def legend(self) -> dict[str, str]:
        """Return the texts at both ends of the scale and its source."""
        ends = [self.low, self.high][:: self.sense]
        decimals = short_decimals(ends)
        beyond = (" and above" if self.sense > 0 else " and below") if self.is_cut else ""
        least, most = (number(end, decimals) for end in ends)
        return {"least": least, "most": most + beyond, "source": self.source}
