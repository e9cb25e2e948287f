"""What a run is asked for, and how it is to be carried out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nlbench.errors import RequestError, nearest
from nlbench.options import OptionValue

__all__ = ["EXECUTORS", "PRECISIONS", "RERUN", "Conduct", "Request", "Settings"]

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
class Conduct:
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
    >>> Conduct(executor="process")
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
