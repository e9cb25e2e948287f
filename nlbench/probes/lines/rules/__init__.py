"""Rules of operations on points of segments, one file per family of operations.

`rule` defines the types; `pieces` and `rounding` hold the mathematics that rules share. To add an
operation, open the file of its family: rules are registered with `line_rule`, next to the
operation's other facts in `nlbench.introspection.operations`. Importing this package registers all
of them.
"""

from . import arithmetic, kinks, maxima, shapes

__all__ = ["arithmetic", "kinks", "maxima", "shapes"]
