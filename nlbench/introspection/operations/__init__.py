"""The registry of everything known about PyTorch's operations, for all probes.

`registry` holds an `Operation` for each of them, with a single name, and registers rules and facts,
`table` has the facts about PyTorch's own operations, and `listing` generates ``nlbench list ops``
and ``docs/operations.md``.

Rules are registered by decorators: for points on a segment in `nlbench.probes.lines.rules`, for
channels in `nlbench.probes.graph.rules` and for axes in `nlbench.introspection.axis_rules`.
Everything else is a fact in `table`.
"""

from .registry import (
    Operation,
    activation,
    axis_rule,
    fact,
    graph_rule,
    in_each_dimension,
    known,
    line_rule,
    load_errors,
    load_operations,
    named_modules,
    not_affine,
    operation,
    qualified_name,
    register_op,
    registered,
)

__all__ = [
    "Operation",
    "activation",
    "axis_rule",
    "fact",
    "graph_rule",
    "in_each_dimension",
    "known",
    "line_rule",
    "load_errors",
    "load_operations",
    "named_modules",
    "not_affine",
    "operation",
    "qualified_name",
    "register_op",
    "registered",
]
