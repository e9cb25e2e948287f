"""A network's fingerprint: a strip over its depth, coloured by score."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape

from nlbench.errors import without_controls

from .text import number, short_decimals

LEVELS = 10
_MAX_GAPS = 60  # with more fields, there are no gaps between them
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
        """Fit a scale to values; return None if no value is finite.

        It is logarithmic if the values are positive and span more than a factor of 50. With `clip`,
        it ends at the 0.5 % and 99.5 % quantiles if there are many values.
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
            low, high, value = math.log(low), math.log(high), math.log(max(value, 1e-300))
        if not high > low:
            return 0.5
        fraction = min(1.0, max(0.0, (value - low) / (high - low)))
        return fraction if self.sense > 0 else 1 - fraction

    def legend(self) -> dict[str, str]:
        """Return the texts at both ends of the scale and its source."""
        ends = [self.low, self.high][:: self.sense]
        decimals = short_decimals(ends)
        beyond = (" and above" if self.sense > 0 else " and below") if self.is_cut else ""
        least, most = (number(end, decimals) for end in ends)
        return {"least": least, "most": most + beyond, "source": self.source}


def level_of(position: float) -> int:
    """Return the colour level for a position, from 0 to `LEVELS` - 1."""
    return min(LEVELS - 1, int(position * LEVELS))


def level_name(scale: Scale, value: float) -> str:
    """Return the colour level of a value as a digit, or ``x`` without a value."""
    position = scale.position(value)
    return "x" if math.isnan(position) else str(level_of(position))


def strip(
    values: Sequence[float],
    scale: Scale,
    kinds: Sequence[int] = (),
    *,
    title: str,
    colours: Sequence[str] = (),
) -> Markup:
    """Draw a strip with one field per site in call order, hatched where there is no value.

    Parameters
    ----------
    values : sequence of float
        NaN where there is no value.
    kinds : sequence of int
        Index of each site's activation function; indices from 1 are drawn as marks below the strip.
    title : str
        Text for screen readers.
    colours : sequence of str
        Colour of each level, for pages without page.css; by default, classes ``q0``, ``q1``, ….
    """
    levels = [level_name(scale, value) for value in values]
    label = escape(without_controls(title))
    if colours:
        fills = ["#bbb" if level == "x" else colours[int(level)] for level in levels]
        fields = "".join(f'<i style="flex:1;background:{fill}"></i>' for fill in fills)
        style = "display:flex;height:20px"
        return Markup(f'<span style="{style}" role="img" aria-label="{label}">{fields}</span>')
    marks = [f" k{kind}" if kind else "" for kind in kinds] or [""] * len(levels)
    fields = "".join(f'<i class="q{q}{k}"></i>' for q, k in zip(levels, marks, strict=True))
    name = "strip many" if len(levels) > _MAX_GAPS else "strip"
    return Markup(f'<span class="{name}" role="img" aria-label="{label}">{fields}</span>')
