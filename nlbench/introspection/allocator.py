"""Settings of the C library's memory allocator."""

from __future__ import annotations

import contextlib
import ctypes
import sys


def keep_freed_memory() -> None:
    """Make the C library keep up to 2 GiB of freed memory in blocks of up to 32 MiB, on Linux.

    By default it returns most blocks of a tensor's size to the system, which zeroes them before
    the next use. See benchmarks/batches_on_the_cpu.py.

    Examples
    --------
    >>> keep_freed_memory()
    """
    if sys.platform == "linux":
        trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
        with contextlib.suppress(OSError, AttributeError):  # Missing from other C libraries.
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(mmap_threshold, 2**25)
            mallopt(trim_threshold, 2**31 - 1)


def release_freed_memory() -> None:
    """Return the kept memory to the system.

    Examples
    --------
    >>> release_freed_memory()
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
