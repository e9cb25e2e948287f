"""Rules of operations on the points of a segment: one file a family of operations.

To add an operation, open the file of its family. What else is known of an operation stands in the
registry `nlbench.introspection.operations`. `rule` has the types. Each family registers its rules
with `line_rule`, and importing this package registers them all.
"""

from . import arithmetic, kinks, maxima, shapes

__all__ = ["arithmetic", "kinks", "maxima", "shapes"]
