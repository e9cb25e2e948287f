"""Conversion of dataclasses to JSON types and back, validated by their annotations."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass
from functools import lru_cache, partial
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

from nlbench.errors import shorten

T = TypeVar("T")
Reader = Callable[[Any, str], Any]

_EXTRA = "extra"
_SHARED = "shared"
_MAX_SHARED = 256  # Distinct values per field.

SHARED: Mapping[str, bool] = {_SHARED: True}
"""Metadata for a field whose equal values become a single object when they are read.

Thousands of records have the same machine and measure. Separate objects for each record would take
most of the time and memory for reading them.
"""


def extra_fields() -> Any:
    """Create a field that collects the unknown entries of an object when it is read."""
    return field(default_factory=dict, metadata={_EXTRA: True})


def to_plain(value: object) -> Any:
    """Convert dataclasses, mappings and sequences to JSON types.

    A field that is None is left out if None is its default.

    Examples
    --------
    >>> from nlbench.citation import Source
    >>> to_plain({"source": Source("Me, 2026"), "seeds": (0, 1)})
    {'source': {'citation': 'Me, 2026', 'equation': '', 'bibtex': ''}, 'seeds': [0, 1]}
    """
    if isinstance(value, str | int | float | None):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        content: dict[str, Any] = {}
        extra: Mapping[str, Any] = {}
        for entry in fields(value):
            item = getattr(value, entry.name)
            if _EXTRA in entry.metadata:
                extra = item
            elif item is not None or entry.default is not None:
                content[entry.name] = to_plain(item)
        return content | to_plain(extra)
    if isinstance(value, Mapping):
        return {name: to_plain(item) for name, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, list | tuple) else value


def from_plain(kind: type[T], content: object, label: str) -> T:
    """Create a dataclass from JSON types, called `label` in messages.

    A field may be missing if its default is None, zero or empty. Annotations consist of ``str``,
    ``bool``, ``int``, ``float`` (which accepts integers), ``Any``, literals, dataclasses, typed
    dictionaries (which accept additional keys), and mappings, sequences, tuples and unions of
    these. Raise ValueError, which names the field, if one is missing, unknown or of the wrong type.

    Examples
    --------
    >>> from nlbench.citation import Source
    >>> from_plain(Source, {"citation": "Me, 2026"}, "source").citation
    'Me, 2026'
    >>> from_plain(Source, {"citation": 3}, "source")
    Traceback (most recent call last):
    ValueError: source.citation is of type int, expected a string
    """
    annotation: Any = kind
    return _reader(annotation)(content, label)


# Python types for each JSON type, and its name in messages.
_JSON: Mapping[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    dict: ((dict,), "an object"),
    float: ((int, float), "a number"),
    int: ((int,), "a whole number"),
    list: ((list, tuple), "a list"),
    str: ((str,), "a string"),
}


def _has_json_type(value: object, plain: Any) -> bool:
    return isinstance(value, _JSON[plain][0]) and (plain is bool or not isinstance(value, bool))


def _check_type(value: Any, plain: Any, where: str) -> Any:
    if not _has_json_type(value, plain):
        expected = _JSON[plain][1]
        raise ValueError(f"{where} is of type {type(value).__name__}, expected {expected}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{where} is out of bounds")
    return value


@lru_cache(maxsize=256)
def _reader(annotation: Any) -> Reader:
    """Return the function that reads a value of an annotated type."""
    origin = get_origin(annotation) or annotation
    inner = get_args(annotation)
    if origin in (Any, object):
        return lambda value, where: value
    if origin in (Union, types.UnionType):
        return _union_reader(inner)
    if origin is Literal:
        return partial(_read_choice, inner)
    plain = _json_type(origin)
    if is_dataclass(origin) or is_typeddict(origin):
        return _object_reader(origin)
    if plain is dict:
        return partial(_read_mapping, _reader(inner[1]))
    if origin is tuple and inner[-1] is not ...:
        return partial(_read_tuple, [_reader(item) for item in inner])
    if plain is list:
        return partial(_read_sequence, _reader(inner[0]))
    return partial(_read_scalar, plain)


def _json_type(annotation: Any) -> type:
    """Return the JSON type that corresponds to an annotation."""
    origin = get_origin(annotation) or annotation
    if is_dataclass(origin) or is_typeddict(origin) or origin is Mapping:
        return dict
    if origin in (Sequence, list, tuple):
        return list
    return str if origin is Literal else origin


def _union_reader(kinds: Sequence[Any]) -> Reader:
    readers = [(_json_type(kind), _reader(kind)) for kind in kinds if kind is not type(None)]
    is_optional = len(readers) < len(kinds)

    def read(value: Any, where: str) -> Any:
        if value is None and is_optional:
            return None
        for plain, reader in readers:
            if _has_json_type(value, plain):
                return reader(value, where)
        expected = " or ".join(_JSON[plain][1] for plain, _ in readers)
        raise ValueError(f"{where} is of type {type(value).__name__}, expected {expected}")

    return read


def _read_scalar(plain: Any, value: Any, where: str) -> Any:
    is_exact = type(value) is plain and plain is not int  # Fast path for most values.
    return value if is_exact else _check_type(value, plain, where)


def _read_choice(choices: Sequence[str], value: Any, where: str) -> Any:
    if value not in choices:
        raise ValueError(f"{where} is '{shorten(value, 40)}', expected {' or '.join(choices)}")
    return value


def _read_mapping(reader: Reader, value: Any, where: str) -> Any:
    items = _check_type(value, dict, where).items()
    # Thousands of records repeat these names.
    return {sys.intern(str(name)): reader(item, f"{where}.{name}") for name, item in items}


def _read_sequence(reader: Reader, value: Any, where: str) -> Any:
    items = enumerate(_check_type(value, list, where))
    return tuple([reader(item, f"{where}.{place}") for place, item in items])


def _read_tuple(readers: Sequence[Reader], value: Any, where: str) -> Any:
    if len(_check_type(value, list, where)) != len(readers):
        raise ValueError(f"{where} has {len(value)} entries, expected {len(readers)}")
    return tuple(reader(item, where) for reader, item in zip(readers, value, strict=True))


def _object_reader(kind: Any) -> Reader:
    """Return the function that reads a dataclass or a typed dictionary."""
    hints = get_type_hints(kind)
    is_open = is_typeddict(kind)
    entries = () if is_open else fields(kind)
    extra = next((entry.name for entry in entries if _EXTRA in entry.metadata), "")
    read_extra = _reader(hints.pop(extra, Any))
    readers = {name: _reader(hint) for name, hint in hints.items()}
    for entry in entries:
        if _SHARED in entry.metadata:
            readers[entry.name] = _shared_reader(readers[entry.name])
    required = [entry.name for entry in entries if entry.name != extra and _is_required(entry)]
    if is_open:
        required = sorted(kind.__required_keys__)

    def read(value: Any, where: str) -> Any:
        _check_type(value, dict, where)
        for name in required:
            if name not in value:
                raise ValueError(f"{where} has no '{name}'")
        known = {n: readers[n](x, f"{where}.{n}") for n, x in value.items() if n in readers}
        if is_open:
            return {**value, **known}
        unknown = {name: item for name, item in value.items() if name not in readers}
        if extra:
            return kind(**known, **{extra: read_extra(unknown, where)})
        if unknown:
            raise ValueError(f"{where} has an unknown '{shorten(next(iter(unknown)))}'")
        return kind(**known)

    return read


def _shared_reader(read: Reader) -> Reader:
    objects: dict[str, Any] = {}

    def read_shared(value: Any, where: str) -> Any:
        text = repr(value)  # Unlike equality, it distinguishes 1, 1.0 and True.
        if text not in objects:
            if len(objects) == _MAX_SHARED:
                objects.clear()
            objects[text] = read(value, where)
        return objects[text]

    return read_shared


def _is_required(entry: Field[Any]) -> bool:
    default = entry.default if entry.default_factory is MISSING else entry.default_factory()
    return default is MISSING or bool(default)
