"""Catch the activation calls of a forward pass, whichever way they are made.

They are caught through PyTorch's function override, so that a module, a function, a tensor
method, an in-place call and the second call of a reused module are all seen, once each, and no
module is ever called again.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from nlbench.errors import Undefined
from nlbench.probes.modules import Naming
from nlbench.probes.ops import FUSED, activation_kind

from .attention import FUSED_ATTENTION, softmaxes_of
from .axis_rules import batch_first, softmax_axis
from .axis_tracking import Layouts, tensors_in
from .calls import Begun, Call, Kept
from .gates import GATE_KINDS, Gates
from .reduce import Side, capture
from .roles import Handwritten, Writing

__all__ = ["Watch"]


class Watch(TorchFunctionMode):
    """Sees every PyTorch function while forward passes run.

    Parameters
    ----------
    model : torch.nn.Module
    kept : Kept
    on_call : callable
        Told of each activation call, in their order, as soon as its role is known.
    on_unseen : callable
        Told the name of each fused function that computes activations, and where.
    """

    def __init__(
        self,
        model: nn.Module,
        kept: Kept,
        on_call: Callable[[Call], None],
        on_unseen: Callable[[str], None] = lambda what: None,
    ) -> None:
        super().__init__()
        self._model, self._kept = model, kept
        self._on_call, self._on_unseen = on_call, on_unseen
        self._paths = {module: path for path, module in model.named_modules()}
        self._handwritten = Handwritten(model)
        self._reset(1)

    def _reset(self, samples: int, *, is_part: bool = False) -> None:
        self._is_part = is_part
        self._stack: list[tuple[nn.Module, Writing | None]] = []
        self._naming = Naming(self._paths)
        self._waiting: deque[Call] = deque()
        self._layouts, self._gates = Layouts(samples), Gates()
        # Hooks run under the override too; what the probe itself computes is no operation.
        self._paused = False

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Know, for as long as this lasts, which module is running."""
        handles: list[RemovableHandle] = []
        try:
            for module in self._paths:
                # The last hook before and the first after forward, so that a user's own hooks
                # count as called from outside.
                handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                handles.append(
                    module.register_forward_hook(self._leave, prepend=True, always_call=True)
                )
            yield
        finally:
            for handle in handles:
                handle.remove()

    def run(self, given: Tensor, *, is_part: bool = False) -> None:
        """Run the model on a batch of inputs, or a part of it, and tell of all calls.

        Raises
        ------
        nlbench.Undefined
            Where what a sample becomes depends on the others, and they are not all there.
        """
        self._reset(len(given), is_part=is_part)
        constants = itertools.chain(self._model.parameters(), self._model.buffers())
        self._layouts.begin(given, constants)
        try:
            with self:
                self._model(given)
            while self._waiting:
                self._tell(self._waiting.popleft())
        finally:
            self._reset(1)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if self._waiting:
            self._tell_settled()
        writing = self._stack[-1][1] if self._stack else None
        if writing is None or not writing.possible:
            return self._called(func, args, kwargs)
        sources = list(tensors_in((*args, *kwargs.values())))
        is_of_input = writing.before(func, sources, self._layouts)
        sampled = sum(map(self._layouts.is_sampled, sources))
        output = self._called(func, args, kwargs)
        if is_of_input:
            writing.after(func, sampled, output)
        return output

    def _called(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        name = getattr(func, "__name__", "")
        if self._is_part:
            self._refuse_mixing(name, args, kwargs)
        kind = self._kind(name)
        given = args[0] if args else kwargs.get("input")
        if kind is None or not isinstance(given, Tensor) or not self._counts_as(kind, given):
            if self._kept.attention and name in FUSED_ATTENTION:
                output = self._attend(func, args, kwargs)
            else:
                output = func(*args, **kwargs)
            self._follow(func, name, args, kwargs, output)
            if name in FUSED:
                self._on_unseen(f"{name} of {self._naming.path(self._running) or 'the model'}")
            return output
        base = self._naming.base(self._running, kind)
        label = self._naming.number(base)
        axis = softmax_axis(given, args, kwargs) if kind in ("glu", "softmax") else 0
        x = given
        if kind == "glu":
            x = given.narrow(axis, 0, given.shape[axis] // 2)
            self._layouts.adopt(x, given)
        begun = self._begin(x, label, kind, axis if kind == "softmax" else None)
        output = func(*args, **kwargs)
        self._follow(func, name, args, kwargs, output)
        call = Call(label, base, kind, begun, self._end(begun, output))
        if kind in GATE_KINDS:
            call.gate = self._gates.begin(given, output)
        elif kind == "glu":
            call.role = "gate"
        elif kind == "softmax" and given.ndim > 2:
            call.role = "attention"
        self._add(call)
        return output

    @property
    def _running(self) -> nn.Module | None:
        return self._stack[-1][0] if self._stack else None

    def _kind(self, name: str) -> str | None:
        kind = activation_kind(name)
        # PyTorch's module calls the function of the class that it derives from.
        return "relu6" if kind == "hardtanh" and type(self._running) is nn.ReLU6 else kind

    def _refuse_mixing(self, name: str, args: Any, kwargs: Any) -> None:
        if self._layouts.is_over_samples(name, args, kwargs):
            raise Undefined(
                f"{name} in {self._naming.path(self._running) or 'the model'} computes with all "
                "samples of a batch, and the batch does not fit into memory as a whole"
            )

    def _counts_as(self, kind: str, given: Tensor) -> bool:
        """Whether a function that may be an activation is one here."""
        if kind == "softmax":
            return self._kept.attention
        # A sine of positions is no activation.
        return kind != "sin" or self._layouts.is_sampled(given)

    def _follow(self, func: Any, name: str, args: Any, kwargs: Any, output: object) -> None:
        prop = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
        self._layouts.follow(prop or name, args, kwargs, output)
        self._gates.follow(func, args, kwargs, output, self._layouts.is_constant)

    def _attend(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function that computes attention, and look at the softmax inside."""

        def on_softmax(x: Tensor, y: Tensor, axis: int) -> None:
            base = self._naming.base(self._running, "softmax")
            label = self._naming.number(base)
            begun = self._begin(x, label, "softmax", axis)
            self._add(Call(label, base, "softmax", begun, self._end(begun, y), "attention"))

        with softmaxes_of(on_softmax):
            return func(*args, **kwargs)

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
            not self._layouts.is_constant(given),
        )

    def _axes(self, given: Tensor, label: str) -> tuple[int | None, int, bool]:
        """Batch axis, channel axis, and whether the latter is assumed."""
        if self._layouts.is_constant(given) and (given.ndim == 0 or len(given) > 1):
            # The same for all samples, it counts as one.
            return None, given.ndim - 1, False
        try:
            return self._layouts.of(given)
        except Undefined as error:
            raise Undefined(f"{label}: {error}") from None

    def _end(self, begun: Begun, output: Tensor) -> Side | None:
        if begun.side is None:
            return None
        return self._capture(batch_first(output, begun.batch), begun.axis)

    def _capture(self, tensor: Tensor, axis: int) -> Side:
        self._paused, before = True, self._paused
        try:
            return capture(tensor, axis, self._kept.reduction, self._kept.functions)
        finally:
            self._paused = before

    def _is_wanted(self, label: str, kind: str) -> bool:
        writing = self._stack[-1][1] if self._stack else None
        if writing is None or self._kept.wanted(label, kind):
            return self._kept.wanted(label, kind)
        # Inside a handwritten activation the call may come to bear the module's name, and be of
        # a kind that only all of its operations tell.
        return self._kept.wanted(self._naming.next(self._paths[writing.module]), None)

    def _add(self, call: Call) -> None:
        writing = self._stack[-1][1] if self._stack else None
        if writing is not None:
            writing.calls.append(call)
        else:
            self._waiting.append(call)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._stack and (outer := self._stack[-1][1]) is not None:
            outer.possible = False
        given = self._handwritten.input_of(module, args, kwargs)
        writing = None
        if given is not None:
            path, kind = self._paths[module], type(module).__name__.lower()
            writing = Writing(module, given, lambda: self._begin(given, path, kind))
        self._stack.append((module, writing))

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        if not self._stack or self._stack[-1][0] is not module:
            # A hook of somebody else's raised before ours came to its turn.
            return
        writing = self._stack.pop()[1]
        if writing is None:
            return
        is_activation = writing.is_activation(output)
        if writing.is_decided(output):
            self._handwritten.remember(module, is_activation)
        self._waiting += [self._written(writing, output)] if is_activation else writing.calls

    def _written(self, writing: Writing, output: Any) -> Call:
        """Make one call of all that a handwritten activation called."""
        for inner in writing.calls:
            self._naming.give_back(inner.base)
        self._layouts.adopt(output, writing.given)
        base = self._paths[writing.module]
        name = self._naming.number(base)
        if (only := writing.only_call) is not None:
            only.name, only.base = name, base
            return only
        assert writing.begun is not None
        end = self._end(writing.begun, output)
        return Call(name, base, writing.kind, writing.begun, end)

    def _tell_settled(self) -> None:
        while self._waiting and self._waiting[0].is_settled:
            self._tell(self._waiting.popleft())

    def _tell(self, call: Call) -> None:
        if call.gate is not None and call.gate.is_gate:
            call.role = "gate"
        self._paused, before = True, self._paused
        try:
            self._on_call(call)
        finally:
            self._paused = before
