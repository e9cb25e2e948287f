"""Rules of operations on points of segments, one file per family of operations.

`rule` defines the types; `pieces` and `rounding` hold the mathematics that rules share. To add an
operation, open the file of its family and register its rule with `line_rule`. Importing this
package registers all rules.
"""

from . import arithmetic, kinks, maxima, shapes

__all__ = ["arithmetic", "kinks", "maxima", "shapes"]
