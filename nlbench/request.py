"""What a run is asked for, and how it is to be carried out."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nlbench.errors import RequestError, nearest
from nlbench.files import write_atomically
from nlbench.options import OptionValue

__all__ = [
    "EXECUTORS",
    "PRECISIONS",
    "RERUN",
    "ExecutionOptions",
    "Request",
    "Settings",
    "parse_size",
    "read_config",
    "to_toml",
    "write_request",
]


Settings = Mapping[str, OptionValue | str]

PRECISIONS = ("native", "tf32", "float64", "bfloat16", "float16")
RERUN = ("failed", "never", "all")
EXECUTORS = ("serial", "processes", "dask")


@dataclass(frozen=True)
class Request:
    """What a run is asked for: all that decides its numbers.

    Parameters
    ----------
    measures, models : tuple of str
        Registered names or globs.
    data : tuple of str
        Registered names or globs.
    weights : tuple of str
        Each ``auto``, ``trained``, ``init`` or a checkpoint's path; one text will do.
    seeds : tuple of int
    samples : int
        How many samples of the split; 0: all.
    split : {"test", "train"}
    device : str
        ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.
    settings : mapping of str to value
        Options of measures, probes and datasets: ``affinity.shrinkage`` to ``none``.
    precision : {"native", "tf32", "float64", "bfloat16", "float16"}
        ``native``: the weights' own type and no short cuts. ``tf32`` lets NVIDIA's tensor
        cores round; the last two run the model under autocast. ``float64`` converts model
        and inputs.

    Examples
    --------
    >>> Request(("affinity",), ("vgg8",), ("digits",), weights="init").weights
    ('init',)
    """

    measures: tuple[str, ...]
    models: tuple[str, ...]
    data: tuple[str, ...]
    weights: tuple[str, ...] = ("auto",)
    seeds: tuple[int, ...] = (0,)
    samples: int = 512
    split: str = "test"
    device: str = "auto"
    settings: Settings = field(default_factory=dict)
    precision: str = "native"

    def __post_init__(self) -> None:
        if isinstance(self.weights, str):
            object.__setattr__(self, "weights", (self.weights,))


@dataclass(frozen=True)
class ExecutionOptions:
    """How a run is carried out; none of it decides a number.

    Parameters
    ----------
    rerun : {"failed", "never", "all"}
        Which of the recorded cells are measured again.
    timeout : float, optional
        Seconds for a cell: its measure's own time, with the loading and the pass that it
        shares. Cells are then measured in a process of their own.
    memory : int, optional
        Bytes that a pass may use; by default a sensible share of what is free.
    executor : {"serial", "processes", "dask"}
    workers : int, optional
        How many at a time; by default what the machine or the cluster has.
    address : str
        Of the Dask scheduler; empty: a cluster on this machine.
    threads : int, optional
        PyTorch's threads for each cell; by default four, or what the machine has. The last
        bits of a sum may depend on it, so it doesn't depend on the number of workers.

    Raises
    ------
    nlbench.RequestError
        If a value is none of those, or two don't go together.

    Examples
    --------
    >>> ExecutionOptions(executor="process")
    Traceback (most recent call last):
    nlbench.errors.RequestError: --executor: unknown 'process'; did you mean 'processes'?
    """

    rerun: str = "failed"
    timeout: float | None = None
    memory: int | None = None
    executor: str = "serial"
    workers: int | None = None
    address: str = ""
    threads: int | None = None

    def __post_init__(self) -> None:
        for option, value, known in (
            ("rerun", self.rerun, RERUN),
            ("executor", self.executor, EXECUTORS),
        ):
            if value not in known:
                raise RequestError(f"--{option}: unknown '{value}'{nearest(value, known)}")
        for option, number in (
            ("timeout", self.timeout),
            ("memory", self.memory),
            ("workers", self.workers),
            ("threads", self.threads),
        ):
            if number is not None and not 0 < number < 1e15:
                raise RequestError(f"--{option}: {number} is out of bounds, expected more than 0")
        if self.executor == "serial" and (self.workers or 1) > 1:
            raise RequestError("--workers: serial is one at a time; add --executor processes")
        if self.address and self.executor != "dask":
            raise RequestError("--address: only a Dask scheduler has one; add --executor dask")


_LISTS = ("measures", "models", "data", "weights", "seeds")
_KINDS: Mapping[str, tuple[type, ...]] = {
    "samples": (int,),
    "split": (str,),
    "device": (str,),
    "precision": (str,),
    "sites": (str,),
    "rerun": (str,),
    "timeout": (int, float),
    "memory": (int, str),
    "executor": (str,),
    "workers": (int,),
    "address": (str,),
    "threads": (int,),
    "progress": (str,),
    "out": (str,),
    "report": (bool,),
}
_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def read_config(path: Path) -> dict[str, Any]:
    """Read what a configuration file asks for.

    Parameters
    ----------
    path : Path
        TOML. Its keys are the flags of ``nlbench run``: ``measures``, ``models`` (or
        ``model``), ``data``, ``weights``, ``seeds``, ``samples``, …; a table ``set`` holds
        options, as ``affinity.shrinkage = "none"`` or in tables of its own.

    Returns
    -------
    dict
        Lists as tuples; ``settings`` from names such as ``affinity.shrinkage`` to values.

    Raises
    ------
    nlbench.RequestError
        If it can't be read, or a key or a value in it isn't known.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        what = getattr(error, "strerror", None) or error
        raise RequestError(f"can't read {path}: {what}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise RequestError(f"{path} is no TOML: {' '.join(str(error).split())}") from error
    if "model" in content:
        if "models" in content:
            raise RequestError(f"{path}: 'model' and 'models' are the same; keep one")
        content["models"] = content.pop("model")
    read: dict[str, Any] = {}
    for key, value in content.items():
        if key in _LISTS:
            read[key] = _list(key, value, path)
        elif key == "set":
            read["settings"] = _settings(value, path)
        elif key in _KINDS:
            kinds = _KINDS[key]
            is_right = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
            if not is_right:
                raise RequestError(f"{path}: {key}: expected {_WORDS[kinds[0]]}, got {value!r}")
            read[key] = value
        else:
            raise RequestError(f"{path}: unknown key '{key}'{nearest(key, _known())}")
    return read


def _known() -> tuple[str, ...]:
    return (*_LISTS, *_KINDS, "set")


def _list(key: str, value: object, path: Path) -> tuple[Any, ...]:
    kind = int if key == "seeds" else str
    entries = value if isinstance(value, list) else [value]
    if isinstance(value, str) and kind is str and key != "weights":
        entries = [part.strip() for part in value.split(",")]
    for entry in entries:
        if not isinstance(entry, kind) or isinstance(entry, bool) or entry == "":
            what = "whole numbers" if kind is int else "names"
            raise RequestError(f"{path}: {key}: expected {what}, got {entry!r}")
        if isinstance(entry, int) and not 0 <= entry < 2**63:
            raise RequestError(f"{path}: seeds: {entry} is out of bounds, expected 0 or more")
    if not entries:
        raise RequestError(f"{path}: {key}: expected at least one")
    return tuple(dict.fromkeys(entries))


def _settings(value: object, path: Path, prefix: str = "") -> dict[str, OptionValue]:
    if not isinstance(value, dict):
        raise RequestError(f"{path}: {prefix or 'set'}: expected a table, got {value!r}")
    settings: dict[str, OptionValue] = {}
    for key, entry in value.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(entry, dict):
            settings |= _settings(entry, path, name)
        elif isinstance(entry, bool | int | float | str):
            settings[name] = entry
        else:
            raise RequestError(f"{path}: {name}: expected text, a number or true, got {entry!r}")
    return settings


def write_request(path: Path, request: Request) -> None:
    """Write a request so that ``nlbench run --config`` asks for the same again."""
    text = "# nlbench run --config with this file asks for the same again\n" + to_toml(request)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_atomically(path, text)


def to_toml(request: Request) -> str:
    """Text of a request.

    Examples
    --------
    >>> print(to_toml(Request(("r2",), ("vgg8",), ("digits",), settings={"sites.batch": 8})))
    measures = ["r2"]
    models = ["vgg8"]
    data = ["digits"]
    weights = ["auto"]
    seeds = [0]
    samples = 512
    split = "test"
    device = "auto"
    precision = "native"
    <BLANKLINE>
    [set]
    "sites.batch" = 8
    <BLANKLINE>
    """
    lists = {name: list(getattr(request, name)) for name in _LISTS}
    single = {n: getattr(request, n) for n in ("samples", "split", "device", "precision")}
    lines = [f"{name} = {_value(value)}" for name, value in {**lists, **single}.items()]
    if request.settings:
        lines += ["", "[set]"]
        lines += [f"{_text(key)} = {_value(value)}" for key, value in request.settings.items()]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_value(entry) for entry in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: "inf", -math.inf: "-inf"}.get(value, "nan")
    return repr(value)


def _text(text: str) -> str:
    # TOML's basic strings are JSON's, but for one control character.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


_SIZE = re.compile(r"([0-9.]+)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_size(text: str | int, label: str = "--memory") -> int:
    """Read a number of bytes.

    Raises
    ------
    nlbench.RequestError
        If it is none.

    Examples
    --------
    >>> parse_size("4GB"), parse_size("1.5 MiB"), parse_size("100")
    (4000000000, 1572864, 100)
    """
    found = _SIZE.fullmatch(str(text).strip())
    try:
        if found is None:
            raise ValueError
        number, unit, binary = found.groups()
        size = float(number) * (1024 if binary else 1000) ** " kmgt".index(unit.lower() or " ")
    except ValueError:
        raise RequestError(f"{label}: expected a size such as 4GB, got '{text}'") from None
    if not 1 <= size < 1e15:
        raise RequestError(f"{label}: {text} is out of bounds, expected 1 byte to 1000 TB")
    return int(size)
