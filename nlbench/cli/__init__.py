"""The command line: one module a command.

Further commands come from plugins, through the entry-point group ``nlbench.commands``. What they
share with the commands here is public: reading names, seeds and settings, tables, interruptions.
"""

from .common import (
    Interrupted,
    completed,
    note,
    print_table,
    split_names,
    split_seeds,
    split_settings,
)

__all__ = [
    "Interrupted",
    "completed",
    "note",
    "print_table",
    "split_names",
    "split_seeds",
    "split_settings",
]
