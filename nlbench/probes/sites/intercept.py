"""Catch the activation calls of a forward pass, whichever way they are made.

They are caught through PyTorch's function override, so that a module, a function, a tensor
method, an in-place call and the second call of a reused module are all seen, once each, and no
module is ever called again.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nlbench.errors import Undefined
from nlbench.introspection.axes import batch_first, softmax_axis
from nlbench.introspection.module_stack import HandwrittenCall, SiteName, SiteNames
from nlbench.introspection.operations import FUSED, DispatchMode, FunctionCall, tensors_in

from .reduce import Function, Side, capture
from .roles import GATE_KINDS, Fate, Gate, Gates, Logits, Unseen

__all__ = ["Begun", "FusedSoftmaxes", "Kept", "SiteCall", "Watch"]


@dataclass(frozen=True)
class Kept:
    """What is kept of an activation call.

    Parameters
    ----------
    reduction : {"spatial", "flatten", "published"}
    functions : mapping of str to callable
        Of the whole tensor, to one number a sample.
    attention : bool
        Whether softmaxes count.
    wanted : callable
        From the name and kind of a call to whether it may be kept; a kind of None is one that
        is not known yet.
    """

    reduction: str = "spatial"
    functions: Mapping[str, Function] = field(default_factory=dict)
    attention: bool = False
    wanted: Callable[[str, str | None], bool] = lambda name, kind: True


@dataclass(frozen=True)
class Begun:
    """The input of a call that has not given its output yet.

    Parameters
    ----------
    side : Side or None
        None where nobody wants it.
    batch : int or None
        Batch axis of the tensor itself; None where it has none, being made of constants.
    axis : int
        Channel axis, with the batch put first.
    shape : tuple of int
        Of one sample.
    assumed : bool
        Whether the channel axis is a guess.
    sampled : bool
        Whether the tensor may come from the model's input.
    """

    side: Side | None
    batch: int | None
    axis: int
    shape: tuple[int, ...]
    assumed: bool
    sampled: bool


@dataclass
class SiteCall:
    """One call of an activation.

    Parameters
    ----------
    site : SiteName
    begun : Begun
        Its input.
    y : Side or None
        Its output; None where nobody wants it.
    role : {"activation", "gate", "attention", "softcap"}
    undecided : list of Gate or Fate
        What tells whether it has another role, where that is not known at once.
    """

    site: SiteName
    begun: Begun
    y: Side | None
    role: str = "activation"
    undecided: list[Gate | Fate] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Of the site."""
        return self.site.text

    @property
    def kind(self) -> str:
        """Of activation."""
        return self.site.kind

    @property
    def is_settled(self) -> bool:
        """Whether its role is known."""
        return all(one.is_settled for one in self.undecided)


@dataclass
class _Written:
    """A handwritten activation that is running: what was found unseen before, its input, calls."""

    unseen: int
    begun: Begun | None = None
    calls: list[SiteCall] = field(default_factory=list)


class Watch(SiteNames):
    """Sees every PyTorch function while forward passes run.

    Parameters
    ----------
    model : torch.nn.Module
    kept : Kept
    on_call : callable
        Told of each activation call, in their order, as soon as its role is known.
    on_unseen : callable
        Told, at each pass, what computes activations that can't be seen, and where.
    """

    def __init__(
        self,
        model: nn.Module,
        kept: Kept,
        on_call: Callable[[SiteCall], None],
        on_unseen: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.kept = kept
        self._on_call, self._on_unseen = on_call, on_unseen
        super().__init__(model)
        self._reset()

    def _reset(self, *inputs: Tensor) -> None:
        constants = itertools.chain(self.model.parameters(), self.model.buffers())
        self.begin(*inputs, constants=constants if inputs else ())
        self._waiting: deque[SiteCall] = deque()
        # What is known of handwritten activations that are running.
        self._begun: dict[int, _Written] = {}
        self._gates = Gates()
        self._logits = Logits()
        self._unseen = Unseen()
        # Hooks run under the override too; what the probe itself computes is no operation.
        self._paused = False

    def run(self, given: Tensor) -> None:
        """Run the model on a batch of inputs, or a part of it, and tell of all calls."""
        self._reset(given)
        try:
            with self:
                output = self.model(given)
            self._unseen.end(output)
            for what in self._unseen.remarks():
                self._on_unseen(what)
            while self._waiting:
                self._tell(self._waiting.popleft())
        finally:
            self._reset()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._paused:
            return func(*args, **(kwargs or {}))
        if self._waiting:
            self._tell_settled()
        return super().__torch_function__(func, types, args, kwargs)

    def called(self, call: FunctionCall) -> Any:
        """Call a function of PyTorch's, and keep what is wanted of it if it is an activation."""
        name, kind = call.name, self.kind_of(call)
        if kind is None or (kind == "softmax" and not self.kept.attention):
            is_attention = self.kept.attention and name in FUSED_ATTENTION
            output = self._attend(call) if is_attention else call.run()
            self.follow(call, output)
            if name in FUSED:
                self._on_unseen(f"{name} of {self._place}")
            return output
        site, given = self.name(kind), call.input
        axis = softmax_axis(call) if kind in ("glu", "softmax") else 0
        x = given
        if kind == "glu":
            x = given.narrow(axis, 0, given.shape[axis] // 2)
            self.layouts.adopt(x, given)
        begun = self._begin(x, site.text, kind, axis if kind == "softmax" else None)
        output = call.run()
        self.follow(call, output, is_site=True)
        seen = SiteCall(site, begun, self._end(begun, output))
        if kind in GATE_KINDS:
            seen.undecided.append(self._gates.begin(given, output))
        elif kind == "glu":
            seen.role = "gate"
        elif kind == "softmax" and given.ndim > 2:
            seen.role = "attention"
        if kind not in ("glu", "softmax"):
            seen.undecided += self._logits.begin(kind, given, output)
        self._add(seen)
        return output

    @property
    def _place(self) -> str:
        return self.path or "the model"

    def follow(self, call: FunctionCall, output: object, *, is_site: bool = False) -> None:
        """Note what became of the axes, and what the output is made of."""
        super().follow(call, output)
        given = list(filter(self.layouts.is_sampled, call.tensors))
        if outputs := list(tensors_in((output,))):
            self._gates.follow(call, outputs, self.layouts.is_constant)
            self._logits.follow(call, given, outputs)
        self._unseen.follow(call.operation, given, output, self._place, is_site=is_site)

    def _attend(self, call: FunctionCall) -> Any:
        """Call a function that computes attention, and look at the softmax inside."""

        def on_softmax(x: Tensor, y: Tensor, axis: int) -> None:
            site = self.name("softmax")
            begun = self._begin(x, site.text, "softmax", axis)
            self._add(SiteCall(site, begun, self._end(begun, y), "attention"))

        with FusedSoftmaxes(on_softmax):
            return call.run()

    def _begin(self, given: Tensor, label: str, kind: str, axis: int | None = None) -> Begun:
        batch, channel, assumed = self._axes(given, label)
        if axis is not None and axis != batch:
            channel, assumed = axis, False
        channel = channel + 1 if batch is None or channel < batch else channel
        moved = batch_first(given, batch)
        return Begun(
            self._capture(moved, channel) if self._is_wanted(label, kind) else None,
            batch,
            channel,
            tuple(moved.shape[1:]),
            assumed,
            not self.layouts.is_constant(given),
        )

    def _axes(self, given: Tensor, label: str) -> tuple[int | None, int, bool]:
        """Batch axis, channel axis, and whether the latter is assumed."""
        if self.layouts.is_constant(given) and (given.ndim == 0 or len(given) > 1):
            # The same for all samples, it counts as one.
            return None, given.ndim - 1, False
        try:
            return self.layouts.of(given)
        except Undefined as error:
            raise Undefined(f"{label}: {error}") from None

    def _end(self, begun: Begun, output: Tensor) -> Side | None:
        if begun.side is None:
            return None
        return self._capture(batch_first(output, begun.batch), begun.axis)

    def _capture(self, tensor: Tensor, axis: int) -> Side:
        self._paused, before = True, self._paused
        try:
            return capture(tensor, axis, self.kept.reduction, self.kept.functions)
        finally:
            self._paused = before

    def _is_wanted(self, label: str, kind: str) -> bool:
        handwritten = self.handwritten
        if handwritten is None or self.kept.wanted(label, kind):
            return self.kept.wanted(label, kind)
        # Inside a handwritten activation the call may come to bear the module's name, and be of
        # a kind that only all of its operations tell.
        return self.kept.wanted(self.next(self._paths[handwritten.module]), None)

    def _add(self, call: SiteCall) -> None:
        handwritten = self.handwritten
        if handwritten is None:
            self._waiting.append(call)
        else:
            self._of(handwritten).calls.append(call)

    def _of(self, handwritten: HandwrittenCall) -> _Written:
        return self._begun.setdefault(id(handwritten), _Written(len(self._unseen.found)))

    def handwritten_begins(self, handwritten: HandwrittenCall) -> None:
        """Keep the input of what may be a handwritten activation: it may be overwritten."""
        kind = type(handwritten.module).__name__.lower()
        self._of(handwritten).begun = self._begin(
            handwritten.given, self._paths[handwritten.module], kind
        )

    def handwritten_ends(
        self, handwritten: HandwrittenCall, output: Any, name: SiteName | None
    ) -> None:
        """Make one call of all that a handwritten activation called."""
        written = self._of(handwritten)
        del self._begun[id(handwritten)]
        if name is None:
            self._waiting += written.calls
            return
        self._unseen.forget(written.unseen, output)
        if handwritten.is_one_call and written.calls:
            self._waiting.append(written.calls[0])
        else:
            assert written.begun is not None
            self._waiting.append(SiteCall(name, written.begun, self._end(written.begun, output)))

    def _tell_settled(self) -> None:
        while self._waiting and self._waiting[0].is_settled:
            self._tell(self._waiting.popleft())

    def _tell(self, call: SiteCall) -> None:
        for one in call.undecided:
            call.role = one.role or call.role
        self._paused, before = True, self._paused
        try:
            self._on_call(call)
        finally:
            self._paused = before


FUSED_ATTENTION = {"scaled_dot_product_attention", "multi_head_attention_forward"}


class FusedSoftmaxes(DispatchMode):  # type: ignore[no-untyped-call]
    """Tells of each softmax that is computed, whole or inside PyTorch's fused attention.

    The kernels that run are the ones that would run anyway; where one of them does not show
    its softmax, it is computed beside it from what the kernel was given.

    Parameters
    ----------
    on_softmax : callable
        Told of its input, its output and its axis.

    Examples
    --------
    >>> q = torch.randn(1, 2, 5, 4)
    >>> with FusedSoftmaxes(lambda x, y, axis: print(y.shape, axis)):
    ...     _ = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    torch.Size([1, 2, 5, 5]) 3
    """

    def __init__(self, on_softmax: Callable[[Tensor, Tensor, int], None]) -> None:
        super().__init__()
        self._on_softmax = on_softmax

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        output = func(*args, **kwargs)
        if name in ("_softmax", "_safe_softmax"):
            self._on_softmax(args[0], output, int(args[1]) % args[0].ndim)
        elif name.startswith("_scaled_dot_product") and "math" not in name:
            names = (argument.name for argument in func._schema.arguments)
            x = _logits({**dict(zip(names, args, strict=False)), **kwargs})
            self._on_softmax(x, torch.softmax(x, -1), x.ndim - 1)
        return output


def _logits(given: dict[str, Any]) -> Tensor:
    """Compute what a fused kernel takes the softmax of: (batch, heads, queries, keys)."""
    query, key = given["query"], given["key"]
    if query.shape[1] != key.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scale = given.get("scale") or 1 / math.sqrt(query.shape[-1])
    logits: Tensor = query @ key.transpose(-2, -1) * scale
    bias = given.get("attn_mask", given.get("attn_bias"))
    if bias is not None:
        logits = logits + bias if bias.dtype != torch.bool else logits.masked_fill(~bias, -math.inf)
    if given.get("is_causal"):
        above = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(above, -math.inf)
    return logits
