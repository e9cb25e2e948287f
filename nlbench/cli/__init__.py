"""The command line: one module per command.

Plugins add commands through the entry-point group ``nlbench.commands``.

Command modules don't use ``from __future__ import annotations``: Typer evaluates each annotation
six times, which slows down ``nlbench --help`` if it is a string.
"""

from .startup import main as main
