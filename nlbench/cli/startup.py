"""The start of the program: interruptions and errors of its first imports."""

from __future__ import annotations

import os
import sys

from nlbench.signals import ignore_interruptions, interruptible

from .imports import fast_imports


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
