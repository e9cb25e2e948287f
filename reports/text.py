"""Formatting of numbers and short phrases."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from nlbench.parsers import unique

if TYPE_CHECKING:
    from .estimates import Estimate
    from .leaderboard import Standing
    from .tables import MeasureInfo

_SMALLEST_WITH_ERROR = 1e-5  # smaller values and errors have a common exponent
SIGNIFICANT = 4
LARGEST_PLAIN, SMALLEST_PLAIN = 1e7, 1e-3  # numbers outside this range are shown with an exponent


def column_decimals(values: Iterable[float]) -> int | None:
    """Return the number of decimals that gives a column's largest value four significant digits.

    It is None if no fixed number suits all values; `number` then chooses for each.

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


def error_decimals(error: float) -> int:
    """Return the decimals at which a standard error has one significant digit, or two from 1 to 2.

    Examples
    --------
    >>> error_decimals(0.00051), error_decimals(0.0014), error_decimals(27.0)
    (4, 4, 0)
    """
    digits = f"{abs(error):.1e}"
    return max(0, -int(digits.partition("e")[2]) + (digits[0] == "1"))


def entry_decimals(entries: Sequence[Standing]) -> int | None:
    """Return the number of decimals for the values of a column that have no error.

    It is at most the result of `column_decimals`, and at most that of the median error.
    """
    limit = column_decimals(entry.value for entry in entries)
    known = [entry.error for entry in entries if math.isfinite(entry.error) and entry.error > 0]
    if limit is None or not known:
        return limit
    return min(limit, error_decimals(median(known)))


def _decimals(size: float) -> int:
    return max(0, SIGNIFICANT - 1 - int(f"{size:.{SIGNIFICANT - 1}e}".partition("e")[2]))


def number(value: float, decimals: int | None = None, *, signed: bool = False) -> str:
    """Format a number, with a true minus sign, and a plus sign if `signed`.

    By default it has four significant digits, else a number of decimals, see `column_decimals`. A
    number that would round to zero is shown with one significant digit.

    Examples
    --------
    >>> number(0.84531), number(-174116.0), number(2.5e-6), number(3e-5, 3)
    ('0.8453', '−174,116', '2.500e−06', '3e−05')
    >>> number(0.25, 2, signed=True)
    '+0.25'
    """
    text = _ascii_number(value, decimals).replace("-", "−")
    return f"+{text}" if signed and value > 0 else text


def _ascii_number(value: float, decimals: int | None) -> str:
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


def plus_minus(value: float, error: float = math.nan, *, signed: bool = False) -> str:
    """Format a value with its standard error, which determines the digits of both.

    Examples
    --------
    >>> plus_minus(0.80089, 0.00051), plus_minus(0.84531, 0.0712), plus_minus(13.0)
    ('0.8009 ± 0.0005', '0.85 ± 0.07', '13')
    >>> plus_minus(-0.1689, 0.0021, signed=True)
    '−0.169 ± 0.002'
    """
    if not math.isfinite(error) or error == 0:
        is_count = math.isfinite(value) and value.is_integer() and abs(value) < LARGEST_PLAIN
        return number(value, 0 if is_count else None, signed=signed)
    size = abs(value)
    if size >= LARGEST_PLAIN or max(size, error) < _SMALLEST_WITH_ERROR:
        return _exponent(value, error, signed)
    decimals = error_decimals(error)
    # A value that rounds to 0 is within its error: 0.000 ± 0.002.
    shown = value if round(size, decimals) else 0.0
    return f"{number(shown, decimals, signed=signed)} ± {number(error, decimals)}"


def percentage(fraction: float, error: float = math.nan) -> str:
    """Format a relative change as a percentage, whose digits its standard error determines.

    Without an error it has two significant digits.

    Examples
    --------
    >>> percentage(-0.0000213, 0.0004), percentage(-0.0000213), percentage(0.12345, 0.002)
    ('0.00 %', '−0.0021 %', '+12.3 %')
    >>> percentage(1.5), percentage(math.nan), percentage(math.inf)
    ('+150 %', '–', '∞ %')
    """
    if math.isnan(fraction):
        return "–"
    percent = 100 * fraction
    if math.isinf(percent) or abs(percent) >= LARGEST_PLAIN:
        return f"{number(percent)} %"
    resolution = 100 * error if error > 0 else abs(percent) / 5
    decimals = min(error_decimals(resolution), 8) if resolution else 0
    shown = percent if round(percent, decimals) else 0.0
    return f"{number(shown, decimals, signed=True)} %"


def _exponent(value: float, error: float, signed: bool) -> str:
    """Format a value and its standard error with a common exponent."""
    power = math.floor(math.log10(max(abs(value), error)))
    scale = 10.0**power
    if scale == 0 or not math.isfinite(value / scale):
        return f"{number(value, signed=signed)} ± {number(error)}"
    decimals = error_decimals(error / scale)
    texts = number(value / scale, decimals, signed=signed), number(error / scale, decimals)
    return f"({texts[0]} ± {texts[1]})e{power:+03d}".replace("e-", "e−")


def range_text(values: Iterable[float], error: float = math.nan) -> str:
    """Format the range of values, or return an empty text if none is finite.

    It has no more digits than a value with the standard error, if both ends differ then.

    Examples
    --------
    >>> range_text([0.95, 0.55, 0.7]), range_text([-0.5, 2.0]), range_text([0.25])
    ('0.55–0.95', '−0.50 to 2.00', '0.25')
    >>> range_text([0.004, 0.01]), range_text([354.9, 603.0], 57.3), range_text([354.9, 355.1], 57)
    ('0.004–0.010', '355–603', '354.9–355.1')
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low = min(finite)
    high = max(finite)
    decimals = short_decimals(finite)
    if decimals is not None:
        known = error_decimals(error) if math.isfinite(error) and error > 0 else decimals
        if known < decimals and number(low, known) != number(high, known):
            decimals = known
        # Digits after the decimal point up to which the ends of a range have no exponent.
        while decimals < 4 and any(v and not round(v, decimals) for v in finite):
            decimals += 1
    ends = number(low, decimals), number(high, decimals)
    if ends[0] == ends[1]:
        return ends[0]
    return f"{ends[0]}–{ends[1]}" if low >= 0 else f"{ends[0]} to {ends[1]}"


def interval_text(low: float, high: float, error: float) -> str:
    """Format a confidence interval, or return an empty text if it is unknown.

    Examples
    --------
    >>> interval_text(0.7988, 0.8012, 0.0005)
    '0.7988 to 0.8012'
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        return ""
    decimals = None if error == 0 else error_decimals(error)
    if max(abs(low), abs(high)) >= LARGEST_PLAIN or error < SMALLEST_PLAIN**2:
        decimals = None
    return f"{number(low, decimals)} to {number(high, decimals)}"


def place_text(name: str) -> str:
    """Return the name of a place for use in a sentence.

    Examples
    --------
    >>> place_text("features.3"), place_text("3")
    ('features.3', 'activation 3')
    """
    return name if any(map(str.isalpha, name)) else f"activation {name}"


def functional_calls(where: Mapping[str, str]) -> str:
    """Describe where functional calls stand.

    Examples
    --------
    >>> functional_calls({"relu": "my_net.py:11, after conv1", "relu:1": "my_net.py:12"})
    'functional calls: relu at my_net.py:11, after conv1; relu:1 at my_net.py:12'
    """
    calls = [f"{site} at {place}" for site, place in where.items()]
    more = f"; and {len(calls) - 12} more" if len(calls) > 12 else ""
    return f"functional calls: {'; '.join(calls[:12])}{more}"


def value_text(entry: Standing, info: MeasureInfo) -> str:
    """Format a value with its standard error and its range over places or seeds.

    Examples
    --------
    >>> from .leaderboard import Standing
    >>> from .tables import MeasureInfo
    >>> replicates = tuple(0.8 + 0.0005 * k for k in (-1, 0, 1, 0))
    >>> known = {"unit": "samples", "status": "ok", "least": 0.55, "greatest": 0.95}
    >>> entry = Standing(0.8009, replicates, **known)
    >>> value_text(entry, MeasureInfo(probe="sites"))
    '0.8009 ± 0.0006 · layers 0.55–0.95'
    """
    if entry.status != "ok":
        return entry.status
    parts = [entry.text]
    if entry.over == "exact":
        parts[0] += " (exact)"
    elif entry.over.endswith("seeds"):
        parts[0] += f" ({entry.over})"
    if math.isfinite(entry.least) and entry.least < entry.greatest:
        noun = "seeds" if entry.over.endswith("seeds") else info.range_noun
        parts.append(f"{noun} {range_text([entry.least, entry.greatest], entry.error)}")
    return " · ".join(parts)


def error_legend(estimates: Iterable[Estimate]) -> str:
    """Return what ± is, or an empty text if no estimate has an error.

    Examples
    --------
    >>> from .estimates import Estimate
    >>> error_legend([Estimate(0.8, (0.7, 0.9), unit="3 seeds")])
    '± is how much a value would change with other seeds'
    """
    over_seeds = [each.unit.endswith("seeds") for each in estimates if each.error > 0]
    if not over_seeds:
        return ""
    others = "seeds" if all(over_seeds) else "samples of the same distribution"
    or_seeds = ", or seeds" if any(over_seeds) and not all(over_seeds) else ""
    return f"± is how much a value would change with other {others}{or_seeds}"


def unknown_errors(entries: Iterable[Mapping[str, Standing]]) -> str:
    """Name the measures with a value whose error is unknown, or return an empty text.

    Examples
    --------
    >>> from .leaderboard import Standing
    >>> exact = Standing(3.0, unit="exact", status="ok")
    >>> unknown_errors([{"affinity": Standing(0.8, status="ok"), "pathlength": exact}])
    'where ± is missing, the error is unknown: affinity'
    """
    names: list[str] = []
    for row in entries:
        names += [n for n, e in row.items() if e.status == "ok" and math.isnan(e.error)]
    return f"where ± is missing, the error is unknown: {', '.join(unique(names))}" if names else ""


def direction(more_means: str, scale: str = "") -> str:
    """Return a measure's direction as text, or how it depends on units.

    Examples
    --------
    >>> direction("less nonlinear"), direction("neither")
    ('↓ more nonlinear', 'no direction')
    >>> direction("more nonlinear", "grows with the logits")
    'grows with the logits'
    """
    if scale:
        return scale
    arrows = {"more nonlinear": "↑ more nonlinear", "less nonlinear": "↓ more nonlinear"}
    return arrows.get(more_means, "no direction")


def bounds_text(bounds: Sequence[float | None]) -> str:
    """Format the bounds of a measure. None means unbounded.

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
