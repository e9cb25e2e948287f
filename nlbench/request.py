"""What a run is asked for, and how it is to be carried out.

Each thing that can be asked for is one field of a dataclass, with its help, bounds and names. The
flags of ``nlbench run``, the keys of a configuration file and the arguments from Python are all
read by it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from nlbench.errors import RequestError, nearest, shown
from nlbench.options import OptionValue, parse_number

__all__ = [
    "EXECUTORS",
    "PRECISIONS",
    "RERUN",
    "ExecutionOptions",
    "Flag",
    "Request",
    "RunOptions",
    "Settings",
    "flags_of",
    "parse_names",
    "parse_seeds",
    "parse_settings",
    "parse_size",
    "read_config",
    "to_toml",
    "write_request",
]


Settings = Mapping[str, OptionValue | str]

PRECISIONS = ("native", "tf32", "float64", "bfloat16", "float16")
RERUN = ("failed", "never", "all")
EXECUTORS = ("serial", "processes", "dask")
PROGRESS = ("auto", "rich", "plain", "none")

LARGEST = 2**63 - 1
MOST_SEEDS = 100_000

Kind = Literal[
    "names", "seeds", "paths", "text", "choice", "whole", "number", "size", "yes", "settings"
]


@dataclass(frozen=True)
class Flag:
    """How one thing is asked for: on the command line, in a file and from Python.

    Parameters
    ----------
    help : str
        What it is, for ``--help``.
    kind : str
        What a value of it is.
    names : tuple of str
        What it is called in flags and files, the first in messages.
    default : str
        What ``--help`` says of its default.
    choices : tuple of str
        All values, where they are few.
    minimum, maximum : float
        Bounds of a number, both included.
    group : str
        Group of the registry that its names are of.
    is_exclusive : bool
        Whether a number has to be more than `minimum`.
    refused_empty : str
        What is expected in place of an empty text, where one is refused.

    Examples
    --------
    >>> samples = flags_of(Request)["samples"]
    >>> samples.of_text("64", "--samples"), samples.checked(64, "samples")
    (64, 64)
    """

    help: str
    kind: Kind
    names: tuple[str, ...]
    default: str = ""
    choices: tuple[str, ...] = ()
    minimum: float = 0
    maximum: float = LARGEST
    group: str = ""
    is_exclusive: bool = False
    refused_empty: str = ""

    @property
    def is_repeatable(self) -> bool:
        """Whether it may be given several times."""
        return self.kind in ("names", "seeds", "paths", "settings")

    def of_text(self, given: str | Sequence[str], label: str) -> Any:
        """Read what the command line gives.

        Parameters
        ----------
        given : str, or sequence of str if `is_repeatable`
        label : str
            What the message calls it.

        Raises
        ------
        nlbench.RequestError
            If it can't be read, is out of bounds or isn't among the choices.
        """
        if not isinstance(given, str):
            if self.kind == "seeds":
                return parse_seeds(given, label)
            if self.kind == "settings":
                return parse_settings(given, label)
            is_path = self.kind == "paths"
            split = (_paths_of(text, label) if is_path else parse_names(text) for text in given)
            return self.checked(list(itertools.chain.from_iterable(split)) or [""], label)
        if self.kind in ("whole", "number"):
            return self.checked(parse_number(given, self.kind == "whole", label), label)
        return self.checked(given, label)

    def checked(self, value: object, label: str) -> Any:
        """Check a value of a file or from Python, and give it as it is kept.

        Raises
        ------
        nlbench.RequestError
            As of `of_text`.
        """
        match self.kind:
            case "names" | "paths":
                return self._names(value, label)
            case "seeds":
                return self._seeds(value, label)
            case "settings":
                return _settings(value, label)
            case "size":
                if isinstance(value, str | int) and not isinstance(value, bool):
                    return parse_size(value, label)
            case "yes":
                if isinstance(value, bool):
                    return value
            case "whole":
                if isinstance(value, int) and not isinstance(value, bool):
                    return self._within(value, label)
            case "number":
                if isinstance(value, int | float) and not isinstance(value, bool):
                    return self._within(value, label)
            case "choice":
                if isinstance(value, str) and value in self.choices:
                    return value
                if isinstance(value, str):
                    hint = nearest(value, self.choices)
                    raise RequestError(f"{label}: unknown '{shown(value)}'{hint}")
            case "text":
                if self.refused_empty and value in ("", Path()):
                    raise RequestError(f"{label}: expected {self.refused_empty}, got ''")
                if isinstance(value, str | Path) and "\0" not in str(value):
                    return str(value)
        raise RequestError(f"{label}: expected {_WORDS[self.kind]}, got {_got(value)}")

    def _within(self, value: float, label: str) -> float:
        is_low = value <= self.minimum if self.is_exclusive else value < self.minimum
        if is_low or not value <= self.maximum:
            least = f"more than {self.minimum:g}" if self.is_exclusive else f"{self.minimum:g}"
            most = f" to {self.maximum:g}" if self.maximum < LARGEST else " or more"
            raise RequestError(f"{label}: {shown(value)} is out of bounds, expected {least}{most}")
        return value

    def _names(self, value: object, label: str) -> tuple[str, ...]:
        if isinstance(value, str):
            value = parse_names(value) if self.kind == "names" else [value]
        if not isinstance(value, list | tuple):
            raise RequestError(f"{label}: expected {_WORDS[self.kind]}, got {_got(value)}")
        for entry in value:
            if not isinstance(entry, str) or not entry or "\0" in entry:
                raise RequestError(f"{label}: expected {_WORDS[self.kind]}, got {_got(entry)}")
        if not value:
            raise RequestError(f"{label}: expected at least one")
        return tuple(dict.fromkeys(value))

    def _seeds(self, value: object, label: str) -> tuple[int, ...]:
        if isinstance(value, str):
            return parse_seeds([value], label)
        entries: Sequence[Any] = value if isinstance(value, list | tuple | range) else [value]
        for entry in entries:
            if not isinstance(entry, int) or isinstance(entry, bool):
                raise RequestError(f"{label}: expected {_WORDS['seeds']}, got {_got(entry)}")
            self._within(entry, label)
        if not entries:
            raise RequestError(f"{label}: expected at least one")
        return _few(dict.fromkeys(entries), label)


_WORDS: Mapping[Kind, str] = {
    "names": "names",
    "seeds": "whole numbers of 0 or more",
    "paths": "trained, init, auto or a checkpoint's path",
    "text": "text",
    "choice": "text",
    "whole": "a whole number",
    "number": "a number",
    "size": "a size such as 4GB",
    "yes": "true or false",
    "settings": "a table",
}


def flag(
    text: str,
    kind: Kind,
    default: Any = MISSING,
    *,
    names: tuple[str, ...] = (),
    default_text: str | None = None,
    **more: Any,
) -> Any:
    """Make a field of a dataclass that can be asked for."""
    given: dict[str, Any] = {"default": default}
    if default is MISSING and kind == "settings":
        given = {"default_factory": dict}
    if default_text is None:
        listed = default if isinstance(default, tuple) else (default,)
        default_text = "" if default in (None, MISSING, "") else ",".join(map(str, listed))
    return field(**given, metadata={"flag": Flag(text, kind, names, default_text, **more)})


def flags_of(kind: type[Any]) -> dict[str, Flag]:
    """Give what can be asked for, by the fields of a dataclass.

    Examples
    --------
    >>> flags_of(Request)["models"].names
    ('model', 'models')
    """
    flags = {one.name: one.metadata["flag"] for one in fields(kind)}
    return {name: replace(one, names=one.names or (name,)) for name, one in flags.items()}


def _check(asked: Any) -> None:
    """Check the fields of a dataclass of flags, in its ``__post_init__``."""
    optional = {one.name for one in fields(asked) if one.default is None}
    for name, one in flags_of(type(asked)).items():
        value = getattr(asked, name)
        if value is not None or name not in optional:
            object.__setattr__(asked, name, one.checked(value, name))


@dataclass(frozen=True)
class Request:
    """What a run is asked for: all that decides its numbers.

    Parameters
    ----------
    measures, models : tuple of str
        Registered names or globs; as everywhere here, one text with commas will do.
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

    Raises
    ------
    nlbench.RequestError
        If a value is none of those.

    Examples
    --------
    >>> Request("affinity,r2", "vgg8", "digits", weights="init").measures
    ('affinity', 'r2')
    """

    measures: tuple[str, ...] = flag(
        "Measures: names or globs, with commas.",
        "names",
        ("affinity", "absdev"),
        names=("measures", "measure"),
        group="measures",
    )
    models: tuple[str, ...] = flag(
        "Models: names or globs, with commas.",
        "names",
        ("vgg8",),
        names=("model", "models"),
        group="models",
    )
    data: tuple[str, ...] = flag(
        "Datasets: names or globs, with commas.",
        "names",
        ("digits",),
        names=("data", "dataset", "datasets"),
        group="datasets",
    )
    weights: tuple[str, ...] = flag(
        "trained, init, calibrated (init, with batch norm's statistics of the samples), or "
        "checkpoints' paths or globs, with commas; auto: trained where it ships.",
        "paths",
        ("auto",),
    )
    seeds: tuple[int, ...] = flag(
        "Seeds of the initialisation and the sample, with commas; 0-9 are ten of them.",
        "seeds",
        (0,),
        names=("seeds", "seed"),
    )
    samples: int = flag("Samples to look at; 0: the whole split.", "whole", 512)
    split: str = flag("test or train.", "choice", "test", choices=("test", "train"))
    device: str = flag("auto, cpu, cuda, cuda:N or mps.", "text", "auto")
    settings: Settings = flag(  # noqa: RUF009 (a field, as the others are)
        "Option of a measure, probe or dataset, repeatable: affinity.shrinkage=none.",
        "settings",
        names=("set",),
    )
    precision: str = flag(
        "native, tf32, float64; bfloat16 or float16 by autocast.",
        "choice",
        "native",
        choices=PRECISIONS,
    )

    def __post_init__(self) -> None:
        _check(self)


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
    memory : int or str, optional
        Bytes that a pass may use, such as ``4GB``; by default a sensible share of what is free.
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
    nlbench.errors.RequestError: executor: unknown 'process'; did you mean 'processes'?
    """

    rerun: str = flag(
        "Recorded cells to repeat: never, failed or all.", "choice", "failed", choices=RERUN
    )
    timeout: float | None = flag(
        "Seconds that a cell may take.", "number", None, maximum=1e8, is_exclusive=True
    )
    memory: int | None = flag(
        "What a pass may use, such as 4GB.", "size", None, default_text="a share of what is free"
    )
    executor: str = flag("serial, processes or dask.", "choice", "serial", choices=EXECUTORS)
    workers: int | None = flag(
        "How many measure at a time.", "whole", None, minimum=1, maximum=1024
    )
    address: str = flag("Of a Dask scheduler.", "text", "")
    threads: int | None = flag(
        "PyTorch's threads of each worker.",
        "whole",
        None,
        default_text="up to 4",
        minimum=1,
        maximum=1024,
    )

    def __post_init__(self) -> None:
        _check(self)
        if self.executor == "serial" and (self.workers or 1) > 1:
            raise RequestError("workers: serial is one at a time; say --executor processes")
        if self.address and self.executor != "dask":
            raise RequestError("address: only a Dask scheduler has one; say --executor dask")


@dataclass(frozen=True)
class RunOptions:
    """What ``nlbench run`` does beside measuring.

    Parameters
    ----------
    sites : str
        Short for the setting ``sites.select``.
    out : str, optional
        The run's folder; by default one named by model and time.
    report : bool
        Whether a page is written into it.
    progress : {"auto", "rich", "plain", "none"}
    """

    sites: str = flag("Which sites to look at; short for --set sites.select=…", "text", "")
    out: str | None = flag(
        "The run's folder.",
        "text",
        None,
        default_text="runs/MODEL-TIME",
        refused_empty="a folder's name",
    )
    report: bool = flag("Write report.html into the run's folder.", "yes", True)
    progress: str = flag(
        "auto, rich, plain or none.",
        "choice",
        "auto",
        choices=PROGRESS,
        default_text="auto: rich on a terminal, else none",
    )

    def __post_init__(self) -> None:
        _check(self)


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
        By the names of the fields of `Request`, `ExecutionOptions` and `RunOptions`.

    Raises
    ------
    nlbench.RequestError
        If it can't be read, or a key or a value in it isn't known.
    """
    import tomllib

    from nlbench.serialization.files import read_text

    try:
        content = tomllib.loads(read_text(path, LARGEST_CONFIG))
    except (ValueError, RecursionError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"{path} is no TOML: {shown(error, 200)}") from error
    known: dict[str, tuple[str, Flag]] = {}
    for kind in (Request, ExecutionOptions, RunOptions):
        for name, one in flags_of(kind).items():
            known |= dict.fromkeys((*one.names, name), (name, one))
    read: dict[str, Any] = {}
    spelt: dict[str, str] = {}
    for key, value in content.items():
        if key not in known:
            raise RequestError(f"{path}: unknown key '{shown(key)}'{nearest(key, known)}")
        name, one = known[key]
        if name in spelt:
            raise RequestError(f"{path}: '{spelt[name]}' and '{key}' are the same; keep one")
        spelt[name] = key
        read[name] = one.checked(value, f"{path}: {key}")
    return read


LARGEST_CONFIG = 2**20
"""Bytes that a configuration file may have."""


def write_request(path: Path, request: Request) -> None:
    """Write a request so that ``nlbench run --config`` asks for the same again."""
    from nlbench.serialization.files import write_if_changed

    text = "# nlbench run --config with this file asks for the same again\n" + to_toml(request)
    write_if_changed(path, text)


def to_toml(request: Request) -> str:
    """Text of a request.

    Examples
    --------
    >>> print(to_toml(Request("r2", "vgg8", "digits", settings={"sites.batch": 8})))
    measures = [
        "r2",
    ]
    models = [
        "vgg8",
    ]
    data = [
        "digits",
    ]
    weights = [
        "auto",
    ]
    seeds = [
        0,
    ]
    samples = 512
    split = "test"
    device = "auto"
    precision = "native"
    <BLANKLINE>
    [set]
    "sites.batch" = 8
    <BLANKLINE>
    """
    import tomli_w

    content = {name: getattr(request, name) for name in flags_of(Request)}
    settings = dict(content.pop("settings"))
    content = {name: list(v) if isinstance(v, tuple) else v for name, v in content.items()}
    return tomli_w.dumps({**content, "set": settings} if settings else content)


def parse_seeds(texts: Sequence[str], label: str = "--seeds") -> tuple[int, ...]:
    """Read seeds: numbers with commas, and ranges of which both ends are meant.

    Raises
    ------
    nlbench.RequestError
        If there are none, or too many, or one is no whole number of 0 or more.

    Examples
    --------
    >>> parse_seeds(["0-3,7", "7"])
    (0, 1, 2, 3, 7)
    """
    seeds: dict[int, None] = {}
    for part in (part for text in texts for part in parse_names(text)):
        first, dash, last = part.partition("-")
        if not dash:
            first, dash, last = part.partition("..")
        ends = [_seed(end, part, label) for end in ((first, last) if dash else (first,))]
        if ends[-1] < ends[0]:
            raise RequestError(f"{label}: '{shown(part)}' runs backwards")
        # Not counted further than it matters.
        seeds |= dict.fromkeys(range(ends[0], min(ends[-1], ends[0] + MOST_SEEDS) + 1))
        _few(seeds, label)
    if not seeds:
        raise RequestError(f"{label}: expected {_WORDS['seeds']}, got ''")
    return tuple(seeds)


def _seed(text: str, part: str, label: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdecimal()) or len(text) > 19 or int(text) > LARGEST:
        raise RequestError(f"{label}: expected {_WORDS['seeds']}, got '{shown(part)}'")
    return int(text)


def _few(seeds: Mapping[int, None], label: str) -> tuple[int, ...]:
    if len(seeds) > MOST_SEEDS:
        raise RequestError(f"{label}: too many, expected at most {MOST_SEEDS}")
    return tuple(seeds)


def parse_names(text: str) -> list[str]:
    """Take names with commas apart."""
    return [part for part in map(str.strip, text.split(",")) if part]


def _paths_of(text: str, label: str) -> list[str]:
    """Take a flag's paths apart, at commas that are in no file's name, and expand globs."""
    if _exists(text):
        return [text]
    found: list[str] = []
    for part in parse_names(text) or [""]:
        if not any(letter in part for letter in "*?[") or _exists(part):
            found.append(part)
            continue
        path = Path(part)
        matches = sorted(str(match) for match in _glob(path) if match.is_file())
        if not matches:
            raise RequestError(f"{label}: no file matches '{shown(part)}'")
        found += matches
    return found


def _glob(path: Path) -> list[Path]:
    try:
        root = Path(path.anchor)
        return list(root.glob(str(path.relative_to(root))))
    except (ValueError, OSError, NotImplementedError, RecursionError):
        return []


def _exists(text: str) -> bool:
    try:
        return Path(text).exists() and bool(text)
    except (OSError, ValueError):
        return False


def parse_settings(texts: Iterable[str], label: str) -> dict[str, str]:
    """Read ``OWNER.OPTION=VALUE``.

    Raises
    ------
    nlbench.RequestError
        If one is none.
    """
    settings: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise RequestError(f"{label}: expected OWNER.OPTION=VALUE, got '{shown(text)}'")
        settings[key.strip()] = value.strip()
    return settings


def _settings(value: object, label: str) -> dict[str, OptionValue]:
    """Flatten tables of settings to names with dots."""
    if not isinstance(value, Mapping):
        raise RequestError(f"{label}: expected a table, got {_got(value)}")
    settings: dict[str, OptionValue] = {}
    tables: list[tuple[str, Mapping[str, object]]] = [("", value)]
    while tables:
        prefix, table = tables.pop(0)
        if prefix.count(".") > 8:
            raise RequestError(f"{label}: tables in tables in tables, expected OWNER.OPTION")
        for key, entry in table.items():
            name = f"{prefix}.{key}" if prefix else str(key)
            if isinstance(entry, Mapping):
                tables.append((name, entry))
            elif name in settings:
                raise RequestError(f"{label}: {shown(name)} is set twice; keep one")
            elif isinstance(entry, bool | int | float | str):
                settings[name] = entry
            else:
                where = f"{label}: {shown(name)}"
                raise RequestError(f"{where}: expected text, a number or true, got {_got(entry)}")
    return settings


def _got(value: object) -> str:
    """What a message says of a wrong value."""
    if isinstance(value, str):
        return f"'{shown(value)}'"
    if isinstance(value, Mapping):
        return "a table"
    return "a list" if isinstance(value, list | tuple) else shown(value)


_SIZE = re.compile(r"([0-9.]{1,40})\s*([kmgt]?)(i?)b?", re.IGNORECASE)


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
    if isinstance(text, int):
        size: float = min(text, 10**16)
    else:
        found = _SIZE.fullmatch(text.strip())
        try:
            if found is None:
                raise ValueError
            number, unit, binary = found.groups()
            size = float(number) * (1024 if binary else 1000) ** " kmgt".index(unit.lower() or " ")
        except ValueError:
            raise RequestError(
                f"{label}: expected a size such as 4GB, got '{shown(text)}'"
            ) from None
    if not (1 <= size < 1e15 and math.isfinite(size)):
        what = shown(text)
        raise RequestError(f"{label}: {what} is out of bounds, expected 1 byte to 1000 TB")
    return int(size)
