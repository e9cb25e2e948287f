"""Find the ReLU calls of a network, and give each call slopes of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from nlbench.errors import RequestError, Undefined, first_line
from nlbench.introspection.axes import channel_axes
from nlbench.introspection.model_state import attributes_kept, evaluation_mode
from nlbench.introspection.module_stack import SiteNames, running_module
from nlbench.introspection.operations import FunctionCall

__all__ = [
    "CHILD",
    "Calls",
    "PReLUPerCall",
    "ReLUCall",
    "SparsePReLU",
    "find_calls",
    "call_counts_text",
    "other_activations",
    "replace_calls",
    "returns_same",
]


CHILD = "called_relu"
"""Attribute of a module with the name of the child that stands for its calls of ReLU."""


class SparsePReLU(nn.PReLU):
    """A PReLU that starts as a ReLU, and of which units can be frozen as linear.

    Parameters
    ----------
    units : int
        Number of channels.
    layerwise : bool
        One slope for all channels in place of one each.
    axis : int
        Which axis of the input holds the channels, counted from 0.

    Attributes
    ----------
    weight : parameter of shape (units,), or (1,) if layerwise
        The slopes, at first 0.
    frozen : bool buffer of the same shape
        Where the slope is 1 whatever `weight` says: no gradient reaches it.

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
        self.units, self.layerwise, self.axis = units, layerwise, axis
        self.register_buffer("frozen", torch.zeros(len(self.weight), dtype=torch.bool))

    @property
    def linear_units(self) -> int:
        """How many channels have slope 1."""
        return int((self.slopes() == 1).sum()) * (self.units if self.layerwise else 1)

    def slopes(self) -> Tensor:
        """Give the slopes in force; (units,), or (1,) if layerwise."""
        return self.weight.masked_fill(self.frozen, 1.0)

    def forward(self, input: Tensor) -> Tensor:
        """Keep what is positive and multiply the rest by its channel's slope."""
        if self.layerwise or self.axis == 1:
            return F.prelu(input, self.slopes())
        moved = F.prelu(input.movedim(self.axis, 1), self.slopes())
        return moved.movedim(1, self.axis)

    def extra_repr(self) -> str:
        """Say the number of channels, and what is not as usual."""
        axis = "" if self.axis == 1 else f", axis={self.axis}"
        return f"{self.units}{', layerwise=True' if self.layerwise else ''}{axis}"


class PReLUPerCall(nn.Module):
    """Stands for a ReLU that is called several times in one pass: one PReLU a call.

    Parameters
    ----------
    calls : iterable of SparsePReLU
        In order of call.
    """

    def __init__(self, calls: Iterable[SparsePReLU]) -> None:
        super().__init__()
        for number, call in enumerate(calls):
            self.add_module(str(number), call)

    def forward(self, input: Tensor) -> Tensor:
        """Apply the PReLU of this call."""
        calls = _CALLS.get()
        number = 0
        if calls is not None:
            number = calls[self]
            calls[self] += 1
        if str(number) not in self._modules:
            raise RequestError(
                f"a ReLU is called {number + 1} times in one pass, but was called "
                f"{len(self._modules)} times on the example that the slopes were made for"
            )
        output: Tensor = getattr(self, str(number))(input)
        return output


# How often each module was called in the pass that is running. Beside the modules, not in them,
# so that a copy of a network, or the same network on another thread, has passes of its own.
_CALLS: ContextVar[Counter[nn.Module] | None] = ContextVar("calls", default=None)


class _Followed(nn.Module):
    """What a module becomes that calls ReLU as a function, or holds what does.

    Everything that a pass needs is put up and taken down around the call, so that nothing
    outlives a pass, however it ends; hooks would be skipped by an interrupt.
    """

    original: type[nn.Module]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = _CALLS.set(Counter()) if _CALLS.get() is None else None
        try:
            if CHILD not in vars(self):
                return super().__call__(*args, **kwargs)
            with _Substitution(self):
                return super().__call__(*args, **kwargs)
        finally:
            if token is not None:
                _CALLS.reset(token)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _remade, (self.original,), self.__getstate__()  # type: ignore[no-untyped-call]


@cache
def _followed(original: type[nn.Module]) -> type[nn.Module]:
    """Make the class of a followed module, which passes for the original one."""
    names = ("__module__", "__qualname__", "__doc__")
    about = {name: getattr(original, name) for name in names} | {"original": original}
    return type(original.__name__, (_Followed, original), about)


def _remade(original: type[nn.Module]) -> nn.Module:
    """Begin a copy of a followed module, for `copy` and `pickle`."""
    kind = _followed(original)  # type: ignore[arg-type]
    return kind.__new__(kind)


class _Substitution(TorchFunctionMode):
    """Calls a module's PReLU where the module's own forward calls ReLU as a function."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module, self._own = module, set(module.modules())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = FunctionCall(func, args, kwargs)
        # A child's calls are the child's, also where the example didn't reach them.
        if call.operation.kind == "relu" and running_module(self._own) is self._module:
            return getattr(self._module, vars(self._module)[CHILD])(call.input)
        return call.run()


@dataclass(frozen=True)
class ReLUCall:
    """One call of ReLU in one forward pass.

    Parameters
    ----------
    owner : torch.nn.Module
        The `torch.nn.ReLU` that is called, else the module whose forward calls it.
    axis, units : int
        Which axis of its input holds the channels, and how many there are.
    dtype, device
        Of its input.
    """

    owner: nn.Module
    axis: int
    units: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Calls:
    """What was called in one forward pass.

    Parameters
    ----------
    relus : list of ReLUCall
        In order.
    others : mapping of str to int
        How often another activation was called, by its kind; softmax, which mixes channels,
        and the PReLUs of a sparsified network aren't among them.
    output
        What the model returned.
    """

    relus: list[ReLUCall]
    others: Mapping[str, int]
    output: Any


class _Finder(SiteNames):
    def __init__(self, model: nn.Module, inputs: tuple[Tensor, ...], axes: Sequence[int]) -> None:
        super().__init__(model)
        self.begin(*inputs, channels=axes)
        self._own = set(model.modules())
        self.relus: list[ReLUCall] = []
        self.others: Counter[str] = Counter()

    def call(self, call: FunctionCall) -> Any:
        if self.current is not None:
            # Whose call it is, as `_Substitution` is going to ask.
            owner = running_module(self._own)
            if self.current.kind == "relu" and owner is not None:
                given = call.input
                axis = self._channel_axis(given)
                self.relus.append(
                    ReLUCall(owner, axis, given.shape[axis], given.dtype, given.device)
                )
            elif not isinstance(owner, SparsePReLU):
                self.others[self.current.kind] += 1
        return super().call(call)

    def _channel_axis(self, given: Tensor) -> int:
        try:
            _, axis, is_assumed = self.layouts.of(given)
        except Undefined as error:
            raise RequestError(f"a ReLU can't be given a slope a channel: {error}") from error
        if is_assumed:
            raise RequestError(
                "a ReLU can't be given a slope a channel: which axis of its input of shape "
                f"{tuple(given.shape)} holds the channels is not known"
            )
        return axis


AGREEMENT = 1e-6
"""Relative difference up to which the network counts as unchanged."""


def find_calls(model: nn.Module, example: Tensor | tuple[Tensor, ...] | None = None) -> Calls:
    """List the ReLU calls of an evaluation pass, and count those of other activations.

    Parameters
    ----------
    model : torch.nn.Module
    example : tensor or tuple of tensor
        What it is called with, each with the batch first; by default noise that fits the first
        layer.

    Raises
    ------
    nlbench.RequestError
        If it can't be run on the example, or has no layer to tell one.

    Examples
    --------
    >>> network = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.SiLU())
    >>> calls = find_calls(network)
    >>> [(call.axis, call.units) for call in calls.relus], dict(calls.others)
    ([(1, 3)], {'silu': 1})
    """
    inputs = _inputs_of(model, example)

    def copies() -> tuple[Tensor, ...]:
        return tuple(given.clone() for given in inputs)

    try:
        with evaluation_mode(model):
            with attributes_kept(model):
                axes = channel_axes(lambda given: model(*given), copies())
            given = copies()
            finder = _Finder(model, given, axes)
            with finder.hooked(), finder:
                output = model(*given)
    except (RuntimeError, TypeError, IndexError, AttributeError) as error:
        shapes = ", ".join(str(tuple(one.shape)) for one in inputs)
        raise RequestError(
            f"the model can't be run on an example of shape {shapes}: {first_line(error)}"
        ) from error
    return Calls(finder.relus, finder.others, output)


def _inputs_of(model: nn.Module, example: Tensor | tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    if isinstance(example, Tensor):
        return (example,)
    if example is not None:
        return tuple(example)
    axes = {nn.Linear: 0, nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
    first = next((m for m in model.modules() if type(m) in axes), None)
    if first is None:
        raise RequestError("sparsify needs an example input to see the channels; give example=")
    channels = first.in_features if isinstance(first, nn.Linear) else first.in_channels
    weight: Tensor = first.weight  # type: ignore[assignment]
    shape = (2, int(channels), *(32,) * axes[type(first)])  # type: ignore[arg-type]
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return (noise.to(weight.device, weight.dtype),)


def replace_calls(model: nn.Module, calls: list[ReLUCall], layerwise: bool) -> None:
    """Change a model so that each of its calls has a PReLU of its own."""
    by_owner: dict[nn.Module, list[SparsePReLU]] = {}
    for call in calls:
        layer = SparsePReLU(call.units, layerwise=layerwise, axis=call.axis)
        layer.to(call.device, call.dtype).train(model.training)
        by_owner.setdefault(call.owner, []).append(layer)
    for owner, layers in by_owner.items():
        made = layers[0] if len(layers) == 1 else PReLUPerCall(layers).train(model.training)
        if type(owner) is nn.ReLU and owner is not model:
            for parent in list(model.modules()):
                for name, child in parent._modules.items():
                    if child is owner:
                        parent._modules[name] = made
        else:
            name = _free_name(owner)
            owner.add_module(name, made)
            setattr(owner, CHILD, name)
    for module in list(model.modules()):
        if any(CHILD in vars(m) or isinstance(m, PReLUPerCall) for m in module.modules()):
            module.__class__ = _followed(type(module))  # type: ignore[arg-type]
        # What PyTorch's fused kernel for such a layer goes by: it would apply a ReLU.
        if isinstance(module, nn.TransformerEncoderLayer) and module.activation_relu_or_gelu == 1:
            module.activation_relu_or_gelu = 0
        # Padding packed away is for that kernel alone.
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _free_name(module: nn.Module) -> str:
    number, name = 0, "relu"
    while hasattr(module, name):
        number += 1
        name = f"relu_{number}"
    return name


def returns_same(before: Any, after: Any) -> bool:
    """Tell whether two outputs of a model hold the same numbers."""
    pairs = zip(tree_leaves(before), tree_leaves(after), strict=True)
    return all(
        torch.allclose(old, new, rtol=AGREEMENT, atol=AGREEMENT, equal_nan=True)
        for old, new in pairs
        if isinstance(old, Tensor)
    )


def other_activations(
    model: nn.Module, example: Tensor | tuple[Tensor, ...] | None = None
) -> dict[str, int]:
    """Count the calls of other activations than ReLU, which `sparsify` leaves as they are.

    Parameters
    ----------
    model : torch.nn.Module
        Sparsified or not.
    example : tensor or tuple of tensor
        See `nlbench.models.sparsified.prelu.sparsify`.

    Examples
    --------
    >>> other_activations(nn.Sequential(nn.Linear(2, 3), nn.ReLU6(), nn.Linear(3, 1)))
    {'relu6': 1}
    """
    return dict(find_calls(model, example).others)


def call_counts_text(calls: Mapping[str, int]) -> str:
    """Return the number of calls of each activation, as text.

    Examples
    --------
    >>> call_counts_text({"hardswish": 2, "hardsigmoid": 1})
    '2 calls of hardswish and 1 call of hardsigmoid'
    """
    return " and ".join(f"{n} call{'s' * (n > 1)} of {kind}" for kind, n in calls.items())
