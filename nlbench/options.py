"""Declaration of options, and validation of their values.

Options of measures, probes and datasets, flags of ``nlbench run``, keys in its configuration
file and arguments of `nlbench.Request` are all declared and validated with `Option`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nlbench.errors import RequestError, nearest, shorten
from nlbench.parsers import (
    MAX_INTEGER,
    SEEDS_TEXT,
    SIZE_TEXT,
    limited_seeds,
    parse_integer,
    parse_names,
    parse_number,
    parse_paths,
    parse_seeds,
    parse_settings,
    parse_size,
    unique,
)

OptionValue = bool | int | float | str

Options = Mapping[str, OptionValue]
"""Resolved option values, keyed by name."""

Settings = Mapping[str, OptionValue | str]
"""Option values set by the user, keyed by ``OWNER.OPTION``."""


@dataclass(frozen=True)
class Option:
    """A setting that a user may change.

    Parameters
    ----------
    default : bool, int, float or str
        Its type is the option's type; see `kind` for others.
    help : str
        One-line help text.
    choices : tuple of str
        The allowed values; if empty, any value is allowed.
    minimum, maximum : float
        Inclusive bounds for numbers; integers always have 64 bits.
    kind : str
        ``boolean``, ``integer``, ``number`` or ``text``, by default the type of the default; or
        ``size`` (in bytes), ``names``, ``paths``, ``seeds``, ``settings`` or ``literal`` (a
        number, a truth value or text).
    names : tuple of str
        Names as a flag and as a key in a configuration file; messages use the first.
    default_text : str
        Text for the default in ``--help``.
    group : str
        Registry group that contains the valid names.
    above_minimum : bool
        True if `minimum` itself is excluded.
    required_text : str
        Description of the expected value if an empty string is an error; otherwise empty.

    Examples
    --------
    >>> Option(8, "anchors of a path", minimum=2).parse("12")
    12
    """

    default: Any
    help: str = ""
    choices: tuple[str, ...] = ()
    minimum: float = -math.inf
    maximum: float = math.inf
    kind: str = ""
    names: tuple[str, ...] = ()
    default_text: str = ""
    group: str = ""
    above_minimum: bool = False
    required_text: str = ""

    def __post_init__(self) -> None:
        if not self.kind:
            object.__setattr__(self, "kind", _KIND_OF_TYPE.get(type(self.default), "text"))
        if self.kind == "integer":  # Tensors and records hold 64-bit integers.
            object.__setattr__(self, "minimum", max(self.minimum, -MAX_INTEGER))
            object.__setattr__(self, "maximum", min(self.maximum, MAX_INTEGER))
        if not self.default_text and self.default not in (None, ""):
            listed = self.default if isinstance(self.default, tuple) else (self.default,)
            text = "" if self.kind == "settings" else ",".join(map(str, listed))
            object.__setattr__(self, "default_text", text)

    @property
    def is_repeatable(self) -> bool:
        """True if the option's flag may be repeated."""
        return _KINDS[self.kind].read is not None

    def parse(self, value: object, label: str = "option") -> Any:
        """Validate a value, or its text, and convert it to the option's type.

        Raises
        ------
        nlbench.RequestError
            If the value has the wrong type, is out of bounds or is not among the choices.
        """
        kind = _KINDS[self.kind]
        try:
            return kind.convert(self, value, label)
        except (TypeError, ValueError) as error:
            if isinstance(error, RequestError):
                raise
            wrong = error.args[0] if isinstance(error, _WrongEntry) else value
            message = f"{label}: expected {kind.expected}, got {_value_text(wrong)}"
            raise RequestError(message) from None

    def parse_flags(self, texts: Sequence[str], label: str) -> Any:
        """Parse the values of a repeatable flag. Also raise if a glob matches no file."""
        read = _KINDS[self.kind].read
        assert read is not None
        return self.parse(read(texts, label), label)

    def _check_bounds(self, value: float, label: str) -> float:
        is_low = value <= self.minimum if self.above_minimum else value < self.minimum
        if is_low or value > self.maximum:
            message = f"{label}: {shorten(value)} is out of bounds, expected {self._bounds_text}"
            raise RequestError(message)
        return value

    @property
    def _bounds_text(self) -> str:
        low = f"more than {self.minimum:g}" if self.above_minimum else f"{self.minimum:g}"
        if self.minimum <= -MAX_INTEGER:
            return f"at most {self.maximum:g}"
        if self.maximum < MAX_INTEGER:
            return f"{low} to {self.maximum:g}"
        return low if self.above_minimum else f"at least {low}"

    def _boolean(self, value: object, label: str) -> bool:
        if isinstance(value, str) and value.strip().lower() in _TRUE_TEXTS | _FALSE_TEXTS:
            return value.strip().lower() in _TRUE_TEXTS
        if not isinstance(value, bool):
            raise TypeError
        return value

    def _integer(self, value: object, label: str) -> int:
        if isinstance(value, str):
            return int(self._check_bounds(parse_integer(value), label))
        if isinstance(value, bool) or not isinstance(value, int | float) or value % 1:
            raise TypeError
        return int(self._check_bounds(value, label))

    def _number(self, value: object, label: str) -> float:
        if isinstance(value, str):
            return self._check_bounds(parse_number(value), label)
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise TypeError
        return float(self._check_bounds(value, label))

    def _size(self, value: object, label: str) -> int:
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise TypeError
        return parse_size(value, label)

    def _text(self, value: object, label: str) -> str:
        if isinstance(value, bool) or not isinstance(value, str | int | float | Path):
            raise TypeError
        text = "" if value == Path() else str(value)
        if self.choices and text.strip() not in self.choices:
            hint = nearest(text.strip(), self.choices)
            raise RequestError(f"{label}: unknown '{shorten(text)}'{hint}")
        if "\0" in text:
            raise TypeError
        if self.required_text and not text:
            raise RequestError(f"{label}: expected {self.required_text}, got ''")
        return text.strip() if self.choices else text

    def _literal(self, value: object, label: str) -> OptionValue:
        """Convert text that is a number or a truth value. Other text stays text."""
        if not isinstance(value, OptionValue):
            raise TypeError
        if not isinstance(value, str):
            return value
        if value in ("true", "True", "false", "False"):
            return value in ("true", "True")
        for parse in (parse_integer, parse_number):
            with contextlib.suppress(ValueError):
                return parse(value)
        return value

    def _names(self, value: object, label: str) -> tuple[str, ...]:
        if isinstance(value, str):
            value = parse_names(value) if self.kind == "names" else [value]
        if not isinstance(value, list | tuple):
            raise TypeError
        for entry in value:
            if not isinstance(entry, str) or not entry or "\0" in entry:
                raise _WrongEntry(entry)
        if not value:
            raise RequestError(f"{label}: expected at least one")
        return tuple(unique(value))

    def _seeds(self, value: object, label: str) -> tuple[int, ...]:
        if isinstance(value, str):
            return parse_seeds([value], label)
        entries: Sequence[Any] = value if isinstance(value, list | tuple | range) else [value]
        for entry in entries:
            if not isinstance(entry, int) or isinstance(entry, bool):
                raise _WrongEntry(entry)
            self._check_bounds(entry, label)
        if not entries:
            raise RequestError(f"{label}: expected at least one")
        return limited_seeds(entries, label)

    def _settings(self, value: object, label: str) -> dict[str, OptionValue]:
        """Flatten nested tables into a dictionary with dotted names."""
        if not isinstance(value, Mapping):
            raise TypeError
        settings: dict[str, OptionValue] = {}
        tables: list[tuple[str, Mapping[str, object]]] = [("", value)]
        while tables:
            prefix, table = tables.pop(0)
            if prefix.count(".") > 8:
                raise RequestError(f"{label}: nested too deeply, expected OWNER.OPTION")
            for key, entry in table.items():
                name = f"{prefix}.{key}" if prefix else str(key)
                where = f"{label}: {shorten(name)}"
                if isinstance(entry, Mapping):
                    tables.append((name, entry))
                elif name in settings:
                    raise RequestError(f"{where} is set twice; keep one")
                elif isinstance(entry, OptionValue):
                    settings[name] = entry
                else:
                    expected = "text, a number or true"
                    raise RequestError(f"{where}: expected {expected}, got {_value_text(entry)}")
        return settings


class _WrongEntry(ValueError):
    """Wrong type of an entry in a list."""


@dataclass(frozen=True)
class _Kind:
    """Description and converter for values of a kind, and the parser for repeatable flags."""

    expected: str
    convert: Callable[[Option, Any, str], Any]
    read: Callable[[Sequence[str], str], Any] | None = None


def _read_paths(texts: Sequence[str], label: str) -> list[str]:
    return [path for text in texts for path in parse_paths(text, label)] or [""]


_KINDS: Mapping[str, _Kind] = {
    "boolean": _Kind("true or false", Option._boolean),
    "integer": _Kind("a whole number", Option._integer),
    "number": _Kind("a number", Option._number),
    "text": _Kind("text", Option._text),
    "size": _Kind(SIZE_TEXT, Option._size),
    "names": _Kind("names", Option._names, lambda texts, _: parse_names(",".join(texts)) or [""]),
    "paths": _Kind("trained, init, auto or a checkpoint's path", Option._names, _read_paths),
    "seeds": _Kind(SEEDS_TEXT, Option._seeds, parse_seeds),
    "settings": _Kind("a table", Option._settings, parse_settings),
    "literal": _Kind("text, a number or true", Option._literal),
}
_KIND_OF_TYPE = {bool: "boolean", int: "integer", float: "number", str: "text"}
_TRUE_TEXTS = {"true", "yes", "on", "1"}
_FALSE_TEXTS = {"false", "no", "off", "0"}


def _value_text(value: object) -> str:
    if isinstance(value, str):
        return f"'{shorten(value)}'"
    if isinstance(value, Mapping):
        return "a table"
    return "a list" if isinstance(value, list | tuple) else shorten(value)


def resolve_options(
    options: Mapping[str, Option], settings: Settings, *, owner: str
) -> dict[str, OptionValue]:
    """Return the value of each option, set or default, in declaration order.

    Examples
    --------
    >>> resolve_options({"ridge": Option(1e-6)}, {"ridge": "0.1"}, owner="affinity")
    {'ridge': 0.1}
    """
    for name in settings:
        if name not in options:
            raise RequestError(f"{owner} has no option '{shorten(name)}'{nearest(name, options)}")
    return {
        name: option.parse(settings[name], f"{owner}.{name}")
        if name in settings
        else option.default
        for name, option in options.items()
    }
