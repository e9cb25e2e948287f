"""Rules for operations on points of segments, one file per family of operations.

`rule` defines the types; `pieces` and `rounding` contain the mathematics that rules share. To add
an operation, register its rule with `line_rule` in the file for its family. Importing this package
registers all rules.
"""

from . import arithmetic, kinks, maxima, shapes

__all__ = ["arithmetic", "kinks", "maxima", "shapes"]
