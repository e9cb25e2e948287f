"""Intercept the activation calls of a forward pass.

PyTorch's function override reports each call of a function or tensor method exactly once, wherever
it is made, including in-place calls and calls by reused modules. No module is run a second time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from nlbench.errors import Undefined
from nlbench.introspection.attention import SoftmaxInterceptor
from nlbench.introspection.axes import batch_first, softmax_axis
from nlbench.introspection.function_calls import (
    FunctionCall,
    hidden_calls,
    is_transformed,
    tensors_in,
)
from nlbench.introspection.module_stack import (
    CallId,
    HandwrittenCall,
    ModuleCall,
    ModuleStack,
    SiteName,
    SiteNames,
)

from .modules import ModulePlace, find_places
from .reduce import Side, UnreducedFunction, capture
from .roles import GateRoles, GateTracker, LogitRoles, RoleTracker, UnseenActivations
from .rows import FoldedRows, PositionSelector
from .sites_probe import RowPolicy

# Activations whose output multiplies the other half of a gated unit: SwiGLU, GEGLU, ReGLU.
GATED_UNITS = ("gelu", "relu", "silu")


@dataclass(frozen=True)
class CapturePolicy:
    """Options for selecting calls and reducing their tensors."""

    reduction: str = "spatial"  # spatial, flatten or published
    # Functions that map the unreduced tensor to one number per sample.
    functions: Mapping[str, UnreducedFunction] = field(default_factory=dict)
    attention: bool = False  # include softmaxes
    # Returns True if a call with the given name and kind may be selected; the kind is None while it
    # is unknown.
    selects: Callable[[str, str | None], bool] = lambda name, kind: True
    # Selects the positions to include, each of which is a row if rows are tokens.
    positions: PositionSelector = field(default_factory=lambda: PositionSelector(RowPolicy()))
    # Separates samples from positions that share the first axis; if None, they are all rows.
    folded: FoldedRows | None = None
    # Called with a place to whose positions a padding mask doesn't apply.
    on_unmasked: Callable[[str], object] = lambda place: None

    def capture(self, tensor: Tensor, axis: int, place: str) -> Side:
        """Reduce a batch-first tensor with channels along `axis`."""
        problem = ""
        if tensor.is_quantized:
            tensor = tensor.dequantize()
        if self.folded is not None:
            tensor, axis, problem = self.folded.unfold(tensor, axis, place)
        if problem and self.positions.policy.takes_any_rows:
            return self.capture_rows(tensor, axis)
        if self.positions.is_unmasked(tensor, axis):
            self.on_unmasked(place)
        side = capture(tensor, axis, self.reduction, self.functions, self.positions)
        return replace(side, problem=problem) if problem else side

    def capture_rows(self, tensor: Tensor, axis: int) -> Side:
        """Reduce a tensor whose entries belong to unknown samples.

        Rows are its nodes, along the first axis, or else all of its positions.
        """
        if tensor.is_quantized:
            tensor = tensor.dequantize()
        if tensor.ndim > 1 and not (self.positions.policy.nodes and axis):
            tensor = tensor.movedim(axis, -1).flatten(0, -2)
            axis = 1
        return capture(tensor, axis, self.reduction, self.functions)


@dataclass
class SiteCall:
    """One call at a site."""

    label: str  # name of the place while the call runs
    x: Side | None  # input of the call; None if the call is not selected, or can't be measured
    batch: int | None  # batch axis of the input; None if it is unknown
    axis: int  # channel axis after the batch axis is moved to 0
    shape: tuple[int, ...]  # shape of one sample
    assumed: bool  # True if the channel axis is a guess
    problem: str = ""  # reason why the call can't be measured; empty if it can
    any_rows: bool = False  # True if the rows are known, but not the sample of each
    order: Tensor | None = None  # sample of each entry of the batch axis; None if in order
    y: Side | None = None  # output of the call, like the input; None until the call has returned
    # Known at the end of a handwritten activation.
    site: SiteName = field(default_factory=lambda: SiteName("", "", ""))
    call: CallId | None = None  # position in the forward pass
    last: CallId | None = None  # position of the last of several consecutive calls
    argument: int | str | None = None  # position or keyword of a module's input
    result: int | str | None = None  # position or key of the output in what a module returns
    role: str = "activation"  # activation, gate, attention, softcap, block, mlp, span, module
    # Trackers that determine the role if it depends on how the output is used.
    trackers: list[GateTracker | RoleTracker] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the site."""
        return self.site.text

    @property
    def kind(self) -> str:
        """Kind of activation."""
        return self.site.kind

    @property
    def is_settled(self) -> bool:
        """True if the role is final."""
        return all(tracker.is_settled for tracker in self.trackers)


class CallInterceptor(SiteNames):
    """Function mode that intercepts the activation calls of forward passes.

    `on_call` is called with each, in order, once its role is final, and `on_unseen` in each pass
    with a description of each activation that can't be intercepted.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: CapturePolicy,
        on_call: Callable[[SiteCall], None],
        on_unseen: Callable[[str], None] = lambda description: None,
    ) -> None:
        self.policy = policy
        self._on_call = on_call
        self._on_unseen = on_unseen
        super().__init__(model)
        self._reset()

    def _reset(self, *inputs: Tensor) -> None:
        self.begin(*inputs)
        # Calls to report once their roles and those of all earlier calls are final.
        self._waiting: deque[SiteCall] = deque()
        # Running handwritten activations, with the number of unseen operations before each.
        self._wholes: dict[int, tuple[SiteCall, int]] = {}
        self._gates = GateRoles()
        self._logits = LogitRoles()
        self._unseen = UnseenActivations()
        # True while the probe itself computes, since hooks also run in this mode.
        self._paused = False
        # Name of a tensor subclass among the arguments of calls, which hides where it comes from.
        self._subclass = ""

    def run(self, inputs: Tensor) -> None:
        """Run the model on a batch or a microbatch, and report all calls."""
        self._reset(inputs)
        try:
            with self:
                output = self.model(inputs)
            self._unseen.end(output)
            outputs = list(tensors_in((output,)))
            if outputs and not any(map(self.layouts.is_sampled, outputs)):
                self._on_unseen(self._hidden_by())
            for description in self._unseen.descriptions():
                self._on_unseen(description)
            while self._waiting:
                self._report(self._waiting.popleft())
        finally:
            self._reset()

    def _hidden_by(self) -> str:
        """Describe what hides the way from the input to the output."""
        if self._subclass:
            return f"any that the tensor subclass {self._subclass} hides, expected plain tensors"
        return "whatever computes the output, outside PyTorch"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._paused:
            return func(*args, **(kwargs or {}))
        for kind in types:
            if kind not in (Tensor, nn.Parameter):
                self._subclass = kind.__name__
        while self._waiting and self._waiting[0].is_settled:
            self._report(self._waiting.popleft())
        return super().__torch_function__(func, types, args, kwargs)

    def called(self, call: FunctionCall) -> Any:
        """Call a PyTorch function, and capture its input and output if it is an activation."""
        hides = call.operation.hides
        kind = self.classify_call(call)
        if kind is None or (kind == "softmax" and not self.policy.attention):
            is_attention = self.policy.attention and hides == "softmax"
            output = self._attend(call) if is_attention else call.run()
            self.follow(call, output)
            if hides == "activations":
                count = hidden_calls(call)
                calls = f" ({count} calls)" if count else ""
                self._on_unseen(f"{call.name} of {self._path_or_model}{calls}")
            return output
        site = self.name(kind)
        source = call.input
        call_id = self.current_id
        axis = softmax_axis(call) if kind in ("glu", "softmax") else 0
        x = source
        if kind == "glu":
            x = source.narrow(axis, 0, source.shape[axis] // 2)
            self.layouts.adopt(x, source)
        site_call = self._begin(x, site.text, kind, axis if kind == "softmax" else None)
        site_call.site = site
        site_call.call = call_id
        output = call.run()
        self.follow(call, output, is_site=True)
        self._end(site_call, output)
        if call.operation.gates or kind in GATED_UNITS:
            site_call.trackers.append(self._gates.begin(source, output))
        elif kind == "glu":
            site_call.role = "gate"
        elif kind == "softmax" and source.ndim > 2:
            site_call.role = "attention"
        if kind not in ("glu", "softmax"):
            site_call.trackers += self._logits.begin(kind, source, output)
        self._add(site_call)
        return output

    @property
    def _path_or_model(self) -> str:
        return self.path or "the model"

    def follow(self, call: FunctionCall, output: object, *, is_site: bool = False) -> None:
        """Track the axes of a call's output, and its effect on the roles of earlier calls."""
        super().follow(call, output)
        sampled = list(filter(self.layouts.is_sampled, call.tensors))
        if outputs := list(tensors_in((output,))):
            self._gates.follow(call, outputs, self.layouts.is_constant)
            self._logits.follow(call, sampled, outputs)
        self._unseen.follow(call.operation, sampled, output, self._path_or_model, is_site=is_site)

    def _attend(self, call: FunctionCall) -> Any:
        """Call a function that computes attention, and capture the softmax inside."""

        def on_softmax(x: Tensor, y: Tensor, axis: int) -> None:
            site = self.name("softmax")
            site_call = self._begin(x, site.text, "softmax", axis)
            site_call.site = site
            site_call.role = "attention"
            self._end(site_call, y)
            self._add(site_call)

        with SoftmaxInterceptor(on_softmax):
            return call.run()

    def _begin(self, x: Tensor, label: str, kind: str | None, axis: int | None = None) -> SiteCall:
        """Begin a call with its input, which the call may overwrite."""
        batch: int | None = None
        problem = ""
        any_rows = False
        try:
            batch, channel, assumed = self._axes(x)
        except Undefined as error:
            problem = str(error)
            known = self.layouts.channel(x)
            channel = max(x.ndim - 1, 0) if known is None else known
            assumed = known is None
            if self.policy.positions.policy.takes_any_rows and not (
                is_transformed(x) or x.is_nested
            ):
                problem = ""
                any_rows = True
            shape = () if x.is_nested else tuple(x.shape[1:])
        else:
            if axis is not None and axis != batch:
                channel = axis
                assumed = False
            channel = channel + 1 if channel < batch else channel
            shape = tuple(batch_first(x, batch).shape[1:])
        call = SiteCall(label, None, batch, channel, shape, assumed, problem, any_rows)
        call.order = None if batch is None else self.layouts.order(x)
        if not problem and self._is_selected(label, kind):
            call.x = self._capture(call, x)
        if kind == "softmax" and not problem:
            with self._unobserved():
                if bool((x <= torch.finfo(x.dtype).min / 2).any()):
                    call.problem = "masked logits have no mean"
        return call

    def _axes(self, x: Tensor) -> tuple[int, int, bool]:
        """Return the batch axis, the channel axis, and True if the latter is assumed."""
        if is_transformed(x):
            raise Undefined(
                "it is called inside torch.vmap or another transform of torch.func, which hides "
                "its tensors"
            )
        return self.layouts.describe(x)

    def _end(self, call: SiteCall, output: Tensor) -> None:
        if call.x is not None:
            call.y = self._capture(call, output)

    def _capture(self, call: SiteCall, tensor: Tensor) -> Side:
        with self._unobserved():
            if call.any_rows:
                return self.policy.capture_rows(tensor, call.axis)
            moved = batch_first(tensor, call.batch)
            if call.order is not None:
                moved = moved[call.order.argsort().to(moved.device)]
            return self.policy.capture(moved, call.axis, call.label)

    @contextmanager
    def _unobserved(self) -> Iterator[None]:
        """Let the probe itself compute."""
        before = self._paused
        self._paused = True
        try:
            yield
        finally:
            self._paused = before

    def _is_selected(self, label: str, kind: str | None) -> bool:
        handwritten = self.handwritten
        if handwritten is None or self.policy.selects(label, kind):
            return self.policy.selects(label, kind)
        # Inside a handwritten activation, the call may turn out to be the module's only operation.
        # It then has the module's name and a kind that is still unknown.
        return self.policy.selects(self.next(self._paths[handwritten.module]), None)

    def _add(self, call: SiteCall) -> None:
        handwritten = self.handwritten
        (self._waiting if handwritten is None else handwritten.probed).append(call)

    def handwritten_begins(self, handwritten: HandwrittenCall) -> None:
        """Capture the input of a possible handwritten activation before it can be overwritten."""
        whole = self._begin(handwritten.source, self._paths[handwritten.module], None)
        self._wholes[id(handwritten)] = whole, len(self._unseen.operations)

    def handwritten_ends(
        self, handwritten: HandwrittenCall, output: Any, name: SiteName | None
    ) -> None:
        """Merge all calls of a handwritten activation into one."""
        whole = self._wholes.pop(id(handwritten), None)
        if name is None or whole is None:
            self._waiting += handwritten.probed
            return
        call, unseen_before = whole
        self._unseen.forget(unseen_before, self._paths[handwritten.module], output)
        if handwritten.is_one_call and handwritten.probed:
            handwritten.probed[0].call = handwritten.call
            self._waiting.append(handwritten.probed[0])
        else:
            call.site, call.call = name, handwritten.call
            self._end(call, output)
            if name.kind in GATED_UNITS:
                call.trackers.append(self._gates.begin(handwritten.source, output))
            self._waiting.append(call)

    def _report(self, call: SiteCall) -> None:
        for tracker in call.trackers:
            call.role = tracker.role or call.role
        with self._unobserved():
            self._on_call(call)


class ModuleInterceptor(ModuleStack):
    """Intercepts the module calls at a model's places, as soon as the output of each is known."""

    def __init__(
        self, model: nn.Module, of: str, policy: CapturePolicy, on_call: Callable[[SiteCall], None]
    ) -> None:
        super().__init__(model)
        self.policy = policy
        self._of = of
        self._on_call = on_call
        # Places by the calls that receive their inputs, and by those that return their outputs.
        self._starts: dict[CallId, list[ModulePlace]] = defaultdict(list)
        self._ends: dict[CallId, list[ModulePlace]] = defaultdict(list)
        self._begun: dict[ModulePlace, SiteCall] = {}

    def run(self, inputs: Tensor) -> None:
        """Run the model on a batch or a microbatch, and report all calls."""
        if not self._starts:
            for place in find_places(self.model, inputs[:2], self._of):
                self._starts[CallId(self._paths[place.module], place.call)].append(place)
                self._ends[self._end_id(place)].append(place)
        self.restart()
        self._begun.clear()
        self.model(inputs)

    def _end_id(self, place: ModulePlace) -> CallId:
        return CallId(self._paths[place.last], place.call)

    def around(self, call: ModuleCall) -> Any:
        """Capture the inputs of the places that begin with a call, and the outputs at their end."""
        x: Side | None = None
        for place in self._starts.get(call.id, ()):
            name = place.name
            site = SiteName(name, name, type(place.module).__name__.lower())
            axes = place.before
            selected = self.policy.selects(name, site.kind) and not place.problem
            if selected and x is None:
                # Places that begin with one call have the same input.
                x = self.policy.capture(
                    batch_first(place.get_input(call), axes.batch), axes.channel, name
                )
            self._begun[place] = SiteCall(
                name,
                x if selected else None,
                axes.batch,
                axes.channel,
                place.shape,
                axes.assumed,
                site=site,
                call=call.id,
                last=None if place.last is place.module else self._end_id(place),
                role=place.kind,
                problem=place.problem,
                argument=place.argument,
                result=place.result,
            )
        output = super().around(call)
        y: Side | None = None
        for place in self._ends.get(call.id, ()):
            if place in self._begun:
                y = self._end(place, self._begun.pop(place), place.get_output(output), y)
        return output

    def _end(
        self, place: ModulePlace, call: SiteCall, output: Tensor, y: Side | None
    ) -> Side | None:
        """Report a call, and return its output, which places that end with one call share."""
        if call.x is not None:
            if y is None:
                moved = batch_first(output, place.after.batch)
                y = self.policy.capture(moved, place.after.channel, f"{place.name} (output)")
            call.y = y
            rows = len(call.x.reduced), len(call.y.reduced)
            if rows[0] != rows[1]:
                call.problem = (
                    f"{rows[0]} rows of the input and {rows[1]} of the output, so rows don't "
                    "correspond"
                )
        self._on_call(call)
        return y
