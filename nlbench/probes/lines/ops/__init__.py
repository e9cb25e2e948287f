"""What the tracer knows of operations: one file a family of them.

`rule` has the types; each family registers its operations' rules with
`nlbench.probes.ops.line_rule`, above the functions that make them. Importing this package
registers them all.
"""

from . import arithmetic, kinks, max_pooling, maxima, shapes, sums

__all__ = ["arithmetic", "kinks", "max_pooling", "maxima", "shapes", "sums"]
