"""Intercept calls in a network, to observe or replace their outputs.

A call is identified by the module call that makes it. Unlike a site's name, which is final only
when the calling module returns, the module call is known immediately, even if outputs of earlier
modules come from a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nlbench.errors import Undefined
from nlbench.introspection.axes import batch_first, softmax_axis
from nlbench.introspection.function_calls import FunctionCall, is_transformed, tensors_in
from nlbench.introspection.module_stack import CallId, ModuleCall, ModuleStack
from nlbench.parsers import unique
from nlbench.probes.sites.modules import REORDERED, replace_entry
from nlbench.probes.sites.rows import unfold_rows
from nlbench.probes.sites.site import SiteBatch
from nlbench.probes.sites.sites_observation import observe_sites


@dataclass(frozen=True)
class ReplaceableCall:
    """A call whose output can be replaced by a function of its input."""

    name: str  # name of the site or path of the module
    kind: str
    call: CallId
    channel_axis: int  # channel axis of the input and output, in their own layout
    channels: int
    shape: tuple[int, ...]  # shape of one sample's input, without the batch axis
    last: CallId | None = None  # call that returns the output of a span of several calls
    # Batch axis of the input and output, in their own layout; None if all samples share them.
    batch_axis: int | None = 0
    # contiguous or interleaved: order of the rows where the batch axis also holds positions.
    row_order: str = ""
    # Position or keyword of a module's input; None if it is the first tensor.
    argument: int | str | None = None
    # Position or key of the output in what the call returns; None if it is the first tensor.
    result: int | str | None = None

    def split_by_sample(self, tensor: Tensor, samples: int) -> tuple[Tensor, int]:
        """Return a tensor (n, ...) of the samples, where they are known, and its channel axis."""
        batch = self.batch_axis
        channel = self.channel_axis
        if batch is None:
            return tensor, channel
        moved = batch_first(tensor, batch)
        axis = channel + 1 if channel < batch else channel
        if len(moved) % samples:
            raise Undefined(
                f"{self.name} has {len(moved)} rows for {samples} samples: the network splits or "
                "selects samples, depending on their number"
            )
        if not self.row_order or not axis or len(moved) == samples:
            return moved, axis
        return unfold_rows(moved, samples, self.row_order), axis + 1

    @property
    def end(self) -> CallId:
        """Call that returns the output."""
        return self.last or self.call


Around = Callable[[CallId, Tensor, Callable[[], Any]], Any]
"""Maps a call's identity, its input and a function that runs it to its output."""


class CallInterception(ModuleStack):
    """Routes every module call and activation call in a forward pass through a function.

    The model's modules are modified only during `run`. The input of a call is that of the place
    that begins with it, if it is one of `places`; otherwise the first tensor.

    Examples
    --------
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> calls = []
    >>> def around(call, x, compute):
    ...     calls.append(call)
    ...     return compute()
    >>> _ = CallInterception(model).run(torch.zeros(1, 2), around)
    >>> calls[-1]
    CallId(path='1', number=0, position=0)
    """

    def __init__(self, model: nn.Module, places: Iterable[ReplaceableCall] = ()) -> None:
        super().__init__(model)
        places = list(places)
        self._arguments = {place.call: place.argument for place in places}
        # Positions or keys of outputs that aren't the first tensor of what a call returns.
        self.results = {place.end: place.result for place in places}

    def run(self, inputs: Tensor, around: Around) -> Any:
        """Run the model on inputs that it may modify in place, and return its output."""
        self.restart()
        self._around = around
        with self.hooked(), self:
            return self.model(inputs)

    def around(self, call: ModuleCall) -> Any:
        """Pass a module call with a tensor among its arguments to the function."""
        arguments = dict(call.arguments())
        key = self._arguments.get(call.id)
        x = first_tensor(arguments.values()) if key is None else arguments[key]
        compute = partial(super().around, call)
        return compute() if x is None else self._around(call.id, x, compute)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = FunctionCall(func, args, kwargs)
        identity = self.number_activation(call)
        if identity is None:
            return call.run()
        written: list[Tensor] = []

        def compute() -> Any:
            output = call.run()
            # The network may read what the call has written, rather than what it returns.
            if isinstance(output, Tensor) and any(shares_memory(output, t) for t in call.tensors):
                written.append(output)
            return output

        output = self._around(identity, activation_input(call), compute)
        # Autograd needs what the call has written.
        if not written or output is written[0] or output.requires_grad:
            return output
        return written[0].copy_(output)


def activation_input(call: FunctionCall) -> Tensor:
    """Return the input of an activation call, or the gated half of it for a gated linear unit."""
    source: Tensor = call.input
    if call.operation.kind != "glu":
        return source
    axis = softmax_axis(call)
    return source.narrow(axis, 0, source.shape[axis] // 2)


def first_tensor(values: Any) -> Tensor | None:
    """Return the first tensor in nested values."""
    return next(iter(tensors_in(values)), None)


def get_tensor(output: Any, key: int | str | None) -> Tensor:
    """Return an entry of a call's output, or its first tensor if the key is None."""
    tensor = first_tensor((output,)) if key is None else output[key]
    assert isinstance(tensor, Tensor)
    return tensor


def replace_tensor(output: Any, key: int | str | None, tensor: Tensor) -> Any:
    """Replace an entry of a call's output, or its first tensor if the key is None.

    Examples
    --------
    >>> replace_tensor({"mask": None, "hidden": torch.ones(1)}, None, torch.zeros(1))
    {'mask': None, 'hidden': tensor([0.])}
    """
    if key is None and isinstance(output, dict | tuple | list):
        entries = output.items() if isinstance(output, dict) else enumerate(output)
        key, entry = next((k, v) for k, v in entries if first_tensor((v,)) is not None)
        tensor = replace_tensor(entry, None, tensor)
    return replace_entry(output, key, tensor)


def shares_memory(first: Tensor, second: Tensor) -> bool:
    """Return True if two tensors are views of the same memory."""
    if any(t.layout != torch.strided or is_transformed(t) for t in (first, second)):
        return first is second
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def find_calls(
    model: nn.Module,
    example: Tensor,
    *,
    of: str = "activations",
    select: str = "*",
    on_unseen: Callable[[str], None] = lambda description: None,
    on_undefined: Callable[[str, str], object] = lambda place, reason: None,
    on_unmasked: Callable[[str], object] = lambda place: None,
) -> list[ReplaceableCall]:
    """Find the calls in a network that can be replaced, named as in the probe `sites`.

    The example is a batch of inputs on the model's device. `of`, `select`, `on_unseen`,
    `on_undefined` and `on_unmasked` are as in
    `nlbench.probes.sites.sites_observation.observe_sites`. MLPs whose layers are several children
    of a block are skipped.

    Raises
    ------
    Undefined
        If none of the calls can be replaced, or there are no such modules.

    Examples
    --------
    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1), nn.Tanh())
    >>> [(place.name, place.channels) for place in find_calls(model, torch.zeros(4, 2))]
    [('1', 3), ('3', 1)]
    """
    calls: list[ReplaceableCall] = []
    undefined: dict[str, str] = {}

    def refuse(place: str, reason: str) -> None:
        undefined[place] = reason
        on_undefined(place, reason)

    def add(batch: SiteBatch) -> None:
        assert batch.call is not None
        if batch.row_order == "reordered":
            refuse(batch.place, REORDERED)
            return
        site = batch.site
        if batch.last is not None and site.role != "span":
            return
        axis = site.channel_axis
        batch_axis = batch.batch_axis
        # In the tensor's own layout, in which the batch axis need not be the first.
        is_before = batch_axis is None or 0 < axis <= batch_axis
        calls.append(
            ReplaceableCall(
                site.name,
                site.kind if of == "activations" else site.role,
                batch.call,
                axis - 1 if is_before else axis,
                site.shape[axis - 1] if site.shape else 1,
                site.shape,
                batch.last,
                batch_axis,
                batch.row_order,
                batch.argument,
                batch.result,
            )
        )

    observe_sites(
        model,
        [example],
        add,
        of=of,
        select=select,
        on_unseen=on_unseen,
        on_undefined=refuse,
        on_unmasked=on_unmasked,
    )
    if not calls and undefined:
        raise Undefined("; ".join(unique(undefined.values())))
    if not calls and of != "activations":
        raise Undefined(
            f"the network has no {of} that are single modules and match the selection; "
            "replacement.of also takes activations, blocks, mlp, attention, spans:L and "
            "modules:GLOB"
        )
    return calls
