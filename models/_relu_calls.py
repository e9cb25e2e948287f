"""Find the ReLU calls of a network, and give each call slopes of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nlbench.errors import RequestError, Undefined
from nlbench.probes.activations import activation_kind
from nlbench.probes.layout import Layouts

__all__ = [
    "CHILD",
    "Calls",
    "PReLUPerCall",
    "ReLUCall",
    "SparsePReLU",
    "find_calls",
    "follow_calls",
]

RELUS = ("relu", "relu_")
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
        running = _PASS.get()
        number = 0
        if running is not None:
            number = running.calls[self]
            running.calls[self] += 1
        if str(number) not in self._modules:
            raise RequestError(
                f"a ReLU is called {number + 1} times in one pass, but was called "
                f"{len(self._modules)} times on the example that the slopes were made for"
            )
        output: Tensor = getattr(self, str(number))(input)
        return output


@dataclass
class _Pass:
    """One forward pass: which modules are running, and what was called so far."""

    running: list[nn.Module] = field(default_factory=list)
    modes: list[_Substitution] = field(default_factory=list)
    calls: Counter[nn.Module] = field(default_factory=Counter)


# Kept beside the modules, not in them, so that a copy of a network, or the same network on
# another thread, has passes of its own.
_PASS: ContextVar[_Pass | None] = ContextVar("pass", default=None)


class _Substitution(TorchFunctionMode):
    """Calls a module's PReLU where the module's own forward calls ReLU as a function."""

    def __init__(self, module: nn.Module, running: list[nn.Module]) -> None:
        super().__init__()
        self._module, self._running = module, running

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # A child's calls are the child's, also where the example didn't reach them.
        if getattr(func, "__name__", "") in RELUS and self._running[-1] is self._module:
            given = args[0] if args else kwargs["input"]
            return getattr(self._module, vars(self._module)[CHILD])(given)
        return func(*args, **kwargs)


def _enter(module: nn.Module, args: object) -> None:
    running = _PASS.get()
    if running is None:
        running = _Pass()
        _PASS.set(running)
    running.running.append(module)
    if CHILD in vars(module):
        mode = _Substitution(module, running.running)
        mode.__enter__()  # type: ignore[no-untyped-call]
        running.modes.append(mode)


def _leave(module: nn.Module, args: object, output: object) -> None:
    running = _PASS.get()
    if running is None or not running.running:
        return  # Another hook failed before the module began.
    running.running.pop()
    if CHILD in vars(module):
        running.modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]
    if not running.running:
        _PASS.set(None)


def follow_calls(model: nn.Module) -> None:
    """Let a model know which of its modules is running, in every later pass.

    The hooks are plain functions, so that the model can still be copied and pickled.
    """
    for module in model.modules():
        if not isinstance(module, SparsePReLU):
            module.register_forward_pre_hook(_enter)
            module.register_forward_hook(_leave, prepend=True, always_call=True)


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


class _Finder(TorchFunctionMode):
    def __init__(self, stack: list[nn.Module], inputs: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.calls: list[ReLUCall] = []
        self.others: Counter[str] = Counter()
        self._stack = stack
        self._layouts = Layouts(len(inputs[0]))
        for given in inputs:
            self._layouts.begin(given)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in RELUS:
            given = args[0] if args else kwargs["input"]
            try:
                _, axis, _ = self._layouts.of(given)
            except Undefined as error:
                raise RequestError(f"a ReLU can't be given a slope a channel: {error}") from error
            units = given.shape[axis]
            self.calls.append(ReLUCall(self._stack[-1], axis, units, given.dtype, given.device))
        elif (
            (kind := activation_kind(name))
            and kind != "softmax"
            and not isinstance(self._stack[-1], SparsePReLU)
        ):
            # PyTorch computes its ReLU6 as a hardtanh.
            self.others["relu6" if isinstance(self._stack[-1], nn.ReLU6) else kind] += 1
        output = func(*args, **kwargs)
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        self._layouts.follow(name, args, kwargs, output)
        return output


def find_calls(model: nn.Module, inputs: tuple[Tensor, ...]) -> Calls:
    """List the ReLU calls of one forward pass, and count those of other activations.

    Parameters
    ----------
    model : torch.nn.Module
        In the mode in which it is to be run.
    inputs : tuple of tensor
        What it is called with, each with the batch first.

    Examples
    --------
    >>> network = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.SiLU())
    >>> calls = find_calls(network, (torch.zeros(1, 2),))
    >>> [(call.axis, call.units) for call in calls.relus], dict(calls.others)
    ([(1, 3)], {'silu': 1})
    """
    stack: list[nn.Module] = []
    handles = []
    copies = tuple(given.clone() for given in inputs)
    try:
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(lambda m, args: stack.append(m)))
            handles.append(
                module.register_forward_hook(
                    lambda m, args, output: (stack.pop(), None)[1], prepend=True, always_call=True
                )
            )
        with torch.no_grad(), _Finder(stack, copies) as finder:
            output = model(*copies)
    finally:
        for handle in handles:
            handle.remove()
    return Calls(finder.calls, finder.others, output)
