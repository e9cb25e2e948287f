"""A network's fingerprint: a strip over its depth, coloured by score."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape

from nlbench.errors import without_controls

LEVELS = 10
WIDTH, HEIGHT, BAND = 1000.0, 20.0, 5.0
_GAP = 1.5
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

    Examples
    --------
    >>> Scale(0.5, 1.0, False, -1).position(0.625)
    0.75
    """

    low: float
    high: float
    log: bool
    sense: int

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


def level_of(position: float) -> int:
    """Return the colour level for a position, from 0 to `LEVELS` - 1."""
    return min(LEVELS - 1, int(position * LEVELS))


def strip(
    values: Sequence[float],
    scale: Scale,
    kinds: Sequence[int] = (),
    *,
    title: str,
    colours: Mapping[int, str] | None = None,
) -> Markup:
    """Draw a strip with one cell per site in call order, hatched where there is no value.

    Parameters
    ----------
    values : sequence of float
        NaN where there is no value.
    kinds : sequence of int
        Index of each site's activation function; indices from 1 are drawn as marks below the strip.
    title : str
        Text for screen readers.
    colours : mapping of int to str, optional
        Colours keyed by level, for pages without page.css; by default, classes ``q0``, ``q1``, ….

    Returns
    -------
    markupsafe.Markup
        One ``<svg>`` element.
    """
    width = WIDTH / max(1, len(values))
    gap = _GAP * 3 if len(values) < 24 else (_GAP if len(values) < 90 else 0.0)
    fields: dict[int, list[str]] = {}
    marks: dict[int, list[str]] = {}
    for site, value in enumerate(values):
        position = scale.position(value)
        level = -1 if math.isnan(position) else level_of(position)
        begin, across = f"{site * width:.1f}", max(width - gap, 0.5 * width)
        box = f"M{begin} 0h{across:.1f}v{HEIGHT:g}H{begin}z"
        fields.setdefault(level, []).append(box)
        kind = kinds[site] if site < len(kinds) else 0
        if kind:
            marks.setdefault(kind, []).append(_mark(kind, site * width, width - gap))
    parts = [f"<title>{escape(without_controls(title))}</title>"]
    for level, boxes in sorted(fields.items()):
        name = "qx" if level < 0 else f"q{level}"
        fill = f' fill="{colours.get(level, "#bbb")}"' if colours else ""
        parts.append(f'<path class="{name}"{fill} d="{"".join(boxes)}"/>')
    for kind, boxes in sorted(marks.items()):
        parts.append(f'<path class="k{kind}" d="{"".join(boxes)}"/>')
    height = HEIGHT + (BAND + 2 if marks else 0)
    style = f' style="width:100%;height:{height:g}px"' if colours else ""
    return Markup(
        f'<svg class="strip" role="img" viewBox="0 0 {WIDTH:g} {height:g}"'
        f' preserveAspectRatio="none"{style}>{"".join(parts)}</svg>'
    )


def _mark(kind: int, x: float, width: float) -> str:
    """Return the SVG path for a kind's mark: full width, left half, right half or middle."""
    parts = {1: (0.0, 1.0), 2: (0.0, 0.45), 3: (0.55, 0.45), 4: (0.3, 0.4)}
    begin, length = parts.get(kind, parts[4])
    y = HEIGHT + 2
    return f"M{x + begin * width:.1f} {y:g}h{length * width:.1f}v{BAND:g}h-{length * width:.1f}z"
