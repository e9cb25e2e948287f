"""The modules of a network that are running, and how its activation calls are named.

One stack and one namer for all probes, so that a site bears the same name in each of them. A
module may be one activation written out in several operations: it has no children, and at
most parameters of one number a channel, calls nothing but operations on its input's numbers one
by one, at least one of them not affine, and its output has its input's shape.
``x * torch.sigmoid(1.702 * x)`` in a module of its own is one activation, named after the module.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections import Counter
from collections.abc import (
    Container,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from .axes import Layouts
from .function_calls import FunctionCall, tensors_in
from .operations import Operation, named_modules

__all__ = ["HandwrittenCall", "SiteName", "SiteNames", "running_module"]


# Modules that do nothing but pool: where a trace bends in one it bears the module's name.
_POOLING: tuple[type[nn.Module], ...] = (
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
)


@dataclass(eq=False)
class SiteName:
    """The name of one call.

    It is settled when the module that makes the call is left: only then is it known whether
    the module is one activation, which bears the module's name.

    Parameters
    ----------
    text : str
        ``layer1.0.relu``, its second call ``layer1.0.relu:1``, a functional call
        ``Mixed_5b.branch1x1/relu``.
    base : str
        The name without the number of the call.
    kind : str
        Of the activation, or of another operation its name.
    origin : hashable
        Where in the model's code the call is made.
    """

    text: str
    base: str
    kind: str
    origin: Hashable = None

    def __str__(self) -> str:
        return self.text


@dataclass
class HandwrittenCall:
    """One call of a module that may be a handwritten activation, while it runs.

    Parameters
    ----------
    module : torch.nn.Module
    given : tensor
        Its input.
    names : list of SiteName
        Of the activation functions that it has called.
    possible : bool
        False as soon as it is known to be none.
    """

    module: nn.Module
    given: Tensor
    names: list[SiteName] = field(default_factory=list)
    possible: bool = True
    begun: bool = False

    def __post_init__(self) -> None:
        self._shape = self.given.shape
        # The input and what was made of it.
        self._own: MutableMapping[Tensor, None] = WeakTensorKeyDictionary({self.given: None})
        # What it has called: operations that are not affine, and how many that are.
        self._bent: list[Operation] = []
        self._affine = 0

    def before(self, operation: Operation, sampled: Sequence[Tensor]) -> bool:
        """Look at an operation on data; say whether it computes anything of it."""
        if not sampled or operation.takes == "metadata":
            return False
        # Data that came in another way, such as an attribute, is a second input.
        if not operation.acts or not all(tensor in self._own for tensor in sampled):
            self.possible = False
        return True

    def after(self, operation: Operation, sampled: int, output: object) -> None:
        """Note an operation on so many tensors that came in."""
        outputs = list(tensors_in((output,)))
        if not outputs:
            return
        if not isinstance(output, Tensor) or output.shape != self._shape:
            self.possible = False
        self._own.update(dict.fromkeys(outputs))
        if operation.is_nonlinear(sampled):
            self._bent.append(operation)
        else:
            self._affine += 1

    @property
    def kind(self) -> str:
        """The one activation function that the module calls, else its class, in lower case."""
        kind = self._bent[0].kind if len(self._bent) == 1 else ""
        return kind or type(self.module).__name__.lower()

    @property
    def is_one_call(self) -> bool:
        """Whether the module does nothing but call one activation function."""
        return (len(self._bent), self._affine, len(self.names)) == (1, 0, 1)

    def is_activation(self, output: object) -> bool:
        """Whether the module, which has given `output`, is one activation."""
        same = isinstance(output, Tensor) and output.shape == self._shape
        return self.possible and same and bool(self._bent) and self.begun

    def is_decided(self, output: object) -> bool:
        """Whether that holds for other calls too.

        Not where the call ended in an error, without an output, nor where the module did
        nothing to data that came in, as far as was seen.
        """
        return not self.possible or (self.begun and output is not None)


class SiteNames(TorchFunctionMode):
    """Knows which module of a model is running, and names each activation call.

    While it is active, and the innermost mode, `current` is the name of the call that the
    model makes.

    Parameters
    ----------
    model : torch.nn.Module

    Attributes
    ----------
    current : SiteName or None
        Of the activation function that is being called; None in any other call.
    layouts : nlbench.introspection.axes.Layouts
        What is known of the axes of every tensor of this pass.

    Examples
    --------
    >>> class Printing(SiteNames):
    ...     def call(self, call):
    ...         print(call.name, "is", self.current)
    ...         return super().call(call)
    >>> model, x = nn.Sequential(nn.ReLU(), nn.Tanh()), torch.zeros(2, 3)
    >>> names = Printing(model)
    >>> with names.hooked():
    ...     names.begin(x)
    ...     with names:
    ...         _ = model(x)
    relu is 0
    tanh is 1
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._paths = {module: path for path, module in model.named_modules()}
        self._verdicts: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
        self._written: WeakSet[nn.Module] = WeakSet()
        self._named = named_modules()
        self._thread = threading.get_ident()
        self.begin()

    def begin(
        self,
        *inputs: Tensor,
        constants: Iterable[Tensor] = (),
        channels: Sequence[int | None] = (),
    ) -> None:
        """Begin a pass, and forget the calls of the last one.

        Parameters
        ----------
        *inputs : tensor
            Of the model, the batch first.
        constants : iterable of tensor
            The model's parameters and buffers.
        channels : sequence of int or None
            Of each input the axis of its channels, where that is known.
        """
        # A model may run in another thread meanwhile, and calls these hooks there.
        self._thread = threading.get_ident()
        self._stack: list[tuple[nn.Module, HandwrittenCall | None]] = []
        self._counts: Counter[str] = Counter()
        self.current: SiteName | None = None
        self.layouts = Layouts(len(inputs[0]) if inputs and inputs[0].ndim else 1)
        constants = list(constants)
        for given, channel in itertools.zip_longest(inputs, channels):
            self.layouts.begin(given, constants, channel)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Know, for as long as this lasts, which module is running."""
        with ExitStack() as hooked:
            for module in self._paths:
                # The last hook before and the first after forward, so that a user's own hooks
                # count as called from outside.
                before = module.register_forward_pre_hook(self._enter, with_kwargs=True)
                hooked.callback(before.remove)
                after = module.register_forward_hook(self._leave, prepend=True, always_call=True)
                hooked.callback(after.remove)
            yield

    @property
    def running(self) -> nn.Module | None:
        """The module whose forward is running; None outside of all."""
        return self._stack[-1][0] if self._stack else None

    @property
    def path(self) -> str:
        """Dotted name of the running module; empty for the model itself and outside of it."""
        return self._paths.get(self.running, "") if self.running is not None else ""

    @property
    def place(self) -> str:
        """The same, as it is said to people."""
        return self.path or "the network"

    @property
    def handwritten(self) -> HandwrittenCall | None:
        """The call of a module at hand, if it may be a handwritten activation."""
        return self._stack[-1][1] if self._stack else None

    def name(self, kind: str) -> SiteName:
        """Name a call in the running module, and count it."""
        path, module = self.path, self.running
        own = type(module) in self._named or isinstance(module, _POOLING)
        base = path if path and own else f"{path}/{kind}" if path else kind
        made = SiteName(self._number(base), base, kind, _origin())
        if self.handwritten is not None:
            self.handwritten.names.append(made)
        return made

    def next(self, base: str) -> str:
        """Name the next call of a base, without counting it."""
        count = self._counts[base]
        return f"{base}:{count}" if count else base

    def _number(self, base: str) -> str:
        text = self.next(base)
        self._counts[base] += 1
        return text

    def kind_of(self, call: FunctionCall) -> str | None:
        """Kind of activation that a call of a function is; None if it is none.

        A softmax is one only where a probe takes it for one.
        """
        kind = call.operation.kind
        if not kind or not isinstance(given := call.input, Tensor):
            return None
        # PyTorch's module calls the function of the class that it derives from.
        if kind == "hardtanh" and type(self.running) is nn.ReLU6:
            return "relu6"
        # A sine of positions is no activation.
        return kind if kind != "sin" or self.layouts.is_sampled(given) else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call, handwritten = FunctionCall(func, args, kwargs), self.handwritten
        if handwritten is None or not handwritten.possible:
            return self.called(call)
        sampled = list(filter(self.layouts.is_sampled, call.tensors))
        is_of_input = handwritten.before(call.operation, sampled)
        if is_of_input and handwritten.possible and not handwritten.begun:
            handwritten.begun = True
            self.handwritten_begins(handwritten)
        output = self.called(call)
        if is_of_input:
            handwritten.after(call.operation, len(sampled), output)
        return output

    def called(self, call: FunctionCall) -> Any:
        """Call a function of PyTorch's; `current` is its name meanwhile."""
        kind = self.kind_of(call)
        before = self.current
        self.current = self.name(kind) if kind and kind != "softmax" else None
        try:
            output = self.call(call)
        finally:
            self.current = before
        self.follow(call, output)
        return output

    def call(self, call: FunctionCall) -> Any:
        """Call a function of PyTorch's while its name, if it is an activation, is `current`."""
        return call.run()

    @property
    def candidates(self) -> tuple[str, ...]:
        """The names that `current` may come to bear; none where there is none."""
        if self.current is None:
            return ()
        if self.handwritten is None:
            return (self.current.text,)
        site = self.next(self._paths[self.handwritten.module])
        pieces = [name for name in self.handwritten.names if name.kind == self.current.kind]
        number = pieces.index(self.current)
        piece = f"{site}/{self.current.kind}" + (f":{number}" if number else "")
        return site, piece, self.current.text

    def follow(self, call: FunctionCall, output: object) -> None:
        """Note what became of the axes."""
        self.layouts.follow(call, output)

    def handwritten_begins(self, handwritten: HandwrittenCall) -> None:
        """A module that may be a handwritten activation is about to work on its input."""

    def handwritten_ends(
        self, handwritten: HandwrittenCall, output: Any, name: SiteName | None
    ) -> None:
        """It is left; with its name if it is one activation."""

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread:
            return
        if self._stack and (outer := self._stack[-1][1]) is not None:
            outer.possible = False
        given = self._written_input(module, args, kwargs)
        self._stack.append((module, None if given is None else HandwrittenCall(module, given)))

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        if threading.get_ident() != self._thread:
            return
        if not self._stack or self._stack[-1][0] is not module:
            # A hook of somebody else's raised before ours came to its turn.
            return
        handwritten = self._stack.pop()[1]
        if handwritten is None:
            return
        is_activation = handwritten.is_activation(output)
        if is_activation:
            self._written.add(module)
        elif handwritten.is_decided(output) and module not in self._written:
            # Not tried again; one that was an activation once is, so that batches are alike.
            self._verdicts[module] = False
        name = self._settle(handwritten, output) if is_activation else None
        self.handwritten_ends(handwritten, output, name)

    def _settle(self, handwritten: HandwrittenCall, output: Any) -> SiteName:
        """Name a handwritten activation, and what it calls after it."""
        for inner in handwritten.names:
            self._counts[inner.base] -= 1
        self.layouts.adopt(output, handwritten.given)
        base = self._paths[handwritten.module]
        name = SiteName(self._number(base), base, handwritten.kind, _origin())
        if len(handwritten.names) == 1:
            handwritten.names[0].text, handwritten.names[0].base = name.text, base
        else:
            # To a probe that sees the pieces each is one of its own.
            pieces: Counter[str] = Counter()
            for inner in handwritten.names:
                inner.base = f"{name.text}/{inner.kind}"
                number = pieces[inner.kind]
                inner.text = f"{inner.base}:{number}" if number else inner.base
                pieces[inner.kind] += 1
        return name

    def _written_input(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor | None:
        """Give the input of a call that may be a handwritten activation's, else None."""
        if module not in self._verdicts:
            # The model itself has no name that a site could bear.
            self._verdicts[module] = module is not self.model and self._may_be_written(module)
        given = list(itertools.chain(args, kwargs.values()))
        if not self._verdicts[module] or len(given) != 1 or not isinstance(given[0], Tensor):
            return None
        return given[0]

    def _may_be_written(self, module: nn.Module) -> bool:
        if any(True for _ in module.children()) or isinstance(module, nn.Dropout | nn.Identity):
            return False
        # PyTorch's own activation modules are known, and the rest of its modules are none.
        if type(module) in self._named or type(module).__module__.startswith("torch.nn."):
            return False
        sizes = ((tensor.numel(), max(tensor.shape, default=1)) for tensor in module.parameters())
        return all(numbers == longest for numbers, longest in sizes)


# Folders of frames that belong to the instrumentation or to PyTorch.
_NOT_THE_MODELS = tuple(
    f"{folder}{os.sep}"
    for folder in (
        Path(__file__).parent,
        Path(__file__).parent.parent / "probes",
        Path(torch.__file__).parent,
    )
)


def _origin() -> Hashable:
    """Where the code that is neither PyTorch's nor a probe's makes the call at hand."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_NOT_THE_MODELS):
            return code.co_filename, code.co_firstlineno, frame.f_lasti
        frame = frame.f_back
    return None


def running_module(own: Container[nn.Module]) -> nn.Module | None:
    """Give the innermost of some modules that is being called in this thread; None if none is.

    `SiteNames` knows it while its hooks are set. This asks Python's stack, for what works at
    times when nobody watches; a module's own hooks belong to its call here.

    Examples
    --------
    >>> class Asking(nn.Module):
    ...     def forward(self, x):
    ...         return running_module({model, self}) is self
    >>> model = nn.Sequential(Asking())
    >>> model(0), running_module({model})
    (True, None)
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals["self"] in own:
            module: nn.Module = frame.f_locals["self"]
            return module
        frame = frame.f_back
    return None
