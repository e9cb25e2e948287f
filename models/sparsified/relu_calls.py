"""The ReLU calls of a network, found by running it on an example, and replaced by PReLUs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nlbench.errors import RequestError, Undefined, first_line
from nlbench.introspection.axes import channel_axes
from nlbench.introspection.function_calls import FunctionCall
from nlbench.introspection.model_state import evaluation_mode, preserve_attributes
from nlbench.introspection.module_stack import SiteNames, running_module
from nlbench.introspection.pytree import tree_leaves
from nlbench.introspection.wrapped_calls import count_call, replace_module, track_calls, wrap_calls


class SparsePReLU(nn.PReLU):
    """A PReLU, initially a ReLU, whose units can be frozen with slope 1.

    Parameters
    ----------
    units : int
        Number of channels.
    layerwise : bool
        Use one slope for all channels.
    axis : int
        Channel axis of the input.

    Attributes
    ----------
    weight : parameter of shape (units,), or (1,) if layerwise
        The slopes, initially 0.
    frozen : bool buffer of the same shape
        True where the slope is 1 regardless of `weight`, which gets no gradient there.

    Examples
    --------
    >>> layer = SparsePReLU(2)
    >>> layer.frozen[1] = True
    >>> layer(torch.tensor([[-1.0, -1.0]])).tolist()
    [[-0.0, -1.0]]
    """

    frozen: Tensor

    def __init__(self, units: int, *, layerwise: bool = False, axis: int = 1) -> None:
        super().__init__(1 if layerwise else units, init=0.0)
        self.units = units
        self.layerwise = layerwise
        self.axis = axis
        self.register_buffer("frozen", torch.zeros(len(self.weight), dtype=torch.bool))

    @property
    def linear_units(self) -> int:
        """Number of channels with slope 1."""
        return int((self.slopes() == 1).sum()) * (self.units if self.layerwise else 1)

    def slopes(self) -> Tensor:
        """Return the effective slopes, of shape (units,), or (1,) if layerwise."""
        return self.weight.masked_fill(self.frozen, 1.0)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply each negative value by the slope of its channel."""
        if self.layerwise or self.axis == 1:
            return F.prelu(input, self.slopes())
        moved = F.prelu(input.movedim(self.axis, 1), self.slopes())
        return moved.movedim(1, self.axis)

    def extra_repr(self) -> str:
        """Return the number of channels and the options that differ from the defaults."""
        axis = "" if self.axis == 1 else f", axis={self.axis}"
        return f"{self.units}{', layerwise=True' if self.layerwise else ''}{axis}"


class PReLUPerCall(nn.Module):
    """Replacement for a ReLU that is called several times, with one PReLU per call, in order."""

    def __init__(self, calls: Iterable[SparsePReLU]) -> None:
        super().__init__()
        for index, call in enumerate(calls):
            self.add_module(str(index), call)

    def forward(self, input: Tensor) -> Tensor:
        """Apply the PReLU for this call."""
        index = count_call(self)
        if str(index) not in self._modules:
            raise RequestError(
                f"a ReLU is called {index + 1} times in one forward pass, but was called "
                f"{len(self._modules)} times on the example passed to sparsify"
            )
        return getattr(self, str(index))(input)


OUTPUT_TOLERANCE = 1e-6
"""Relative and absolute tolerance within which two outputs count as equal."""


class ReLUCall(NamedTuple):
    """One call of ReLU in one forward pass.

    Parameters
    ----------
    owner : torch.nn.Module
        The `torch.nn.ReLU`, or the module whose forward calls ReLU as a function.
    axis : int
        Channel axis of the input.
    channels : tensor of shape (units,)
        Without values, of the input's data type and on its device.
    """

    owner: nn.Module
    axis: int
    channels: Tensor


class ActivationCalls(SiteNames):
    """The activation calls in one forward pass.

    Attributes
    ----------
    relus : list of ReLUCall
        In call order.
    others : Counter
        Number of calls to each other activation, except softmax, which mixes channels, and the
        PReLUs of a sparsified network.
    output
        The model's output.
    """

    def __init__(self, model: nn.Module, inputs: tuple[Tensor, ...], axes: Sequence[int]) -> None:
        super().__init__(model)
        self.begin(*inputs, channels=axes)
        self._modules = set(model.modules())
        self.relus: list[ReLUCall] = []
        self.others: Counter[str] = Counter()
        with self.hooked(), self:
            self.output = model(*inputs)

    def call(self, call: FunctionCall) -> Any:
        """Record a call of an activation, and run it."""
        if self.current is not None:
            # Wrapped calls find their owner in the same way.
            owner = running_module(self._modules)
            if self.current.kind == "relu" and owner is not None:
                x = call.input
                axis = self._channel_axis(x)
                self.relus.append(ReLUCall(owner, axis, x.new_empty(x.shape[axis])))
            elif not isinstance(owner, SparsePReLU):
                self.others[self.current.kind] += 1
        return super().call(call)

    def _channel_axis(self, x: Tensor) -> int:
        try:
            _, axis, is_assumed = self.layouts.describe(x)
        except Undefined as error:
            raise RequestError(f"a ReLU can't have one slope per channel: {error}") from error
        if is_assumed:
            raise RequestError(
                "a ReLU can't have one slope per channel: the channel axis of its input of shape "
                f"{tuple(x.shape)} is unknown"
            )
        return axis


def find_calls(
    model: nn.Module, example: Tensor | tuple[Tensor, ...] | None = None
) -> ActivationCalls:
    """Find the ReLU calls in evaluation mode, and count the calls to other activations.

    Parameters
    ----------
    example : tensor or tuple of tensor
        Arguments of the model, batch first; by default noise with the first layer's input shape.

    Examples
    --------
    >>> network = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.SiLU())
    >>> calls = find_calls(network)
    >>> [(call.axis, len(call.channels)) for call in calls.relus], dict(calls.others)
    ([(1, 3)], {'silu': 1})
    """
    inputs = _example_inputs(model, example)
    # A network may work in place.
    first = tuple(tensor.clone() for tensor in inputs)
    arguments = tuple(tensor.clone() for tensor in inputs)
    try:
        with evaluation_mode(model):
            with preserve_attributes(model):
                axes = channel_axes(lambda tensors: model(*tensors), first)
            return ActivationCalls(model, arguments, axes)
    except (RuntimeError, TypeError, IndexError, AttributeError) as error:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs)
        raise RequestError(
            f"the model can't be run on an example of shape {shapes}: {first_line(error)}"
        ) from error


def _example_inputs(
    model: nn.Module, example: Tensor | tuple[Tensor, ...] | None
) -> tuple[Tensor, ...]:
    if isinstance(example, Tensor):
        return (example,)
    if example is not None:
        return tuple(example)
    axes = {nn.Linear: 0, nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
    first = next((m for m in model.modules() if type(m) in axes), None)
    if first is None:
        raise RequestError("sparsify requires an example input to find the channels; pass example=")
    channels = first.in_features if isinstance(first, nn.Linear) else first.in_channels
    weight: Tensor = first.weight  # type: ignore[assignment]
    shape = (1, int(channels), *(32,) * axes[type(first)])  # type: ignore[arg-type]
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    # The negative copy makes every unit of the first layer change sign unless its bias is large.
    return (torch.cat([noise, -noise]).to(weight.device, weight.dtype),)


def _apply_slopes(layer: nn.Module, call: FunctionCall) -> Any:
    return layer(call.input) if call.operation.kind == "relu" else call.run()


def replace_calls(model: nn.Module, calls: Sequence[ReLUCall], layerwise: bool) -> None:
    """Replace each ReLU call of a model by a PReLU, in place."""
    by_owner: dict[nn.Module, list[SparsePReLU]] = {}
    for call in calls:
        layer = SparsePReLU(len(call.channels), layerwise=layerwise, axis=call.axis)
        layer.to(call.channels).train(model.training)
        by_owner.setdefault(call.owner, []).append(layer)
    for owner, layers in by_owner.items():
        substitute = layers[0] if len(layers) == 1 else PReLUPerCall(layers).train(model.training)
        if type(owner) is nn.ReLU and owner is not model:
            replace_module(model, owner, substitute)
        else:
            names = itertools.chain(["relu"], map("relu_{}".format, itertools.count(1)))
            name = next(name for name in names if not hasattr(owner, name))
            owner.add_module(name, substitute)
            wrap_calls(owner, _apply_slopes, name)
    track_calls(model, counters=PReLUPerCall)


def outputs_agree(before: Any, after: Any) -> bool:
    """Return True if two outputs of a model agree within `OUTPUT_TOLERANCE`."""
    pairs = zip(tree_leaves(before), tree_leaves(after), strict=True)
    return all(
        torch.allclose(old, new, rtol=OUTPUT_TOLERANCE, atol=OUTPUT_TOLERANCE, equal_nan=True)
        for old, new in pairs
        if isinstance(old, Tensor)
    )


def other_activations(
    model: nn.Module, example: Tensor | tuple[Tensor, ...] | None = None
) -> dict[str, int]:
    """Count the calls to activations other than ReLU, which `sparsify` doesn't change.

    Examples
    --------
    >>> other_activations(nn.Sequential(nn.Linear(2, 3), nn.ReLU6(), nn.Linear(3, 1)))
    {'relu6': 1}
    """
    return dict(find_calls(model, example).others)


def call_counts_text(calls: Mapping[str, int]) -> str:
    """Format the number of calls to each activation.

    Examples
    --------
    >>> call_counts_text({"hardswish": 2, "hardsigmoid": 1})
    '2 calls of hardswish and 1 call of hardsigmoid'
    """
    return " and ".join(f"{n} call{'s' * (n > 1)} of {kind}" for kind, n in calls.items())
