"""Requests: what a run measures and how it is executed.

Each field of the dataclasses is an `Option`, which validates the flags of ``nlbench run``, the keys
in a configuration file and the arguments from Python.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from nlbench.errors import RequestError, nearest, shorten
from nlbench.options import Option, Settings
from nlbench.parsers import MAX_INTEGER
from nlbench.serialization.files import read_text, write_atomically

AUTO_DATA = "auto"
"""Placeholder for the default dataset of each model."""

ERRORS = ("groups", "none")
PRECISIONS = ("native", "tf32", "float64", "bfloat16", "float16")
RERUN = ("failed", "never", "all")
EXECUTORS = ("serial", "processes", "dask")


def _option(help: str, default: Any = MISSING, **declaration: Any) -> Any:
    """Create a dataclass field with an option. The default is an empty table."""
    is_table = default is MISSING
    option = Option({} if is_table else default, help, **declaration)
    defaults: dict[str, Any] = {"default_factory": dict} if is_table else {"default": default}
    return field(**defaults, metadata={"option": option})


def _integer(help: str, default: int | None, *, minimum: int = 0, **declaration: Any) -> Any:
    declaration = {"maximum": MAX_INTEGER, **declaration}
    return _option(help, default, kind="integer", minimum=minimum, **declaration)


def list_options(kind: type[Any]) -> dict[str, Option]:
    """Return the options of a dataclass, keyed by field.

    Examples
    --------
    >>> list_options(Request)["models"].names
    ('model', 'models')
    """
    options = {entry.name: entry.metadata["option"] for entry in fields(kind)}
    return {name: replace(o, names=o.names or (name,)) for name, o in options.items()}


def _validate(request: Any) -> None:
    """Validate the fields of an options dataclass.

    Call this function from its ``__post_init__``.
    """
    for name, option in list_options(type(request)).items():
        value = getattr(request, name)
        if value is not None or option.default is not None:
            object.__setattr__(request, name, option.parse(value, name))


@dataclass(frozen=True)
class Request:
    """Everything that determines the results of a run.

    Parameters
    ----------
    measures, models : tuple of str
        Registered names or globs; or a comma-separated string. A model may also be a network in a
        file, ``my_net.py:Net``, or in a module, ``package.module:Net``.
    data : tuple of str
        Registered names or globs, paths of images, arrays, tables or text, or ``FILE.py:NAME``.
    weights : tuple of str
        ``auto``, ``trained``, ``init``, ``calibrated`` or paths of checkpoints, with ``#KEY`` for
        one of several networks in a file.
    seeds : tuple of int
    samples : int
        Number of samples from the split; 0 for all.
    split : {"test", "train"}
    device : str
        ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.
    settings : mapping of str to value
        Options of measures, probes and datasets, such as ``{"affinity.shrinkage": "none"}``.
    precision : {"native", "tf32", "float64", "bfloat16", "float16"}
        ``native``: the dtype of the weights, without TF32. ``tf32`` allows TF32 on NVIDIA's tensor
        cores; ``bfloat16`` and ``float16`` run the model under autocast. ``float64`` converts the
        model and the inputs.
    errors : {"groups", "none"}
        ``groups``: values have replicates without each of eight groups of samples or paths, which
        determine their standard errors. ``none``: they have none.

    Raises
    ------
    nlbench.RequestError
        If a value is invalid.

    Examples
    --------
    >>> Request("affinity,r2", "vgg8", "digits", weights="init").measures
    ('affinity', 'r2')
    """

    measures: tuple[str, ...] = _option(
        "Measures: comma-separated names, globs or questions (@activations); see list measures.",
        ("affinity", "absdev"),
        kind="names",
        names=("measures", "measure"),
        group="measures",
    )
    models: tuple[str, ...] = _option(
        "Models: comma-separated names or globs, or your own: my_net.py:Net.",
        ("vgg8",),
        kind="names",
        names=("model", "models"),
        group="models",
    )
    data: tuple[str, ...] = _option(
        "Datasets: comma-separated names, globs, paths (./images, x.npz) or my_net.py:loader; "
        "auto: the model's own, else digits.",
        (AUTO_DATA,),
        kind="names",
        names=("data", "dataset", "datasets"),
        group="datasets",
    )
    weights: tuple[str, ...] = _option(
        "trained, init, calibrated (init with batch-norm statistics of the samples), or paths or "
        "globs of checkpoints, comma-separated; auto: trained if available.",
        ("auto",),
        kind="paths",
    )
    seeds: tuple[int, ...] = _option(
        "Seeds for initialisation and sampling, comma-separated; 0-9 is a range of ten.",
        (0,),
        kind="seeds",
        minimum=0,
        maximum=MAX_INTEGER,
        names=("seeds", "seed"),
    )
    samples: int = _integer("Number of samples; 0 for the whole split.", 512, maximum=10**9)
    split: str = _option("test or train.", "test", choices=("test", "train"))
    device: str = _option("auto, cpu, cuda, cuda:N or mps.", "auto")
    settings: Settings = _option(  # noqa: RUF009 (it is a field)
        "Option of a measure, probe or dataset, or an argument of your network, repeatable: "
        "affinity.shrinkage=none, model.width=64.",
        kind="settings",
        names=("set",),
    )
    precision: str = _option(
        "native, tf32, float64; bfloat16 or float16 with autocast.", "native", choices=PRECISIONS
    )
    errors: str = _option(
        "Standard errors from eight groups of samples: groups or none.", "groups", choices=ERRORS
    )

    def __post_init__(self) -> None:
        _validate(self)


@dataclass(frozen=True)
class ExecutionOptions:
    """Execution options of a run, which don't affect its results.

    Parameters
    ----------
    rerun : {"failed", "never", "all"}
        Recorded cells to measure again.
    timeout : float, optional
        Time limit per cell in seconds, including loading and the passes shared with other cells.
        Cells with a timeout are measured in a separate process.
    memory : int or str, optional
        Memory limit for a forward pass, such as ``4GB``; by default 256 MiB for batches on the
        CPU, half of the free memory for traces, and until memory runs out for batches on a GPU.
    executor : {"serial", "processes", "dask"}
    workers : int, optional
        Number of workers; the default depends on the cores or GPUs of the machine.
    address : str
        Address of the Dask scheduler; if empty, a cluster is started on this machine.
    threads : int, optional
        PyTorch threads per worker; by default four, or PyTorch's default if lower. It may affect
        the last bits of a sum, so the default doesn't depend on the number of workers.

    Raises
    ------
    nlbench.RequestError
        If a value is invalid, or two values are incompatible.

    Examples
    --------
    >>> ExecutionOptions(executor="process")
    Traceback (most recent call last):
    nlbench.errors.RequestError: executor: unknown 'process'; did you mean 'processes'?
    """

    rerun: str = _option("Recorded cells to repeat: never, failed or all.", "failed", choices=RERUN)
    timeout: float | None = _option(
        "Maximum seconds per cell.", None, kind="number", minimum=0, maximum=1e8, above_minimum=True
    )
    memory: int | None = _option(
        "Memory limit for a forward pass, such as 4GB.",
        None,
        kind="size",
        default_text="256 MiB for batches on the CPU, half of the free memory for traces",
    )
    executor: str = _option("serial, processes or dask.", "serial", choices=EXECUTORS)
    workers: int | None = _integer("Number of workers.", None, minimum=1, maximum=1024)
    address: str = _option("Address of a Dask scheduler.", "")
    threads: int | None = _integer(
        "PyTorch threads per worker.", None, minimum=1, maximum=1024, default_text="up to 4"
    )

    def __post_init__(self) -> None:
        _validate(self)
        if self.executor == "serial" and (self.workers or 1) > 1:
            raise RequestError("workers: the serial executor has one; use --executor processes")
        if self.address and self.executor != "dask":
            raise RequestError("address: only for a Dask scheduler; use --executor dask")


@dataclass(frozen=True)
class RunOptions:
    """Output options of ``nlbench run``."""

    sites: str = _option(
        "Activations to measure, by name or kind:KIND; ! excludes. Short for --set sites.select=….",
        "",
    )
    out: str | None = _option(
        "Folder for the run.",
        None,
        kind="text",
        default_text="runs/MODEL-TIME",
        required_text="a folder's name",
    )
    report: bool = _option("Write report.html into the run's folder.", True)
    progress: str = _option(
        "auto, rich, plain or none.",
        "auto",
        choices=("auto", "rich", "plain", "none"),
        default_text="auto: rich on a terminal, else a line every 30 s",
    )

    def __post_init__(self) -> None:
        _validate(self)


MAX_BYTES = 2**20


def read_config(path: Path) -> dict[str, Any]:
    """Read a configuration file and return its values keyed by field of `nlbench.request`.

    Its keys are the flags of ``nlbench run``: ``measures``, ``models`` (or ``model``), ``data``,
    ``weights``, ``seeds``, ``samples``, …; a table ``set`` contains options, such as
    ``affinity.shrinkage = "none"``, or nested tables of options.
    """
    import tomllib

    text = read_text(path, MAX_BYTES).removeprefix("\ufeff")
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not TOML: {shorten(error, 200)}") from error
    known: dict[str, tuple[str, Option]] = {}
    for kind in (Request, ExecutionOptions, RunOptions):
        for name, option in list_options(kind).items():
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

    content = {name: getattr(request, name) for name in list_options(Request)}
    settings = dict(content.pop("settings"))
    content = {name: list(v) if isinstance(v, tuple) else v for name, v in content.items()}
    return tomli_w.dumps({**content, "set": settings} if settings else content)
