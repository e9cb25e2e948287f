"""Formatting of numbers and short phrases."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .leaderboard import Standing

SIGNIFICANT = 4
LARGEST_PLAIN, SMALLEST_PLAIN = 1e7, 1e-3  # numbers outside this range are shown with an exponent


def column_decimals(values: Iterable[float]) -> int | None:
    """Return the number of decimals that gives a column's largest value four significant digits.

    Parameters
    ----------
    values : iterable of float
        The numbers in one column; non-finite ones are ignored.

    Returns
    -------
    int or None
        None if no fixed number of decimals suits all values; `number` then chooses for each.

    Examples
    --------
    >>> column_decimals([0.91, 0.85]), column_decimals([283.0, 291.0])
    (4, 0)
    >>> column_decimals([1e-9, 1.0]) is None
    True
    """
    finite = [value for value in values if math.isfinite(value)]
    sizes = [abs(value) for value in finite if value != 0]
    if not sizes:
        return 0
    largest, smallest = max(sizes), min(sizes)
    if largest >= LARGEST_PLAIN or largest < SMALLEST_PLAIN or largest / smallest > 1e4:
        return None
    if all(value.is_integer() for value in finite):
        return 0
    # Slightly less, so that columns of fractions look the same with and without a 1.
    return _decimals(0.999 * largest)


def short_decimals(values: Iterable[float]) -> int | None:
    """Return the number of decimals (at least two if they fit) with which the extremes differ.

    Examples
    --------
    >>> short_decimals([0.53, 0.95]), short_decimals([0.9908, 0.993]), short_decimals([283.0])
    (2, 3, 0)
    """
    finite = [value for value in values if math.isfinite(value)]
    limit = column_decimals(finite)
    if limit is None:
        return None
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    known = range(min(2, limit), limit)
    return next((d for d in known if low == high or number(low, d) != number(high, d)), limit)


def interval_decimals(entries: Sequence[Standing]) -> int | None:
    """Return the number of decimals for a leaderboard column, limited by its intervals.

    It is at most the result of `column_decimals`, and at most the number with which half the width
    of the median interval has two significant digits.

    Examples
    --------
    >>> from .leaderboard import Standing
    >>> interval_decimals([Standing(0.8012, 0.0, 0.74, 0.86, 8, "seeds", "ok", "")])
    3
    """
    limit = column_decimals(entry.value for entry in entries)
    halves = [(entry.high - entry.low) / 2 for entry in entries]
    widths = [half for half in halves if math.isfinite(half) and half > 0]
    if limit is None or not widths:
        return limit
    return min(limit, max(0, 1 - math.floor(math.log10(median(widths)))))


def _decimals(size: float) -> int:
    return max(0, SIGNIFICANT - 1 - math.floor(math.log10(size)))


def number(value: float, decimals: int | None = None) -> str:
    """Format a number.

    Parameters
    ----------
    decimals : int, optional
        Digits after the decimal point, from `column_decimals`; by default four significant digits.
        A number that would round to zero is shown with one significant digit.

    Examples
    --------
    >>> number(0.84531), number(174116.0), number(2.5e-6), number(3e-5, 3)
    ('0.8453', '174,116', '2.500e-06', '3e-05')
    """
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return f"{0:.{decimals or 0}f}"
    size = abs(value)
    if decimals is None:
        if size >= LARGEST_PLAIN or size < SMALLEST_PLAIN:
            return f"{value:.{SIGNIFICANT - 1}e}"
        return f"{value:,.{_decimals(size)}f}"
    if round(size, decimals) == 0:
        return f"{value:.0e}"
    return f"{value:,.{decimals}f}"


def plus_minus(value: float, error: float) -> str:
    """Format a value with its standard error, to two significant digits of the error.

    Examples
    --------
    >>> plus_minus(0.84531, 0.0712), plus_minus(13.0, float("nan"))
    ('0.845 ± 0.071', '13')
    """
    if not math.isfinite(error) or error == 0:
        return number(value, column_decimals([value]))
    if column_decimals([value]) is None:
        return f"{number(value)} ± {number(error)}"
    decimals = max(0, 1 - math.floor(math.log10(error)))
    return f"{number(value, decimals)} ± {number(error, decimals)}"


def place_noun(info: Mapping[str, Any]) -> str:
    """Return the noun for a measure's places, such as path or block.

    Examples
    --------
    >>> place_noun({"probe": "sites"}), place_noun({"probe": "lines"})
    ('activation', 'path')
    """
    nouns = {"lines": "path", "sites": str(info.get("of", "activation"))}
    return nouns.get(str(info.get("probe")), "place")


def place_text(name: str) -> str:
    """Return the name of a place for use in a sentence.

    Examples
    --------
    >>> place_text("features.3"), place_text("3")
    ('features.3', 'activation 3')
    """
    return name if any(map(str.isalpha, name)) else f"activation {name}"


def direction(more_means: str) -> str:
    """Return a measure's direction as text.

    Examples
    --------
    >>> direction("less nonlinear"), direction("neither")
    ('↓ more nonlinear', 'no direction')
    """
    arrows = {"more nonlinear": "↑ more nonlinear", "less nonlinear": "↓ more nonlinear"}
    return arrows.get(more_means, "no direction")


def bounds_text(bounds: Sequence[float | None]) -> str:
    """Format the bounds of a measure; None means unbounded.

    Examples
    --------
    >>> bounds_text([0.0, 1.0]), bounds_text([0.0, None]), bounds_text([None, None])
    ('0 to 1', 'at least 0', 'unbounded')
    """
    low, high = (
        None if bound is None or math.isinf(bound) else f"{bound:g}" for bound in (*bounds,)
    )
    if low is not None and high is not None:
        return f"{low} to {high}"
    if low is not None:
        return f"at least {low}"
    return "unbounded" if high is None else f"at most {high}"


def count(n: int, noun: str) -> str:
    """Format a count with its noun, which is in the plural unless the count is 1.

    Examples
    --------
    >>> count(1, "subject"), count(1200, "sample"), count(0, "cell")
    ('1 subject', '1,200 samples', '0 cells')
    """
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def settings_text(settings: Mapping[str, Any]) -> str:
    """Format options on one line.

    Examples
    --------
    >>> settings_text({"paths": "closed", "radius": 4.0})
    'paths = closed, radius = 4'
    """
    return ", ".join(f"{name} = {_setting(value)}" for name, value in settings.items())


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)
