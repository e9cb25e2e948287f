"""The registry of operations: rules, facts and activations, by name.

Each operation has one `Operation`, however it is called: ``torch.relu``, ``Tensor.relu_``,
``torch.nn.functional.relu`` and ``aten::relu`` share one. Each of its aspects is registered once: a
different second registration raises `nlbench.PluginError`, which names both.

Built-in rules are loaded through the entry-point group ``nlbench.ops``, like those of plugins. An
entry names a module that registers operations on import, or a function that does so when called.

Examples
--------
A rule for lines and a rule for the graph::

    @line_rule("conv1d", "conv2d", "conv3d")
    def convolution(call): ...

    @graph_rule("conv2d")
    def channels_of_a_convolution(call): ...
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function

from nlbench.errors import PluginError, RequestError, error_message
from nlbench.parsers import unique
from nlbench.registry import entry_points
from nlbench.signals import raise_interruption

FACTS: Mapping[str, Mapping[str, str]] = {
    "acts": {
        "keeps": "acts elementwise without changing values",
        "affine": "acts elementwise, affine as long as at most one operand is data",
        "sums": "acts elementwise, affine even if several operands are data",
        "bends": "acts elementwise and is not affine",
    },
    "arranges": {
        "moves": "moves axes of its input",
        "reshapes": "reshapes its input",
        "expands": "repeats its input along axes",
        "splits": "returns parts of its input",
        "resizes": "interpolates between positions",
    },
    "channels": {
        "second": "returns channels along the second axis",
        "last": "returns channels along the last axis",
        "normalized": "returns channels along the last axis if it only normalises that axis",
        "product": "multiplies matrices; with a weight on the right, the last axis has channels",
        "mixed": "returns channels along an unknown axis",
    },
    "combines": {
        "product": "multiplies its operands elementwise",
        "quotient": "divides its operands elementwise",
        "contraction": "sums over products of its operands",
        "layer": "sums over products with a weight",
        "joins": "concatenates its operands",
    },
    "hides": {
        "activations": "computes activations inside one kernel",
        "softmax": "computes a softmax inside one kernel",
    },
    "reduces": {
        "extreme": "computes the maximum or minimum of several numbers",
        "statistic": "computes another statistic of several numbers",
    },
    "takes": {
        "nothing": "creates a tensor without tensor arguments",
        "metadata": "returns metadata of a tensor, such as its size or type",
        "shape": "creates a constant with its input's size and type",
        "noise": "creates random numbers with its input's size and type",
        "second shape": "uses only the size or type of its second tensor",
        "truth": "returns a Python bool computed from numbers",
        "number": "passes a number to Python",
        "values": "returns a tensor whose size or memory depends on numbers",
        "memory": "passes the memory of its input to code outside PyTorch",
    },
    "truth": {
        "comparison": "compares its operands elementwise",
        "test": "computes other truth values",
    },
}
"""Values and meanings of the facts that an operation can have."""


@dataclass
class Operation:
    """Registry entry for an operation, with everything known about it."""

    # PyTorch's name, without overload and trailing underscore. For operations from other libraries,
    # the library's name precedes it, as in mylib::hat.
    name: str
    kind: str = ""  # kind of activation; empty if it is not one
    # Modules that only call this operation; their sites are named after the module.
    modules: tuple[type[nn.Module], ...] = ()
    gates: bool = False  # True if its output may be a factor in a gate
    # Its kinks, if it is piecewise affine and acts elementwise.
    kinks: tuple[float, ...] | None = None
    # Maps a call to its rule for points on a segment; see `nlbench.probes.lines.rules.rule`.
    line: Callable[..., Any] | None = None
    # Maps a call to the nodes of its output; see `nlbench.probes.graph.rules`.
    graph: Callable[..., Any] | None = None
    # Maps a call to the position of each input axis in the output; see `axis_rules`.
    axes: Callable[..., Any] | None = None
    # acts, arranges, channels, combines, hides, reduces, takes, truth: facts, see `FACTS`; empty if
    # the fact does not apply or is unknown.
    acts: str = ""
    arranges: str = ""
    channels: str = ""
    combines: str = ""
    hides: str = ""
    reduces: str = ""
    takes: str = ""
    truth: str = ""
    refused: str = ""  # reason why it can't be traced exactly; empty if it can
    bends: str = ""  # description of where it bends; empty if it is affine
    caveats: dict[str, str] = field(default_factory=dict)  # unsupported cases, by aspect
    # Module and function that registered each aspect.
    sources: dict[str, str] = field(default_factory=dict)

    @property
    def traced(self) -> bool:
        """True if it has a rule for points on a segment."""
        return self.line is not None or self.kinks is not None

    @property
    def has_effect(self) -> bool:
        """True if its effect on values or channels is registered."""
        return not self.sources.keys().isdisjoint(("kind", "acts", "line", "graph"))

    @property
    def rearranges(self) -> bool:
        """True if it only moves values to other axes or positions."""
        return self.arranges in ("moves", "reshapes", "expands")

    @property
    def ignores_values(self) -> bool:
        """True if it uses only the size and type of its input."""
        return self.takes in ("shape", "noise")

    def is_nonlinear(self, data: int) -> bool:
        """Return True if it acts elementwise and is not affine in its `data` operands.

        Examples
        --------
        >>> pairs = (("mul", 1), ("mul", 2), ("add", 2))
        >>> [known(name).is_nonlinear(data) for name, data in pairs]
        [False, True, False]
        """
        return self.acts == "bends" or (self.acts in ("keeps", "affine") and data > 1)


_OPERATIONS: dict[str, Operation] = {}
_LOCK = threading.RLock()


class _PluginLoader:
    """Loading state of the entry points.

    Its lock is separate from the registry's: a thread that imports a module with rules registers
    them while holding that module's import lock, which the loading thread may be waiting for.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.importing = threading.local()
        self.loaded: set[str] = set()
        self.errors: list[str] = []


_PLUGINS = _PluginLoader()

_CONFLICTS = {
    "kind": "kinds",
    "line": "rules for points on a segment",
    "graph": "rules for the channel graph",
    "axes": "rules for its axes",
}


def register_aspect(
    name: str, aspect: str, source: str, caveat: str = "", **values: Any
) -> Operation:
    """Register an aspect of an operation, unless it is already registered with equal values.

    The aspect is ``kind``, ``line``, ``graph``, ``axes`` or one of `FACTS`, and `values` are the
    attributes of `Operation` that define it. Another registration raises PluginError, which names
    both sources: the module and function of each.
    """
    with _LOCK:
        entry = get_entry(name)
        if aspect in entry.sources:
            if all(_is_same(getattr(entry, key), value) for key, value in values.items()):
                return entry
            conflict = _CONFLICTS.get(aspect, f"values of '{aspect}'")
            raise PluginError(
                f"operation '{name}' has two {conflict}: {entry.sources[aspect]} and {source}"
            )
        entry.sources[aspect] = source
        if caveat:
            entry.caveats[aspect] = caveat
        for key, value in values.items():
            setattr(entry, key, value)
        return entry


def get_entry(name: str) -> Operation:
    """Return or create an operation's entry without loading plugins."""
    with _LOCK:
        return _OPERATIONS.setdefault(name, Operation(name))


def _is_same(first: Any, second: Any) -> bool:
    """Return True for equal values, or functions from two runs of the same notebook cell."""
    if callable(first) and callable(second) and getattr(first, "__module__", "") == "__main__":
        return describe_function(first) == describe_function(second)
    return bool(first == second)


def describe_function(function: Any) -> str:
    """Return the module and name of a function, for messages."""
    module = getattr(function, "__module__", "") or "an unknown module"
    return f"{module}.{getattr(function, '__qualname__', type(function).__name__)}"


RuleMaker = TypeVar("RuleMaker", bound=Callable[..., Any])


def _rule(
    aspect: str, names: Sequence[str], caveat: str = "", **values: Any
) -> Callable[[RuleMaker], RuleMaker]:
    """Return a decorator that registers a function as the rule for operations."""

    def register(rule: RuleMaker) -> RuleMaker:
        for name in names:
            register_aspect(
                name, aspect, describe_function(rule), caveat, **{aspect: rule}, **values
            )
        return rule

    return register


def line_rule(*names: str, bends: str = "", caveat: str = "") -> Callable[[RuleMaker], RuleMaker]:
    """Register a function as the rule for operations at points on a segment.

    `bends` describes where they bend, if they do, and `caveat` the unsupported cases. Two rules for
    one operation raise PluginError.
    """
    return _rule("line", names, caveat, bends=bends)


def not_affine(*names: str, why: str = "not piecewise affine") -> None:
    """Register operations that can't be traced exactly, with the reason."""
    for name in names:
        register_aspect(name, "line", f"nlbench ({why})", refused=why)


def graph_rule(*names: str, caveat: str = "") -> Callable[[RuleMaker], RuleMaker]:
    """Register a function as the rule for channels of operations, as `line_rule` does."""
    return _rule("graph", names, caveat)


def axis_rule(*names: str, arranges: str = "") -> Callable[[RuleMaker], RuleMaker]:
    """Register a function as the rule for axes of operations, as `line_rule` does."""
    return _rule("axes", names, arranges=arranges)


def activation(
    kind: str, *names: str, modules: Sequence[type[nn.Module]] = (), gates: bool = False
) -> None:
    """Register operations as activations, by default the one named after the kind."""
    for name in names or (kind,):
        register_aspect(name, "kind", __name__, kind=kind, modules=tuple(modules), gates=gates)


def fact(aspect: str, value: str, *names: str) -> None:
    """Register a fact about operations. See `FACTS`."""
    for name in names:
        register_aspect(name, aspect, __name__, **{aspect: value})


def operation(func: Callable[..., Any]) -> Operation:
    """Return the operation that a callable performs.

    Examples
    --------
    >>> import torch
    >>> operation(torch.Tensor.relu_).kind
    'relu'
    """
    return known(qualified_name(func))


def known(name: str) -> Operation:
    """Return an operation by name.

    The entry has no facts if nothing is known about the operation.
    """
    load_operations()
    return _OPERATIONS.get(name) or Operation(name)


def registered() -> list[Operation]:
    """Return all operations with a registered aspect, with the rules of all probes."""
    load_operations()
    for probe in ("lines", "graph"):
        load_operations(probe)
    with _LOCK:
        return list(_OPERATIONS.values())


def named_modules() -> tuple[type[nn.Module], ...]:
    """Return the modules whose sites are named after the module, including those from plugins."""
    load_operations()
    with _LOCK:
        entries = list(_OPERATIONS.values())
    return tuple(unique(module for entry in entries for module in entry.modules))


def load_errors() -> tuple[str, ...]:
    """Return a message for each entry point of operations that could not be loaded."""
    load_operations()
    return tuple(_PLUGINS.errors)


def load_operations(probe: str = "") -> None:
    """Load the operations that all probes share, or the rules of one probe.

    They are the entry points of the group ``nlbench.ops``, or of ``nlbench.ops.PROBE``.
    """
    group = f"nlbench.ops.{probe}" if probe else "nlbench.ops"
    if group in _PLUGINS.loaded or getattr(_PLUGINS.importing, "now", False):
        return
    with _PLUGINS.lock:
        if group in _PLUGINS.loaded:
            return
        _PLUGINS.importing.now = True
        try:
            for point in entry_points(group):
                try:
                    target = point.load()
                    if not isinstance(target, ModuleType):
                        target()
                except BaseException as error:
                    raise_interruption(error)
                    # A plugin's import can fail in any way; other operations remain available.
                    reason = f"{type(error).__name__}: {error_message(error)}".splitlines()[0]
                    owner = point.dist.name if point.dist else point.value
                    _PLUGINS.errors.append(
                        f"operations '{point.name}' of {owner} are missing: {reason}"
                    )
            _PLUGINS.loaded.add(group)
        finally:
            _PLUGINS.importing.now = False


def qualified_name(func: Any) -> str:
    """Return the name of an operation, with its library if that isn't PyTorch.

    Examples
    --------
    >>> import torch
    >>> qualified_name(torch.Tensor.mul_), qualified_name(torch.ops.aten.relu.default)
    ('mul', 'relu')
    >>> qualified_name(torch.Tensor.__rsub__), qualified_name(torch.Tensor.shape.__get__)
    ('rsub', 'shape')
    """
    registered = getattr(func, "nlbench_op", None)
    if registered is not None:
        return str(registered)
    if isinstance(func, torch._ops.OpOverload):
        func = func.overloadpacket
    if isinstance(func, torch._ops.OpOverloadPacket):
        namespace, _, name = func._qualified_op_name.partition("::")
        if namespace != "aten":
            return f"{namespace}::{name.removesuffix('_')}"
        return _plain_name(func)
    if isinstance(func, type) and issubclass(func, torch.autograd.Function):
        return f"{func.__module__}::{func.__qualname__}"
    return _plain_name(func)


def _plain_name(func: Any) -> str:
    """Return the name of a PyTorch operation. For a property's getter or setter, the property's."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return str(getattr(getattr(func, "__self__", None), "__name__", ""))
    if name.startswith("__"):
        return str(name.strip("_"))
    return str(name.removesuffix("_"))


def add_dimensions(*names: str) -> tuple[str, ...]:
    """Return the names of operations that exist in one, two and three dimensions.

    Examples
    --------
    >>> add_dimensions("conv")
    ('conv1d', 'conv2d', 'conv3d')
    """
    return tuple(f"{name}{axes}d" for name in names for axes in (1, 2, 3))


def register_op(
    op: Any,
    *,
    kind: str = "",
    kinks: Sequence[float] | None = None,
    modules: Sequence[type[nn.Module]] = (),
    gates: bool = False,
    line: Callable[..., Any] | None = None,
    graph: Callable[..., Any] | None = None,
    axes: Callable[..., Any] | None = None,
    caveat: str = "",
    **facts: str,
) -> Operation:
    """Register a custom operation.

    Parameters
    ----------
    op : torch.library operation or torch.autograd.Function
        For example ``torch.ops.mylib.hat``, the result of ``torch.library.custom_op``, or a
        subclass of ``torch.autograd.Function``, whose forward is wrapped so that a probe sees one
        call instead of its parts.
    kind : str, optional
        Kind of activation. With a kind, calls of the operation are sites.
    kinks : sequence of float, optional
        For an operation that is continuous and acts elementwise on its first argument: the points
        between which it is affine; empty if it is affine everywhere. Its rule for points on a
        segment is derived from them.
    modules : sequence of type, optional
        Modules that only call this operation; their sites are named after the module.
    gates : bool, optional
        True if its output may be a factor in a gate, like the output of a sigmoid.
    line, graph, axes : callable, optional
        Rules; see `line_rule`, `graph_rule` and `axis_rule`.
    caveat : str, optional
        Unsupported cases.
    **facts : str, optional
        ``acts``, ``arranges``, ``channels``, ``combines``, ``hides``, ``reduces``, ``takes``,
        ``truth``; see ``docs/operations.md`` for their values and meanings.

    Returns
    -------
    Operation
        Its entry in the registry.

    Raises
    ------
    nlbench.PluginError
        If a different rule, kind or fact is already registered; the message names both.
    nlbench.RequestError
        If probes can't see the operation, or an argument is invalid.

    Examples
    --------
    >>> import torch
    >>> from nlbench.probes.lines import trace_segment
    >>> class Hat(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         return (1 - abs(x)).clamp(min=0)
    >>> register_op(Hat, kind="hat", kinks=(-1.0, 0.0, 1.0), acts="bends").kind
    'hat'
    >>> class Network(torch.nn.Module):
    ...     def forward(self, x):
    ...         return Hat.apply(x)
    >>> trace_segment(Network(), torch.tensor([-2.0]), torch.tensor([2.0])).t.tolist()
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    op = getattr(op, "_opoverload", op)  # torch.library.custom_op returns a wrapper.
    is_function = isinstance(op, type) and issubclass(op, torch.autograd.Function)
    if not is_function and not isinstance(op, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        raise RequestError(
            f"register_op: {getattr(op, '__name__', repr(op))} can't be seen in a network, "
            "expected an operation of torch.library or a subclass of torch.autograd.Function"
        )
    if kinks is not None and line is not None:
        raise RequestError("register_op: both kinks and a line rule given, expected one of them")
    name = qualified_name(op)
    source = f"register_op({qualified_name(op)})"
    _validate_facts(name, facts)
    if kinks is not None:
        points = _validated_kinks(name, kinks)
        where = " and ".join(f"{point:g}" for point in points)
        bends = f"at {where}" if points else ""
        register_aspect(name, "line", source, caveat, kinks=points, bends=bends)
    if line is not None:
        register_aspect(
            name, "line", describe_function(line), caveat, line=line, bends="by its own rule"
        )
    if graph is not None:
        register_aspect(name, "graph", describe_function(graph), caveat, graph=graph)
    if axes is not None:
        arranges = facts.pop("arranges", "moves")
        register_aspect(name, "axes", describe_function(axes), axes=axes, arranges=arranges)
    if kind:
        register_aspect(name, "kind", source, kind=kind, modules=tuple(modules), gates=gates)
    for aspect, value in facts.items():
        register_aspect(name, aspect, source, **{aspect: value})
    if is_function:
        _make_visible(op)
    return get_entry(name)


def _validate_facts(name: str, facts: dict[str, str]) -> None:
    for aspect, value in facts.items():
        if aspect not in FACTS:
            raise RequestError(
                f"register_op: {name} has no '{aspect}', expected one of {', '.join(FACTS)}"
            )
        if value not in FACTS[aspect]:
            raise RequestError(
                f"register_op: {name} has {aspect}='{value}', expected one of "
                f"{', '.join(FACTS[aspect])}"
            )


def _validated_kinks(name: str, kinks: Sequence[float]) -> tuple[float, ...]:
    try:
        points = tuple(sorted({float(kink) for kink in kinks}))
    except (TypeError, ValueError):
        raise RequestError(f"register_op: {name} has kinks {kinks!r}, expected numbers") from None
    if not all(abs(point) < float("inf") for point in points):
        raise RequestError(f"register_op: {name} has kinks {kinks!r}, expected finite numbers")
    return points


def _make_visible(function: type[Any]) -> None:
    """Make calls of an autograd function visible to `torch.overrides.TorchFunctionMode`."""
    original = function.forward
    if hasattr(original, "nlbench_op"):
        return
    name = qualified_name(function)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        # The first argument of an old-style forward is a context, which modes must not see.
        has_context = function.setup_context is torch.autograd.Function.setup_context
        context, operands = (args[:1], args[1:]) if has_context else ((), args)

        def call(*operands: Any, **kwargs: Any) -> Any:
            # Each active mode calls this again, so that the next one sees it too.
            if has_torch_function(operands):
                return handle_torch_function(call, operands, *operands, **kwargs)
            return original(*context, *operands, **kwargs)

        call.__name__ = function.__name__
        call.nlbench_op = name  # type: ignore[attr-defined]
        return call(*operands, **kwargs)

    forward.nlbench_op = name  # type: ignore[attr-defined]
    function.forward = staticmethod(forward)
