"""The command line: one module a command.

Further commands come from plugins, through the entry-point group ``nlbench.commands``.

Modules of commands don't postpone their annotations: Typer takes each six times, and would compile
its text each time, which ``nlbench --help`` does for every command.
"""

from __future__ import annotations

import gc
import sys

from nlbench.signals import ignore_interruptions, interruptible

__all__ = ["main"]


def main() -> None:
    """Run a command; an interruption is one line from the first import on."""
    with interruptible():
        try:
            # What is imported stays: looking for garbage in it would take a fifth of `--help`.
            gc.disable()
            from .app import main as run_command

            gc.freeze()
            gc.enable()
            run_command()
        except KeyboardInterrupt:
            print("nlbench: interrupted", file=sys.stderr)
            sys.exit(130)
        finally:
            ignore_interruptions()
