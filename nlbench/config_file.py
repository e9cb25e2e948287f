"""TOML configuration files for ``nlbench run``."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from nlbench.errors import RequestError, nearest, shorten
from nlbench.options import Option
from nlbench.request import ExecutionOptions, Request, RunOptions, options_of
from nlbench.serialization.files import read_text, write_atomically

MAX_BYTES = 2**20


def read_config(path: Path) -> dict[str, Any]:
    """Read a configuration file and return its values keyed by field of `nlbench.request`.

    Its keys are the flags of ``nlbench run``: ``measures``, ``models`` (or ``model``), ``data``,
    ``weights``, ``seeds``, ``samples``, …; a table ``set`` contains options, such as
    ``affinity.shrinkage = "none"``, or nested tables of options.

    Raises
    ------
    nlbench.RequestError
        If the file can't be read, or a key or a value is invalid.
    """
    text = read_text(path, MAX_BYTES).removeprefix("\ufeff")
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not TOML: {shorten(error, 200)}") from error
    known: dict[str, tuple[str, Option]] = {}
    for kind in (Request, ExecutionOptions, RunOptions):
        for name, option in options_of(kind).items():
            known |= dict.fromkeys((*option.names, name), (name, option))
    values: dict[str, Any] = {}
    spellings: dict[str, str] = {}
    for key, value in content.items():
        if key not in known:
            raise RequestError(f"{path}: unknown key '{shorten(key)}'{nearest(key, known)}")
        name, option = known[key]
        if name in spellings:
            raise RequestError(f"{path}: '{spellings[name]}' and '{key}' are the same; keep one")
        spellings[name] = key
        values[name] = option.parse(value, f"{path}: {key}")
    return values


def write_request(path: Path, request: Request) -> None:
    """Write a request as a configuration file with which it can be repeated."""
    text = "# nlbench run --config with this file repeats the request\n" + to_toml(request)
    # A finished run may be read-only.
    if not path.is_file() or read_text(path) != text:
        write_atomically(path, text)


def to_toml(request: Request) -> str:
    """Return a request as TOML.

    Examples
    --------
    >>> to_toml(Request("r2", settings={"sites.batch": 8})).splitlines()[-2:]
    ['[set]', '"sites.batch" = 8']
    """
    import tomli_w

    content = {name: getattr(request, name) for name in options_of(Request)}
    settings = dict(content.pop("settings"))
    content = {name: list(v) if isinstance(v, tuple) else v for name, v in content.items()}
    return tomli_w.dumps({**content, "set": settings} if settings else content)
