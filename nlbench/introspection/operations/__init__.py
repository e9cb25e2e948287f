"""One registry of everything known about PyTorch's operations, for all probes.

`registry` holds an `Operation` for each and registers rules and facts, `table` has the facts of
PyTorch's own operations, `registration` is `nlbench.register_op`, `names` maps callables to
operations, and `listing` makes ``nlbench list ops`` and ``docs/operations.md``.

A rule is registered directly above its code: how an operation acts on points of a
segment in `nlbench.probes.lines.rules`, on channels in `nlbench.probes.graph.rules`, on axes in
`nlbench.introspection.axis_rules`. All else is a fact in `table`.
"""

from .names import in_each_dimension, qualified_name
from .registration import register_op
from .registry import (
    Operation,
    activation,
    axis_rule,
    fact,
    graph_rule,
    known,
    line_rule,
    load_errors,
    named_modules,
    not_affine,
    operation,
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
    "named_modules",
    "not_affine",
    "operation",
    "qualified_name",
    "register_op",
]
