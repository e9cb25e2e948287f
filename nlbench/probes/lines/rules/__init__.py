"""Rules of operations on points of segments, one file per family of operations.

`rule` has the types, `pieces` and `rounding` the mathematics that rules share. To add an operation,
open the file of its family: rules are registered with `line_rule`, next to the operation's other
facts in `nlbench.introspection.operations`. Importing this package registers them all.
"""

from . import arithmetic, kinks, maxima, shapes

__all__ = ["arithmetic", "kinks", "maxima", "shapes"]
