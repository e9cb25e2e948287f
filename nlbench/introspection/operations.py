"""Which operations exist and what is known of them: one registry for all probes.

To add an operation of your own, call `register_op`. To add one of PyTorch's, say here at the end
what kind of activation it is, if it is one, and how it acts on numbers; in
`nlbench.probes.lines.rules`, in the file of its family, how it acts on points of a segment; in
`nlbench.probes.graph.rules` what it does to channels; in `axes` where it puts axes.

An operation has one `Operation`, whatever it is called as: ``torch.relu``, ``Tensor.relu_``,
``torch.nn.functional.relu`` and ``aten::relu`` are one. What is known of it is said in aspects,
each registered directly above the code that says it:

- its kind as an activation, by `activation`, which makes its calls sites;
- how it acts on points of a segment, by `line_rule`, or why it can't be traced, by `not_affine`;
- its place in the channel graph, by `graph_rule`;
- where it puts the axes of what it is given, by `axis_rule`, and the channels, by `layer`;
- whether it works on numbers one by one, by `elementwise`.

An aspect of an operation is said once: a second time raises `nlbench.PluginError`, which names
both. Built-in rules come through the entry-point group ``nlbench.ops``, as anybody's do: each
entry names a module, whose import registers, or a function, which is called.

Examples
--------
A rule for the lines and one for the graph, above the functions that say them::

    @line_rule("conv1d", "conv2d", "conv3d")
    def convolution(call): ...

    @graph_rule("conv2d")
    def channels_of_a_convolution(call): ...
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode

from nlbench.errors import PluginError, RequestError
from nlbench.registry import entry_points

__all__ = [
    "FUSED",
    "DispatchMode",
    "FunctionCall",
    "Operation",
    "activation",
    "axis_rule",
    "elementwise",
    "graph_rule",
    "in_each_dimension",
    "known",
    "layer",
    "line_rule",
    "load_errors",
    "named_modules",
    "not_affine",
    "operation",
    "page",
    "qualified_name",
    "register_op",
    "storage_of",
    "supported",
    "tensors_in",
    "written_in",
]


Maker = TypeVar("Maker", bound=Callable[..., Any])


@dataclass
class Operation:
    """What is known of one operation.

    Attributes
    ----------
    name : str
        As PyTorch calls it, without overload and trailing underscore; those of other libraries
        than PyTorch's with theirs before it, as ``mylib::hat``.
    kind : str
        Kind of activation; empty if it is none.
    modules : tuple of type
        Modules that do nothing else, whose site bears the module's name.
    acts : str
        On numbers one by one: ``keeps`` (changes no value), ``affine`` (as long as at most one
        operand is data), ``sums`` (also where both are) or ``bends``; empty if it is none of
        these, or not known to be.
    kinks : tuple of float or None
        Where it bends, if it is affine in pieces and works on numbers one by one.
    line : callable or None
        From a call to its rule on points of a segment; see `nlbench.probes.lines.rules.rule`.
    graph : callable or None
        From a call to the nodes of its output; see `nlbench.probes.graph.rules`.
    axes : callable or None
        From a call to where each axis of its input is in its output; see `axes`.
    arranges : str
        If there is such a rule, what for: ``moves``, ``reshapes``, ``expands``, ``reduces``, or
        empty.
    channels : str
        Which axis of its output holds channels, whatever came in: ``second``, ``last``,
        ``normalized`` (the last, if only that is normalised) or ``mixed`` (it isn't known); empty
        if they are where they were.
    refused : str
        Why it can't be traced exactly, where that is known.
    bends : str
        Where it bends, in words; empty if it is affine.
    caveats : mapping of str to str
        By aspect: what is not supported of it.
    sources : mapping of str to str
        By aspect: the module and function that said it.
    """

    name: str
    kind: str = ""
    modules: tuple[type[nn.Module], ...] = ()
    acts: str = ""
    kinks: tuple[float, ...] | None = None
    line: Callable[..., Any] | None = None
    graph: Callable[..., Any] | None = None
    axes: Callable[..., Any] | None = None
    arranges: str = ""
    channels: str = ""
    refused: str = ""
    bends: str = ""
    caveats: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    @property
    def traced(self) -> bool:
        """Whether it acts on points of a segment in a known way."""
        return self.line is not None or self.kinks is not None

    @property
    def has_numbers(self) -> bool:
        """Whether more is known of it than where its axes go."""
        return bool(self.sources.keys() - {"axes", "channels"})

    def is_bent(self, data: int) -> bool:
        """Whether it works element by element and is not affine in its operands.

        Parameters
        ----------
        data : int
            How many of its operands are data.

        Examples
        --------
        >>> [operation(f).is_bent(n) for f, n in ((torch.mul, 1), (torch.mul, 2), (torch.add, 2))]
        [False, True, False]
        """
        return self.acts == "bends" or (self.acts in ("keeps", "affine") and data > 1)


_OPERATIONS: dict[str, Operation] = {}
_LOCK = threading.RLock()


class _Plugins:
    """Whether the entry points have been loaded; apart from the lock on what is known.

    A thread that imports a module with rules writes them down while it holds that module's
    import lock, which the thread that loads may be waiting for.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.importing = threading.local()
        self.loaded = False
        self.errors: list[str] = []


_PLUGINS = _Plugins()

# What an aspect is called when two say it.
_ASPECTS = {
    "kind": "kinds",
    "acts": "actions on numbers one by one",
    "line": "rules on points of a segment",
    "graph": "rules in the channel graph",
    "axes": "rules for its axes",
    "channels": "places of its channels",
}


def _note(name: str, aspect: str, source: str, caveat: str = "", **facts: Any) -> None:
    """Write down an aspect of an operation."""
    with _LOCK:
        found = _OPERATIONS.setdefault(name, Operation(name))
        if aspect in found.sources:
            if all(_same(getattr(found, key), value) for key, value in facts.items()):
                return
            raise PluginError(
                f"operation '{name}' has two {_ASPECTS[aspect]}: of {found.sources[aspect]} "
                f"and of {source}"
            )
        found.sources[aspect] = source
        if caveat:
            found.caveats[aspect] = caveat
        for key, value in facts.items():
            setattr(found, key, value)


def _same(one: Any, other: Any) -> bool:
    """Whether two say the same, as where a notebook's cell is run again."""
    if callable(one) and callable(other) and getattr(one, "__module__", "") == "__main__":
        return _source(one) == _source(other)
    return bool(one == other)


def _source(function: Any) -> str:
    module = getattr(function, "__module__", "") or "an unknown module"
    return f"{module}.{getattr(function, '__qualname__', type(function).__name__)}"


def _rule(
    aspect: str, names: Sequence[str], caveat: str = "", **facts: Any
) -> Callable[[Maker], Maker]:
    """Make what registers, above a function, that it is operations' rule for an aspect."""

    def register(rule: Maker) -> Maker:
        for name in names:
            _note(name, aspect, _source(rule), caveat, **{aspect: rule}, **facts)
        return rule

    return register


def line_rule(*names: str, bends: str = "", caveat: str = "") -> Callable[[Maker], Maker]:
    """Register how operations act on points of a segment, above the function that says it.

    Parameters
    ----------
    *names : str
        Of operations; see `Operation`.
    bends : str
        Where they bend, in words; empty if they are affine.
    caveat : str
        What is not supported.

    Raises
    ------
    nlbench.PluginError
        If one of them has a rule already; the message names both.
    """
    return _rule("line", names, caveat, bends=bends)


def not_affine(*names: str, why: str = "not piecewise affine") -> None:
    """Register that operations can't be traced exactly, and why."""
    for name in names:
        _note(name, "line", f"nlbench ({why})", refused=why)


def graph_rule(*names: str, caveat: str = "") -> Callable[[Maker], Maker]:
    """Register what operations do to channels, above the function that says it.

    Parameters
    ----------
    *names : str
        Of operations; see `Operation`. An operator has its function's name: ``mul`` for ``*``.
    caveat : str
        What is not supported.

    Raises
    ------
    nlbench.PluginError
        If one of them has a rule already; the message names both.
    """
    return _rule("graph", names, caveat)


def axis_rule(*names: str, arranges: str = "") -> Callable[[Maker], Maker]:
    """Register where operations put the axes of their input, above the function that says it.

    Parameters
    ----------
    *names : str
        Of operations; see `Operation`.
    arranges : str
        As in `Operation`.

    Raises
    ------
    nlbench.PluginError
        If one of them has a rule already; the message names both.
    """
    return _rule("axes", names, arranges=arranges)


def in_each_dimension(*names: str) -> tuple[str, ...]:
    """Name operations that there are for one, two and three axes of positions.

    Examples
    --------
    >>> in_each_dimension("conv")
    ('conv1d', 'conv2d', 'conv3d')
    """
    return tuple(f"{name}{axes}d" for name in names for axes in (1, 2, 3))


def layer(channels: str, *names: str) -> None:
    """Register operations after which the channels are at a place; as in `Operation`."""
    for name in names:
        _note(name, "channels", __name__, channels=channels)


def activation(kind: str, *names: str, modules: Sequence[type[nn.Module]] = ()) -> None:
    """Register operations as activations: each call of one is a site.

    Parameters
    ----------
    kind : str
        What the sites are called: ``relu``.
    *names : str
        Of operations; the kind itself without any.
    modules : sequence of type
        Modules that do nothing else: their sites bear the module's name.
    """
    for name in names or (kind,):
        _note(name, "kind", __name__, kind=kind, modules=tuple(modules))


def elementwise(acts: str, *names: str) -> None:
    """Register operations that work on numbers one by one; `acts` as in `Operation`."""
    for name in names:
        _note(name, "acts", __name__, acts=acts)


def register_op(
    op: Any,
    *,
    kind: str = "",
    kinks: Sequence[float] | None = None,
    modules: Sequence[type[nn.Module]] = (),
    line: Callable[..., Any] | None = None,
    graph: Callable[..., Any] | None = None,
    axes: Callable[..., Any] | None = None,
    caveat: str = "",
) -> Operation:
    """Tell nlbench what an operation of your own does.

    Parameters
    ----------
    op : torch.library operation or torch.autograd.Function
        Such as ``torch.ops.mylib.hat``, what ``torch.library.custom_op`` returns, or a subclass
        of ``torch.autograd.Function``. The forward of the latter is wrapped, so that whoever
        watches a network sees one call of it in place of what it is made of.
    kind : str, optional
        If it is an activation, what kind: its calls are sites then.
    kinks : sequence of float, optional
        If it works on the numbers of its first argument one by one, is continuous, and affine
        between these: how it acts on points of a segment then follows from calling it. Empty
        if it is affine.
    modules : sequence of type, optional
        Modules that do nothing but call it: their sites bear the module's name.
    line, graph, axes : callable, optional
        What `line_rule`, `graph_rule` and `axis_rule` register, for operations of another sort.
    caveat : str, optional
        What is not supported of it.

    Returns
    -------
    Operation
        What is known of it now.

    Raises
    ------
    nlbench.PluginError
        If something else was said of it before; the message names both.
    nlbench.RequestError
        If it is no operation that can be seen in a network, or the kinks are no numbers.

    Examples
    --------
    >>> import torch
    >>> from nlbench.probes.lines import trace_segment
    >>> class Hat(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         return (1 - abs(x)).clamp(min=0)
    >>> register_op(Hat, kind="hat", kinks=(-1.0, 0.0, 1.0)).kind
    'hat'
    >>> class Network(torch.nn.Module):
    ...     def forward(self, x):
    ...         return Hat.apply(x)
    >>> trace_segment(Network(), torch.tensor([-2.0]), torch.tensor([2.0])).t.tolist()
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    op = getattr(op, "_opoverload", op)  # What torch.library.custom_op returns.
    if not _is_seen(op):
        raise RequestError(
            f"register_op: {getattr(op, '__name__', repr(op))} is no operation that can be seen in "
            "a network, expected one of torch.library or a subclass of torch.autograd.Function"
        )
    if kinks is not None and line is not None:
        raise RequestError("register_op: both kinks and a line rule given, expected one of them")
    name, source = qualified_name(op), f"register_op({qualified_name(op)})"
    if kinks is not None:
        points = _checked_kinks(name, kinks)
        where = " and ".join(f"{point:g}" for point in points)
        _note(name, "line", source, caveat, kinks=points, bends=f"at {where}" if points else "")
    if line is not None:
        _note(name, "line", _source(line), caveat, line=line, bends="by a rule of its own")
    if graph is not None:
        _note(name, "graph", _source(graph), caveat, graph=graph)
    if axes is not None:
        _note(name, "axes", _source(axes), axes=axes, arranges="moves")
    if kind:
        _note(name, "kind", source, kind=kind, modules=tuple(modules))
    if isinstance(op, type):
        _make_visible(op)
    return _OPERATIONS.setdefault(name, Operation(name))


def _is_seen(op: Any) -> bool:
    if isinstance(op, type):
        return issubclass(op, torch.autograd.Function)
    return isinstance(op, torch._ops.OpOverload | torch._ops.OpOverloadPacket)


def _checked_kinks(name: str, kinks: Sequence[float]) -> tuple[float, ...]:
    try:
        points = tuple(sorted({float(kink) for kink in kinks}))
    except (TypeError, ValueError):
        raise RequestError(f"register_op: {name} has kinks {kinks!r}, expected numbers") from None
    if not all(abs(point) < float("inf") for point in points):
        raise RequestError(f"register_op: {name} has kinks {kinks!r}, expected finite ones")
    return points


def _make_visible(function: type[Any]) -> None:
    """Have an autograd function's calls seen by `torch.overrides.TorchFunctionMode`."""
    original = function.forward
    if hasattr(original, "nlbench_op"):
        return
    name = qualified_name(function)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        # The old style of forward has a context first, which is nobody's business.
        has_context = function.setup_context is torch.autograd.Function.setup_context
        context, given = (args[:1], args[1:]) if has_context else ((), args)

        def call(*given: Any, **kwargs: Any) -> Any:
            # Asked again by each mode that watches: the next one is to see it as well.
            if has_torch_function(given):
                return handle_torch_function(call, given, *given, **kwargs)
            return original(*context, *given, **kwargs)

        call.__name__ = function.__name__
        call.nlbench_op = name  # type: ignore[attr-defined]
        return call(*given, **kwargs)

    forward.nlbench_op = name  # type: ignore[attr-defined]
    function.forward = staticmethod(forward)


def qualified_name(func: Any) -> str:
    """Name an operation whichever way it is called; with its library if that isn't PyTorch.

    Examples
    --------
    >>> import torch
    >>> qualified_name(torch.Tensor.mul_), qualified_name(torch.ops.aten.relu.default)
    ('mul', 'relu')
    >>> qualified_name(torch.Tensor.__rsub__), qualified_name(torch.Tensor.shape.__get__)
    ('rsub', 'shape')
    """
    own = getattr(func, "nlbench_op", None)
    if own is not None:
        return str(own)
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
    """Name one of PyTorch's; what reads or sets a property is named after it."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return str(getattr(getattr(func, "__self__", None), "__name__", ""))
    if name.startswith("__"):
        return str(name.strip("_"))
    return str(name.removesuffix("_"))


def operation(func: Callable[..., Any]) -> Operation:
    """Give what is known of an operation as it was called.

    Parameters
    ----------
    func : callable
        What a mode of PyTorch is told of: a function, a method, an overload.

    Examples
    --------
    >>> import torch
    >>> operation(torch.Tensor.relu_).kind
    'relu'
    """
    return known(qualified_name(func))


def known(name: str) -> Operation:
    """Give what is known of an operation, by name; of one that is not known an empty one."""
    _load()
    return _OPERATIONS.get(name) or Operation(name)


class FunctionCall:
    """One call of a function of PyTorch's, as a mode that watches is told of it.

    Parameters
    ----------
    function : callable
    args : tuple
    kwargs : dict, optional

    Attributes
    ----------
    operation : Operation
        What is known of the function.

    Examples
    --------
    >>> call = FunctionCall(torch.cat, ([torch.ones(1), torch.ones(2)],), {"dim": 0})
    >>> call.name, len(call.tensors), call.argument(1, "dim"), call.run()
    ('cat', 2, 0, tensor([1., 1., 1.]))
    """

    def __init__(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs or {}
        self.operation = operation(function)

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors that it is given, in their order."""
        return list(tensors_in((*self.args, *self.kwargs.values())))

    @property
    def name(self) -> str:
        """Of the operation."""
        return self.operation.name

    @property
    def input(self) -> Any:
        """What an activation function is called on, by place or by name."""
        if self.args:
            return self.args[0]
        return self.kwargs.get("input", next(iter(self.kwargs.values()), None))

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """What it was given by name or at a place."""
        return self.kwargs.get(name, self.args[place] if len(self.args) > place else default)

    def run(self) -> Any:
        """Call the function."""
        return self.function(*self.args, **self.kwargs)


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what PyTorch dispatches, without the compiler, whose import takes seconds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and to shield this from the compiler would import it.
        return False


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Give the tensors among values, also those in lists, tuples and dictionaries."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def storage_of(tensor: Tensor) -> StorageWeakRef | None:
    """Refer to a tensor's memory; None where it has none of its own, as a sparse one."""
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None


def written_in(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """List the tensors that the call of an overload changes in place."""
    return [
        tensor
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in((args[place] if place < len(args) else kwargs.get(argument.name),))
    ]


def _load() -> None:
    """Import what the entry points name, once; what it registers is known then."""
    if _PLUGINS.loaded or getattr(_PLUGINS.importing, "now", False):
        return
    with _PLUGINS.lock:
        if _PLUGINS.loaded:
            return
        _PLUGINS.importing.now = True
        try:
            for point in entry_points("nlbench.ops"):
                try:
                    loaded = point.load()
                    if not isinstance(loaded, ModuleType):
                        loaded()
                except (Exception, SystemExit) as error:
                    # A plugin's import can fail in any way; the rest is known without it.
                    what = f"{type(error).__name__}: {error}".splitlines()[0]
                    who = point.dist.name if point.dist else point.value
                    _PLUGINS.errors.append(
                        f"operations '{point.name}' of {who} are missing: {what}"
                    )
            _PLUGINS.loaded = True
        finally:
            _PLUGINS.importing.now = False


def load_errors() -> tuple[str, ...]:
    """Say which entry points of the group ``nlbench.ops`` could not be loaded, and why."""
    _load()
    return tuple(_PLUGINS.errors)


def supported() -> list[dict[str, str]]:
    """List what is known, an operation a row: what it is to sites, lines and graph.

    Returns
    -------
    list of dict
        With the keys ``operation``, ``kind``, ``lines``, ``graph``, ``caveats`` and ``from``.

    Examples
    --------
    >>> [row["lines"] for row in supported() if row["operation"] in ("exp", "relu")]
    ['refused: not piecewise affine', 'bends at 0']
    """
    _load()
    with _LOCK:
        said = (entry for entry in _OPERATIONS.values() if entry.has_numbers)
        operations = sorted(said, key=lambda entry: (entry.name.lower(), entry.name))
    return [_row(entry) for entry in operations]


def page() -> str:
    """Write the page of the documentation that lists what ships with nlbench.

    ``python -m nlbench.introspection.operations > docs/operations.md`` makes it anew.
    """
    rows = [row for row in supported() if row["from"] == "nlbench"]
    traced = [row for row in rows if row["lines"] and not row["lines"].startswith("refused")]
    refused = [row for row in rows if row["lines"].startswith("refused")]
    kinds = [row for row in rows if row["kind"]]
    followed = [row for row in rows if row["graph"]]
    caveats = {row["operation"]: row["caveats"].replace("line: ", "") for row in rows}
    parts = [
        _PREFACE,
        "## Traced on a segment\n",
        "| operation | on a segment | caveat |\n| --- | --- | --- |",
        *(f"| `{r['operation']}` | {r['lines']} | {caveats[r['operation']]} |" for r in traced),
        "\n## Refused on a segment\n",
        "Known, and not affine in pieces: `absdev` integrates along the segment instead.\n",
        _names(refused),
        "\n## Activations\n",
        "| operation | kind of its sites |\n| --- | --- |",
        *(f"| `{r['operation']}` | {r['kind']} |" for r in kinds),
    ]
    if followed:
        parts += ["\n## Followed in the channel graph\n", _names(followed)]
    return "\n".join([*parts, ""])


def _names(rows: Iterable[Mapping[str, str]]) -> str:
    return ", ".join(f"`{row['operation']}`" for row in rows) + "."


_PREFACE = """# Operations

What nlbench knows of PyTorch's operations, made from its registry (`nlbench list ops` shows it
with what your plugins add). An operation has one name here, whichever way it is called: `mul` is
`*`, `torch.mul` and `Tensor.mul_`. What is made of other operations, as `relu6` of `hardtanh`, is
traced by what it is made of.

An operation that is not listed is refused as unknown. Your own is registered in one line:

```python
nlbench.register_op(torch.ops.mylib.hat, kind="hat", kinks=(-1.0, 0.0, 1.0))
```

for one of `torch.library`, or a subclass of `torch.autograd.Function`, that works on numbers one
by one and is continuous and affine between the kinks. A package registers its own by an entry
point of the group `nlbench.ops`, which names a module whose import does that, or a function. For
operations of another sort `line=` takes what makes the rule of a call (see
`nlbench.probes.lines.rules.rule`).
"""


def _row(entry: Operation) -> dict[str, str]:
    lines = ""
    if entry.traced:
        lines = f"bends {entry.bends}" if entry.bends else "affine"
    elif (same := _OPERATIONS.get(entry.kind)) is not None and same.traced:
        lines = f"as {entry.kind}"  # The name of a function that calls it.
    elif entry.refused or entry.kind:
        lines = f"refused: {entry.refused or 'not piecewise affine'}"
    caveats = [f"{aspect}: {text}" for aspect, text in entry.caveats.items()]
    own = all(said.startswith("nlbench") for said in entry.sources.values())
    return {
        "operation": entry.name,
        "kind": entry.kind,
        "lines": lines,
        "graph": "followed" if entry.graph is not None else "",
        "caveats": "; ".join(caveats),
        "from": "nlbench" if own else "; ".join(dict.fromkeys(entry.sources.values())),
    }


def named_modules() -> tuple[type[nn.Module], ...]:
    """Modules whose site bears the module's own name, those of plugins among them."""
    _load()
    with _LOCK:
        own = (module for entry in _OPERATIONS.values() for module in entry.modules)
        return tuple(dict.fromkeys(own))


# Functions that compute activations inside one kernel.
FUSED = {
    "gru", "gru_cell", "lstm", "lstm_cell", "rnn_relu", "rnn_relu_cell", "rnn_tanh",
    "rnn_tanh_cell",
}  # fmt: skip

activation("glu", modules=(nn.GLU,))
activation("softmax", "softmax", "special_softmax", modules=(nn.Softmax,))
# Those that work on numbers one by one.
for _kind, _others, _modules in (
    ("celu", (), (nn.CELU,)),
    ("elu", (), (nn.ELU,)),
    ("gelu", (), (nn.GELU,)),
    ("hardshrink", (), (nn.Hardshrink,)),
    ("hardsigmoid", (), (nn.Hardsigmoid,)),
    ("hardswish", (), (nn.Hardswish,)),
    ("hardtanh", (), (nn.Hardtanh,)),
    ("leaky_relu", (), (nn.LeakyReLU,)),
    ("logsigmoid", ("log_sigmoid",), (nn.LogSigmoid,)),
    ("mish", (), (nn.Mish,)),
    ("prelu", (), (nn.PReLU,)),
    ("relu", (), (nn.ReLU,)),
    ("relu6", (), (nn.ReLU6,)),
    ("rrelu", (), (nn.RReLU,)),
    ("selu", (), (nn.SELU,)),
    ("sigmoid", ("special_expit",), (nn.Sigmoid,)),
    ("silu", (), (nn.SiLU,)),
    ("sin", (), ()),
    ("softplus", (), (nn.Softplus,)),
    ("softshrink", (), (nn.Softshrink,)),
    ("softsign", (), (nn.Softsign,)),
    ("tanh", (), (nn.Tanh,)),
    ("tanhshrink", (), (nn.Tanhshrink,)),
    ("threshold", ("_threshold",), (nn.Threshold,)),
):
    activation(_kind, _kind, *_others, modules=_modules)
    elementwise("bends", _kind, *_others)
# Operations on numbers one by one that change no value.
elementwise(
    "keeps",
    "alpha_dropout", "bfloat16", "clone", "contiguous", "detach", "double", "dropout", "dropout1d",
    "dropout2d", "dropout3d", "feature_alpha_dropout", "feature_dropout", "float", "half",
    "positive", "requires_grad", "to", "type", "type_as",
)  # fmt: skip
# Affine as long as at most one of the operands is data.
elementwise(
    "affine",
    "addcmul", "div", "divide", "lerp", "masked_fill", "mul", "multiply", "neg", "negative",
    "true_divide", "where",
)  # fmt: skip
# Affine also where both operands are data.
elementwise("sums", "add", "rsub", "sub", "subtract")
# Element by element, and not affine.
elementwise(
    "bends",
    "abs", "absolute", "acos", "acosh", "addcdiv", "and", "arccos", "arcsin", "arcsinh",
    "arctan", "arctan2", "arctanh", "asin", "asinh", "atan", "atan2", "atanh", "bitwise_and",
    "bitwise_not", "bitwise_or", "ceil", "clamp", "clamp_max", "clamp_min", "clip", "cos", "cosh",
    "eq", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "fix", "float_power", "floor", "fmax",
    "fmin", "fmod", "frac", "ge", "greater", "greater_equal", "gt", "heaviside", "hypot", "invert",
    "le", "less", "less_equal", "log", "log10", "log1p", "log2", "logaddexp", "logical_and",
    "logical_not", "logical_or", "logit", "lt", "max", "maximum", "min", "minimum",
    "nan_to_num", "ne", "or", "pow", "rdiv", "reciprocal", "remainder", "round", "rpow", "rsqrt",
    "rtruediv", "sgn", "sign", "sinc", "sinh", "special_entr", "special_erf", "special_erfc",
    "special_exp2", "special_expm1", "special_log1p", "special_sinc", "sqrt", "square", "tan",
    "trunc", "xlogy",
)  # fmt: skip


if __name__ == "__main__":
    # By the module's own name: what is registered is registered there.
    from . import operations as ops

    print(ops.page(), end="")
