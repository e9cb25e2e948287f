"""The command line: one module a command.

Plugins add commands through the entry-point group ``nlbench.commands``.

Modules of commands have no ``from __future__ import annotations``: Typer evaluates each annotation
six times, which slows down ``nlbench --help`` if it is a string.
"""

from __future__ import annotations

import gc
import os
import sys

from nlbench.signals import ignore_interruptions, interruptible

__all__ = ["main"]


def main() -> None:
    """Run a command; Ctrl-C prints one line, even during imports."""
    # Read when PyTorch is imported. By default its threads spin while they wait for each other:
    # next to other programs they take the time of the threads that they wait for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with interruptible():
        try:
            # Imported modules are never garbage: collecting would take a fifth of `--help`.
            gc.disable()
            from .app import main as run_command

            gc.freeze()
            gc.enable()
            run_command()
        except KeyboardInterrupt:
            ignore_interruptions()
            print("nlbench: interrupted", file=sys.stderr)
            sys.exit(130)
        finally:
            ignore_interruptions()
