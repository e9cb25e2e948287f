"""Registration of operations from other libraries: `nlbench.register_op`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function

from nlbench.errors import RequestError

from .registry import FACTS, Operation, entry_of, qualified_name, register_aspect, source_of


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
    name, source = qualified_name(op), f"register_op({qualified_name(op)})"
    _validate_facts(name, facts)
    if kinks is not None:
        points = _validated_kinks(name, kinks)
        where = " and ".join(f"{point:g}" for point in points)
        bends = f"at {where}" if points else ""
        register_aspect(name, "line", source, caveat, kinks=points, bends=bends)
    if line is not None:
        register_aspect(name, "line", source_of(line), caveat, line=line, bends="by its own rule")
    if graph is not None:
        register_aspect(name, "graph", source_of(graph), caveat, graph=graph)
    if axes is not None:
        arranges = facts.pop("arranges", "moves")
        register_aspect(name, "axes", source_of(axes), axes=axes, arranges=arranges)
    if kind:
        register_aspect(name, "kind", source, kind=kind, modules=tuple(modules), gates=gates)
    for aspect, value in facts.items():
        register_aspect(name, aspect, source, **{aspect: value})
    if is_function:
        _make_visible(op)
    return entry_of(name)


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
