"""The program's entry point, which also handles interruptions during imports."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from nlbench.introspection.allocator import keep_freed_memory
from nlbench.lazy import fast_imports
from nlbench.signals import ignore_interruptions, interruptible, interruptions_first

if TYPE_CHECKING:
    from sys import UnraisableHookArgs


def main() -> None:
    """Run a command and print one line on Ctrl-C, even during imports."""
    sys.unraisablehook = _print_unraisable
    # Must be set before PyTorch is imported. By default its threads busy-wait, which on a loaded
    # machine takes CPU time from the threads they are waiting for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    keep_freed_memory()
    with interruptible():
        try:
            with interruptions_first(), fast_imports():
                from .app import main as run_command

            run_command()
        except KeyboardInterrupt:
            ignore_interruptions()
            print("nlbench: interrupted", file=sys.stderr)
            sys.exit(130)
        finally:
            ignore_interruptions()


def _print_unraisable(error: UnraisableHookArgs) -> None:
    """Print an exception from a destructor or callback, unless it is an interruption.

    Interruptions are raised again by `nlbench.signals.check_interruption`.
    """
    if error.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(error)
