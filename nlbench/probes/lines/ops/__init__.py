"""What the tracer knows of operations: one file a family of them.

Open the file of its family to add how one of PyTorch's operations acts on a segment; what else is
known of it, such as its kind as an activation, is said in `nlbench.probes.ops`, the registry of
all. `rule` has the types; each family registers its operations' rules with
`nlbench.probes.ops.line_rule`, above the functions that make them. Importing this package
registers them all.
"""

from . import arithmetic, kinks, maxima, shapes

__all__ = ["arithmetic", "kinks", "maxima", "shapes"]
