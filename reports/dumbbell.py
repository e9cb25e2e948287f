"""Dumbbell plots: the places of two networks side by side, in call order, with their intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from nlbench.errors import one_line

from .fingerprint import strip
from .population import colour_scale
from .text import number, plus_minus, range_noun, range_text

if TYPE_CHECKING:
    from .compare import Difference
    from .estimates import Estimate

_WIDTH = 760.0
_LEFT = 150.0
_ROW = 26.0
_TOP = 14.0
_CHARACTER = 8.2
"""Width of a character of the differences, in the plot's units."""
_MAX_PLACES = 80
_MAX_NAME = 22
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


def draw_dumbbells(
    difference: Difference, names: tuple[str, str], info: Mapping[str, Any]
) -> Markup:
    """Draw the values of two networks at each place, joined by a bar, and their difference.

    The axis holds all intervals. Of more than 80 places, those that changed most are drawn.
    """
    drawn = [d for d in difference.places if math.isfinite(d.change)]
    if len(drawn) > _MAX_PLACES:
        kept = {id(d) for d in sorted(drawn, key=lambda d: -abs(d.change))[:_MAX_PLACES]}
        drawn = [d for d in drawn if id(d) in kept]
    rows = [*drawn, difference] if math.isfinite(difference.change) else drawn
    # The differences stand to the right of the axis.
    right = _WIDTH - 36 - _CHARACTER * max((len(d.text) for d in rows), default=0)
    axis = _Axis((end for d in rows for e in (d.first, d.second) for end in _ends(e)), right)
    bottom = _TOP + _ROW * len(rows) + 10
    height = bottom + 40
    parts = [axis.grid(_TOP, bottom)]
    for index, d in enumerate(rows):
        y = _TOP + _ROW * index + _ROW / 2 + (8 if not d.place else 0)
        parts.append(_row(d, y, axis, names))
        if not d.place and drawn:
            line = f'x1="20" x2="{_WIDTH - 20:g}" y1="{y - _ROW / 2:g}" y2="{y - _ROW / 2:g}"'
            parts.append(f'<line class="rule" {line}/>')
    title = f"{difference.measure} of {names[0]} and {names[1]} at each place"
    parts.append(
        f'<text class="tick" x="{(_LEFT + right) / 2:g}" y="{height - 6:g}" text-anchor="middle">'
        f"{escape(_axis_label(difference.measure, info))}</text>"
    )
    return Markup(
        f'<svg class="dumbbell" role="img" viewBox="0 0 {_WIDTH:g} {height:g}">'
        f"<title>{escape(one_line(title))}</title>{''.join(parts)}</svg>"
    )


def _axis_label(measure: str, info: Mapping[str, Any]) -> str:
    directions = {"more nonlinear": "higher", "less nonlinear": "lower"}
    word = directions.get(str(info.get("more_means")))
    return f"{measure}: {word} is more nonlinear" if word else measure


def _ends(estimate: Estimate) -> tuple[float, float]:
    low, high = estimate.interval
    if math.isnan(low):
        return estimate.value, estimate.value
    return low, high


class _Axis:
    """A horizontal axis that holds all given values."""

    def __init__(self, values: Iterable[float], right: float) -> None:
        self._right = right
        finite = [value for value in values if math.isfinite(value)]
        low = min(finite)
        high = max(finite)
        margin = 0.03 * (high - low) or 0.05 * abs(high) or 0.5
        self.low = low - margin
        self.high = high + margin

    def position(self, value: float) -> float:
        """Return the coordinate of a value."""
        return _LEFT + (value - self.low) / (self.high - self.low) * (self._right - _LEFT)

    def grid(self, top: float, bottom: float) -> str:
        """Draw the grid with its numbers."""
        parts = []
        ticks = self._ticks()
        decimals = max(0, -math.floor(math.log10(ticks[1] - ticks[0]))) if len(ticks) > 1 else None
        if decimals is not None and any(
            abs(round(tick, decimals) - tick) > 1e-9 * abs(tick) for tick in ticks
        ):
            decimals += 1
        for tick in ticks:
            x = f"{self.position(tick):.1f}"
            parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{top:g}" y2="{bottom:g}"/>')
            text = number(tick, decimals)
            parts.append(
                f'<text class="tick" x="{x}" y="{bottom + 15:g}" text-anchor="middle">{text}</text>'
            )
        return "".join(parts)

    def _ticks(self) -> list[float]:
        rough = (self.high - self.low) / 6
        power = 10 ** math.floor(math.log10(rough))
        step = next(k * power for k in _STEPS if k * power >= rough * 0.999)
        first = math.ceil(self.low / step)
        return [k * step for k in range(first, math.floor(self.high / step) + 1)]


def _row(d: Difference, y: float, axis: _Axis, names: tuple[str, str]) -> str:
    """Draw one place, or the network."""
    name = one_line(d.place) or "whole network"
    short = name if len(name) <= _MAX_NAME else f"…{name[1 - _MAX_NAME :]}"
    bold = " bold" if not d.place else ""
    before, after = (axis.position(e.value) for e in (d.first, d.second))
    texts = [
        f"{label}: {plus_minus(e.value, e.error)}"
        for label, e in zip(names, (d.first, d.second), strict=True)
    ]
    changed = "changed" if d.is_significant else "no clear change"
    tip = f"{name}. {'; '.join(texts)}; difference {d.text}, {changed}"
    parts = [
        f"<g><title>{escape(one_line(tip))}</title>",
        f'<text class="label{bold}" x="{_LEFT - 14:g}" y="{y + 4:g}" text-anchor="end">'
        f"{escape(short)}</text>",
        f'<line class="bar" x1="{before:.1f}" x2="{after:.1f}" y1="{y:g}" y2="{y:g}"/>',
    ]
    for side, estimate in (("a", d.first), ("b", d.second)):
        low, high = (axis.position(end) for end in _ends(estimate))
        if high > low:
            ends = f'x1="{low:.1f}" x2="{high:.1f}" y1="{y:g}" y2="{y:g}"'
            parts.append(f'<line class="interval {side}" {ends}/>')
        x = axis.position(estimate.value)
        parts.append(f'<circle class="{side}" cx="{x:.1f}" cy="{y:g}" r="5"/>')
    weak = "" if d.is_significant else " weak"
    parts.append(
        f'<text class="value{bold}{weak}" x="{_WIDTH - 12:g}" y="{y + 4:g}" text-anchor="end">'
        f"{escape(d.text)}</text></g>"
    )
    return "".join(parts)


def draw_strips(
    difference: Difference, names: tuple[str, str], info: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the strips of both networks on one scale, with its legend, if there are places."""
    sides = [[d.before for d in difference.places], [d.after for d in difference.places]]
    colours = colour_scale(difference.measure, info, [v for side in sides for v in side])
    if colours is None:
        return {}
    noun = range_noun(info)
    rows = [
        {
            "name": label,
            "strip": strip(values, colours.scale, title=f"{label}, {noun} {range_text(values)}"),
        }
        for label, values in zip(names, sides, strict=True)
    ]
    return {"rows": rows, "legend": colours.legend()}
