"""The command line: one module a command.

Plugins add commands through the entry-point group ``nlbench.commands``.

Modules of commands have no ``from __future__ import annotations``: Typer evaluates each annotation
six times, which slows down ``nlbench --help`` if it is a string.
"""

from __future__ import annotations

import gc
import sys

from nlbench.signals import ignore_interruptions, interruptible

__all__ = ["main"]


def main() -> None:
    """Run a command; Ctrl-C prints one line, even during imports."""
    with interruptible():
        try:
            # Imported modules are never garbage: collecting would take a fifth of `--help`.
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
