"""The registry of everything known about PyTorch's operations, for all probes.

`registry` holds an `Operation` for each of them, with a single name, and registers rules and facts,
`table` has the facts about PyTorch's own operations, and `listing` generates ``nlbench list ops``
and ``docs/operations.md``.

Rules are registered by decorators: for points on a segment in `nlbench.probes.lines.rules`, for
channels in `nlbench.probes.graph.rules` and for axes in `nlbench.introspection.axis_rules`.
Everything else is a fact in `table`.
"""

from .registry import Operation as Operation
from .registry import activation as activation
from .registry import add_dimensions as add_dimensions
from .registry import axis_rule as axis_rule
from .registry import fact as fact
from .registry import graph_rule as graph_rule
from .registry import known as known
from .registry import line_rule as line_rule
from .registry import load_errors as load_errors
from .registry import load_operations as load_operations
from .registry import named_modules as named_modules
from .registry import not_affine as not_affine
from .registry import operation as operation
from .registry import qualified_name as qualified_name
from .registry import register_op as register_op
from .registry import registered as registered
