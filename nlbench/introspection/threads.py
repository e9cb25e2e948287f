"""Numbers of threads for PyTorch and for the BLAS libraries that NumPy and SciPy use."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from threadpoolctl import ThreadpoolController

MAX_THREADS_PER_CELL = 4
"""Layers of typical size gain little from more threads, and other cells can use the cores."""


def default_threads() -> int:
    """Return the number of PyTorch threads for a cell, independent of the number of workers."""
    return min(MAX_THREADS_PER_CELL, torch.get_num_threads())


@contextmanager
def torch_threads(number: int | None = None) -> Iterator[None]:
    """Set the number of PyTorch threads, if one is given, and restore it on exit.

    The last bits of a sum may depend on it. A number set in any thread becomes the default for
    threads that start later, so code whose threads set their own number also needs this context.

    Examples
    --------
    >>> with torch_threads(1):
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def overlap_pays(device: torch.device) -> bool:
    """Return True if computing in parallel with the network's forward pass saves time.

    It doesn't with a single core, or on Apple's GPU, which only serves one thread.

    Examples
    --------
    >>> overlap_pays(torch.device("cuda"))
    True
    """
    if device.type != "cpu":
        return device.type != "mps"
    return _available_cores() > 1


def measure_threads(device: torch.device) -> int:
    """Return the number of threads for measures that run in parallel with the forward pass.

    If the network runs on a GPU, it needs none of PyTorch's threads, so measures may use them all.
    On the CPU, the number is 1.

    Examples
    --------
    >>> measure_threads(torch.device("cpu"))
    1
    """
    return min(torch.get_num_threads(), _available_cores()) if device.type == "cuda" else 1


def _available_cores() -> int:
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


@contextmanager
def single_blas_thread() -> Iterator[None]:
    """Limit NumPy's and SciPy's BLAS libraries to one thread.

    The limit applies to the whole process. If contexts overlap, only the first one sets and
    removes the limit; code that starts threads must not exit its context while they run.
    """
    if not _BLAS_LIMIT.acquire(blocking=False):
        yield
        return
    try:
        with _blas_libraries().limit(limits=1):
            yield
    finally:
        _BLAS_LIMIT.release()


_BLAS_LIMIT = threading.Lock()


@cache
def _blas_libraries() -> ThreadpoolController:
    """Find the BLAS libraries of NumPy and SciPy; the search takes milliseconds."""
    # Only loaded libraries can be found.
    importlib.import_module("scipy.linalg")
    controller = ThreadpoolController()
    paths = [lib["filepath"] for lib in controller.info() if lib["user_api"] == "blas"]
    return controller.select(filepath=[path for path in paths if not _belongs_to_torch(path)])


def _belongs_to_torch(path: str) -> bool:
    """Return True if a library is bundled with PyTorch, which the network may be using."""
    packages = Path(torch.__file__).parent.parent
    library = Path(path)
    return library.is_relative_to(packages) and library.relative_to(packages).parts[0].startswith(
        "torch"
    )
