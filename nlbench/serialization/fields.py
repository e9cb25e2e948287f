"""Dataclasses as JSON has them, and back: their fields and annotations are what reading checks.

What a file holds is declared once, as a dataclass. `written` makes plain content of it; `read`
makes it of content that anybody may have written, or says which field isn't as it was declared.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass
from functools import lru_cache, partial
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

from nlbench.errors import shown

__all__ = ["others", "read", "written"]

T = TypeVar("T")
Reader = Callable[[Any, str], Any]

_OTHERS = "others"


def others() -> Any:
    """Make the field that takes what a dataclass has no field for, and gives it back."""
    return field(default_factory=dict, metadata={_OTHERS: True})


def written(value: object) -> Any:
    """Give a dataclass, or what holds some, as JSON has it: in the order of its fields.

    A field that is None by default is left out where it is.

    Examples
    --------
    >>> from nlbench.citation import Source
    >>> written({"source": Source("Me, 2026"), "seeds": (0, 1)})
    {'source': {'citation': 'Me, 2026', 'equation': '', 'bibtex': ''}, 'seeds': [0, 1]}
    """
    if isinstance(value, str | int | float | None):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        content: dict[str, Any] = {}
        beside: Mapping[str, Any] = {}
        for one in fields(value):
            given = getattr(value, one.name)
            if _OTHERS in one.metadata:
                beside = given
            elif given is not None or one.default is not None:
                content[one.name] = written(given)
        return content | written(beside)
    if isinstance(value, Mapping):
        return {name: written(inner) for name, inner in value.items()}
    return [written(inner) for inner in value] if isinstance(value, list | tuple) else value


def read(kind: type[T], content: object, what: str) -> T:
    """Make a dataclass of plain content.

    A field may be missing where its default says nothing: None, zero or empty.

    Parameters
    ----------
    kind : type
        The dataclass. Its annotations are of ``str``, ``bool``, ``int``, ``float`` (which may be
        given as whole numbers), ``Any``, literals, dataclasses, typed dictionaries (which may have
        more), and mappings, sequences, tuples and unions of these.
    content : object
        What JSON gave.
    what : str
        What the message calls it.

    Raises
    ------
    ValueError
        Naming the field that is missing, unknown or of another type.

    Examples
    --------
    >>> from nlbench.citation import Source
    >>> read(Source, {"citation": "Me, 2026"}, "source").citation
    'Me, 2026'
    >>> read(Source, {"citation": 3}, "source")
    Traceback (most recent call last):
    ValueError: source.citation is a int, expected a text
    """
    declared: Any = kind
    made: T = _reader(declared)(content, what)
    return made


# What JSON gives for each plain type, and how a message calls it.
_JSON: Mapping[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    dict: ((dict,), "an object"),
    float: ((int, float), "a number"),
    int: ((int,), "a whole number"),
    list: ((list, tuple), "a list"),
    str: ((str,), "a text"),
}


def _is(value: object, plain: Any) -> bool:
    return isinstance(value, _JSON[plain][0]) and (plain is bool or not isinstance(value, bool))


def _checked(value: Any, plain: Any, where: str) -> Any:
    if not _is(value, plain):
        expected = _JSON[plain][1]
        raise ValueError(f"{where} is a {type(value).__name__}, expected {expected}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{where} is out of bounds")
    return value


@lru_cache(maxsize=256)
def _reader(annotation: Any) -> Reader:
    """What reads a value of an annotated type; it is told where the value stands."""
    origin, inner = get_origin(annotation) or annotation, get_args(annotation)
    if origin in (Any, object):
        return lambda value, where: value
    if origin in (Union, types.UnionType):
        return _union(inner)
    if origin is Literal:
        return partial(_chosen, inner)
    plain = _plain(origin)
    if is_dataclass(origin) or is_typeddict(origin):
        return _object(origin)
    if plain is dict:
        return partial(_mapping, _reader(inner[1]))
    if origin is tuple and inner[-1] is not ...:
        return partial(_row, [_reader(one) for one in inner])
    if plain is list:
        return partial(_sequence, _reader(inner[0]))
    return lambda value, where: _checked(value, plain, where)


def _plain(annotation: Any) -> type:
    """Which of JSON's types an annotated one is written as."""
    origin = get_origin(annotation) or annotation
    if is_dataclass(origin) or is_typeddict(origin) or origin is Mapping:
        return dict
    if origin in (Sequence, list, tuple):
        return list
    plain: type = str if origin is Literal else origin
    return plain


def _union(kinds: Sequence[Any]) -> Reader:
    readers = [(_plain(one), _reader(one)) for one in kinds if one is not type(None)]
    is_optional = len(readers) < len(kinds)

    def read(value: Any, where: str) -> Any:
        if value is None and is_optional:
            return None
        for plain, reader in readers:
            if _is(value, plain):
                return reader(value, where)
        expected = " or ".join(_JSON[plain][1] for plain, _ in readers)
        raise ValueError(f"{where} is a {type(value).__name__}, expected {expected}")

    return read


def _chosen(choices: Sequence[str], value: Any, where: str) -> Any:
    if value not in choices:
        raise ValueError(f"{where} is '{shown(value, 40)}', expected {' or '.join(choices)}")
    return value


def _mapping(one: Reader, value: Any, where: str) -> Any:
    entries = _checked(value, dict, where).items()
    return {name: one(entry, f"{where}.{name}") for name, entry in entries}


def _sequence(one: Reader, value: Any, where: str) -> Any:
    entries = enumerate(_checked(value, list, where))
    return tuple([one(entry, f"{where}.{place}") for place, entry in entries])


def _row(readers: Sequence[Reader], value: Any, where: str) -> Any:
    if len(_checked(value, list, where)) != len(readers):
        raise ValueError(f"{where} has {len(value)} entries, expected {len(readers)}")
    return tuple(one(entry, where) for one, entry in zip(readers, value, strict=True))


def _object(kind: Any) -> Reader:
    """What reads a dataclass or a typed dictionary."""
    hints, is_open = get_type_hints(kind), is_typeddict(kind)
    entries = () if is_open else fields(kind)
    beside = next((one.name for one in entries if _OTHERS in one.metadata), "")
    rest = _reader(hints.pop(beside, Any))
    readers = {name: _reader(hint) for name, hint in hints.items()}
    needed = [one.name for one in entries if one.name != beside and _says(one)]

    def read(value: Any, where: str) -> Any:
        _checked(value, dict, where)
        for name in needed:
            if name not in value:
                raise ValueError(f"{where} has no '{name}'")
        found = {n: readers[n](x, f"{where}.{n}") for n, x in value.items() if n in readers}
        if is_open:
            return {**value, **found}
        left = {name: entry for name, entry in value.items() if name not in readers}
        if beside:
            return kind(**found, **{beside: rest(left, where)})
        if left:
            raise ValueError(f"{where} has an unknown '{shown(next(iter(left)))}'")
        return kind(**found)

    return read


def _says(one: Field[Any]) -> bool:
    """Whether a field has no default, or one that says something."""
    default = one.default if one.default_factory is MISSING else one.default_factory()
    return default is MISSING or bool(default)
