"""Start of a command, with fast imports."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from nlbench.signals import ignore_interruptions, interruptible

__all__ = ["fast_imports", "main"]


def main() -> None:
    """Run a command; Ctrl-C prints one line, even during imports."""
    # Read when PyTorch is imported. By default its threads spin while they wait for each other:
    # next to other programs they take the time of the threads that they wait for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with interruptible():
        try:
            with fast_imports():
                from .app import main as run_command

            run_command()
        except KeyboardInterrupt:
            ignore_interruptions()
            print("nlbench: interrupted", file=sys.stderr)
            sys.exit(130)
        finally:
            ignore_interruptions()


@contextmanager
def fast_imports() -> Iterator[None]:
    """Import without garbage collection, and exclude what exists afterwards from it.

    Imported modules are never garbage: collecting would take a fifth of ``nlbench --help``, and
    0.3 s of a command that imports PyTorch.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
