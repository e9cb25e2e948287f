"""Options: what can be set, its default, and how a given value is checked.

How ``--set`` is read stands in `nlbench.request`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from nlbench.errors import RequestError, nearest, shown

__all__ = ["Option", "OptionValue", "parse_number", "resolve_options"]

OptionValue = bool | int | float | str


@dataclass(frozen=True)
class Option:
    """One thing that a user may set.

    Parameters
    ----------
    default : bool, int, float or str
        Its type is the option's type.
    help : str
        One line.
    choices : tuple of str
        The values allowed, if they are few.
    minimum, maximum : float
        Bounds of a number, both included.

    Examples
    --------
    >>> Option(8, "anchors of a path", minimum=2).parse("12")
    12
    """

    default: OptionValue
    help: str = ""
    choices: tuple[str, ...] = ()
    minimum: float = -math.inf
    maximum: float = math.inf

    def parse(self, given: OptionValue | str, label: str = "option") -> OptionValue:
        """Check a given value and bring it to the option's type.

        Raises
        ------
        nlbench.RequestError
            If it is of another type, out of bounds or not among the choices.
        """
        value = self._convert(given, label)
        if self.choices and value not in self.choices:
            raise RequestError(
                f"{label}: unknown value '{shown(value)}'{nearest(str(value), self.choices)}"
            )
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and not self.minimum <= float(value) <= self.maximum:
            bounds = f"{self.minimum:g} to {self.maximum:g}"
            raise RequestError(f"{label}: {shown(value)} is out of bounds, expected {bounds}")
        return value

    def _convert(self, given: OptionValue | str, label: str) -> OptionValue:
        kind = type(self.default)
        problem = RequestError(f"{label}: expected {_KINDS[kind]}, got '{shown(given)}'")
        try:
            text = str(given).strip()
        except ValueError:  # a whole number of thousands of digits
            raise problem from None
        if kind is bool:
            if text.lower() in _TRUE | _FALSE:
                return text.lower() in _TRUE
            raise problem
        if kind is str:
            return text
        if kind is float:
            return parse_number(text, False, label)
        with contextlib.suppress(ValueError):
            if (number := float(text)).is_integer():
                return int(number)
        raise problem


def parse_number(text: str, whole: bool, label: str) -> int | float:
    """Read a number that somebody typed.

    Parameters
    ----------
    text : str
    whole : bool
        Whether it has to be a whole one, in digits alone.
    label : str
        What the message calls it.

    Raises
    ------
    nlbench.RequestError
        If it is none.

    Examples
    --------
    >>> parse_number("64", True, "--samples"), parse_number("1e-3", False, "--rate")
    (64, 0.001)
    """
    text = text.strip()
    problem = RequestError(
        f"{label}: expected {_KINDS[int if whole else float]}, got '{shown(text)}'"
    )
    if whole:
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdecimal()):
            raise problem
        # Python reads only so many digits, and no bound is as wide as these.
        return int(text[:40])
    try:
        number = float(text)
    except ValueError:
        raise problem from None
    if math.isnan(number):
        raise problem
    return number


_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
}
_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}


def resolve_options(
    options: Mapping[str, Option], given: Mapping[str, OptionValue | str], *, owner: str
) -> dict[str, OptionValue]:
    """Defaults, overridden by what was given, in the order of the declaration.

    Parameters
    ----------
    options : mapping of str to Option
        What can be set.
    given : mapping of str to value
        What was set; text is converted.
    owner : str
        Whose options they are, for the message.

    Raises
    ------
    nlbench.RequestError
        For an unknown name or a value that doesn't fit.

    Examples
    --------
    >>> resolve_options({"ridge": Option(1e-6)}, {"ridge": "0.1"}, owner="affinity")
    {'ridge': 0.1}
    """
    for name in given:
        if name not in options:
            raise RequestError(f"{owner} has no option '{shown(name)}'{nearest(name, options)}")
    return {
        name: option.parse(given[name], f"{owner}.{name}") if name in given else option.default
        for name, option in options.items()
    }
