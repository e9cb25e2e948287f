"""The running modules of a network, and the names of its activation calls.

All probes use these names, so a site has the same name in each of them. A module counts as one
handwritten activation if it has no children, its parameters (if any) have one value per channel,
its operations act elementwise on its input, at least one of them is not affine, and its output has
the shape of its input. For example, a module that computes ``x * torch.sigmoid(1.702 * x)`` is one
activation, named after the module.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from nlbench.errors import Undefined

from .axes import Layouts, whole_arguments
from .function_calls import FunctionCall, tensors_in
from .known_functions import UNOBSERVED_THREAD, known_kind
from .model_state import compilation_refused
from .operations import Operation, named_modules

# Calls in these modules are also named after the module, for traces that bend there.
_POOLING: tuple[type[nn.Module], ...] = (
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
)


class Origin(NamedTuple):
    """Position of a call in the model's code."""

    file: str
    function_line: int
    instruction: int
    line: int


@dataclass(eq=False)
class SiteName:
    """The name of a call.

    The name is final when the calling module returns: only then is it known whether the module is
    one activation, which is named after the module.
    """

    # layer1.0.relu, its second call layer1.0.relu:1, a functional call Mixed_5b.branch1x1/relu.
    text: str
    base: str  # the name without the call number
    kind: str  # kind of activation, or the name of another operation
    origin: Origin | None = None  # position of the call in the model's code
    # Path of the module that returned last; None for a call that is named after its module.
    after: str | None = None

    def __str__(self) -> str:
        return self.text

    @property
    def where(self) -> str:
        """Position of a functional call in the source, as ``net.py:11, after conv1``."""
        if self.after is None or self.origin is None:
            return ""
        line = f"{Path(self.origin.file).name}:{self.origin.line}"
        return f"{line}, after {self.after}" if self.after else line


class CallId(NamedTuple):
    """Identity of a call in a forward pass.

    Unlike a name, it is known as soon as the call begins.
    """

    path: str  # dotted name of the module
    number: int  # index of the call among all calls of the module, from 0
    # Index of the activation call among those made directly in that module call; None for the
    # module call itself.
    position: int | None = None


OUTSIDE = -1
"""Number of the call in the identity of an activation call in a hook of the model itself."""


@dataclass
class HandwrittenCall:
    """A running call of a module that may be a handwritten activation."""

    module: nn.Module
    source: Tensor  # input of the module
    call: CallId
    # Names of the activation functions that the module has called.
    names: list[SiteName] = field(default_factory=list)
    possible: bool = True  # False once the module is known not to be an activation
    begun: bool = False  # True once the module has called an operation on its input
    probed: list[Any] = field(default_factory=list)  # what a probe has seen in the call

    def __post_init__(self) -> None:
        self._shape = self.source.shape
        # The input and tensors computed from it.
        self._derived: MutableMapping[Tensor, None] = WeakTensorKeyDictionary({self.source: None})
        self._nonlinear: list[Operation] = []
        self._affine_calls = 0

    def before(self, operation: Operation, sampled: Sequence[Tensor]) -> bool:
        """Check an operation before it runs. Return True if it computes with data."""
        if not sampled or operation.takes == "metadata":
            return False
        # Data from elsewhere, such as an attribute, would be a second input.
        if not operation.acts or not all(tensor in self._derived for tensor in sampled):
            self.possible = False
        return True

    def after(self, operation: Operation, data: int, output: object) -> None:
        """Record the output of an operation, given how many of its operands are data."""
        outputs = list(tensors_in((output,)))
        if not outputs:
            return
        if not isinstance(output, Tensor) or output.shape != self._shape:
            self.possible = False
        self._derived.update(dict.fromkeys(outputs))
        if operation.is_nonlinear(data):
            self._nonlinear.append(operation)
        else:
            self._affine_calls += 1

    @property
    def kind(self) -> str:
        """Kind of the only activation function called, or of the function the module computes.

        Otherwise, the class name in lower case.
        """
        kind = self._nonlinear[0].kind if len(self._nonlinear) == 1 else ""
        return kind or known_kind(self.module) or type(self.module).__name__.lower()

    @property
    def is_one_call(self) -> bool:
        """True if the module does nothing but call one activation function."""
        return (len(self._nonlinear), self._affine_calls, len(self.names)) == (1, 0, 1)

    def is_activation(self, output: object) -> bool:
        """Return True if the module is one activation, given that it returned `output`."""
        same = isinstance(output, Tensor) and output.shape == self._shape
        return self.possible and same and bool(self._nonlinear) and self.begun

    def is_decided(self, output: object) -> bool:
        """Return True if the result of `is_activation` also holds for other calls of the module.

        It doesn't if the call raised an error, so that `output` is None, or ignored its input.
        """
        return not self.possible or (self.begun and output is not None)


@dataclass(eq=False)
class ModuleCall:
    """A call of a module's forward."""

    module: nn.Module
    id: CallId
    forward: Callable[..., Any]  # the module's own forward method
    # args, kwargs: its arguments
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    activations: int = 0  # number of activation calls that it has made
    handwritten: HandwrittenCall | None = None  # the call, if it may be a handwritten activation

    def arguments(self) -> Iterator[tuple[int | str, Any]]:
        """Yield the arguments with their positions or keywords."""
        yield from enumerate(self.args)
        yield from self.kwargs.items()


class ModuleStack(TorchFunctionMode):
    """Function mode that passes each module call to `around`, and numbers the calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._paths = {module: path for path, module in model.named_modules()}
        # Path of a module that the model has run in another thread; empty if there is none.
        self._elsewhere = ""
        self.restart()

    def restart(self) -> None:
        """Begin a forward pass in this thread, and discard the previous pass's calls."""
        # The model may run in another thread at the same time.
        self._thread = threading.get_ident()
        self.stack: list[ModuleCall] = []  # running module calls, the innermost last
        # Number of calls of each module in this pass, by path.
        self.module_calls: Counter[str] = Counter()
        # Number of activation calls outside all modules: in hooks of the model itself.
        self._activations_outside = 0

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Wrap the forward method of every module, and remove the wrappers on exit.

        Raises
        ------
        Undefined
            If a pass ran a module in a thread of its own, where no function mode is active.
        """
        before = [(vars(module), vars(module).get("forward")) for module in self._paths]
        try:
            for module in self._paths:
                vars(module)["forward"] = self._wrap(module, module.forward)
            with compilation_refused():
                yield
        finally:
            for attributes, forward in before:
                attributes["forward"] = forward
                if forward is None:
                    del attributes["forward"]
        if self._elsewhere:
            raise Undefined(
                f"the network runs {self._elsewhere} in another thread, where its calls can't be "
                "observed"
            )

    def _wrap(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        path = self._paths[module]

        @wraps(forward)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            # A forward that isn't called through its module is part of its caller.
            is_call = sys._getframe(1).f_code.co_filename == _CALLER_FILE
            if threading.get_ident() != self._thread:
                if not self._is_other_pass():
                    self._elsewhere = path
                return forward(*args, **kwargs)
            if not is_call:
                return forward(*args, **kwargs)
            identity = CallId(path, self.module_calls[path])
            self.module_calls[path] += 1
            return self.around(ModuleCall(module, identity, forward, args, kwargs))

        return wrapper

    def _is_other_pass(self) -> bool:
        """Return True if the current thread, not the pass's, doesn't run a part of the pass."""
        if threading.current_thread().name == UNOBSERVED_THREAD:
            return True
        # The user may run the whole model at the same time.
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            is_call = frame.f_code.co_filename == _CALLER_FILE
            if is_call and frame.f_locals.get("self") is self.model:
                return True
            frame = frame.f_back
        return False

    def around(self, call: ModuleCall) -> Any:
        """Run a module call, and return its output. Subclasses extend this method."""
        self.stack.append(call)
        try:
            return call.forward(*call.args, **call.kwargs)
        finally:
            self.stack.pop()

    @property
    def running(self) -> nn.Module | None:
        """Module whose forward is running, or None."""
        return self.stack[-1].module if self.stack else None

    def number_activation(self, call: FunctionCall) -> CallId | None:
        """Count an activation call and return its identity, or None for any other call."""
        if not call.operation.kind or not isinstance(call.input, Tensor):
            return None
        if not self.stack:
            self._activations_outside += 1
            return CallId("", OUTSIDE, self._activations_outside - 1)
        caller = self.stack[-1]
        caller.activations += 1
        return caller.id._replace(position=caller.activations - 1)


_CALLER_FILE = nn.Module._call_impl.__code__.co_filename


class SiteNames(ModuleStack):
    """Function mode that tracks the running modules of a model and names activation calls.

    While it is the innermost active mode, `current` is the name of the current call.

    Examples
    --------
    >>> class NamePrinter(SiteNames):
    ...     def call(self, call):
    ...         print(call.name, "is", self.current)
    ...         return super().call(call)
    >>> model, x = nn.Sequential(nn.ReLU(), nn.Tanh()), torch.zeros(2, 3)
    >>> names = NamePrinter(model)
    >>> with names.hooked():
    ...     names.begin(x)
    ...     with names:
    ...         _ = model(x)
    relu is 0
    tanh is 1
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._may_be_activation: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
        self._handwritten_modules: WeakSet[nn.Module] = WeakSet()
        self._named = named_modules()
        self.begin()

    def begin(self, *inputs: Tensor, channels: Sequence[int | None] = ()) -> None:
        """Begin a forward pass on inputs, batch first, and discard the previous pass's calls."""
        self.restart()
        self._counts: Counter[str] = Counter()
        # Path of the module that returned last.
        self._returned = ""
        # Name of the current call of an activation function; None during any other call.
        self.current: SiteName | None = None
        # Identity of the last call of an activation function, including a softmax.
        self.current_id: CallId | None = None
        # Axes of every tensor in this pass.
        self.layouts = Layouts(len(inputs[0]) if inputs and inputs[0].ndim else 1)
        constants = self._held_tensors() if inputs else []
        whole = whole_arguments(self.model)
        for tensor, channel in itertools.zip_longest(inputs, channels):
            self.layouts.begin(tensor, constants, channel, whole)
            constants = []

    def _held_tensors(self) -> list[Tensor]:
        """List the model's parameters, buffers and other tensors in attributes and containers."""
        tensors: list[Tensor] = []
        for module in self._paths:
            for value in list(vars(module).values()):
                items = value.values() if isinstance(value, dict) else value
                candidates = items if isinstance(value, dict | list | tuple) else (value,)
                tensors += [item for item in candidates if isinstance(item, Tensor)]
        return tensors

    @property
    def path(self) -> str:
        """Dotted name of the running module.

        It is empty for the model itself or if none is running.
        """
        return self._paths.get(self.running, "") if self.running is not None else ""

    @property
    def place(self) -> str:
        """`path`, or "the network" if it is empty, for messages."""
        return self.path or "the network"

    @property
    def handwritten(self) -> HandwrittenCall | None:
        """Current call of a module, if it may be a handwritten activation."""
        return self.stack[-1].handwritten if self.stack else None

    def name(self, kind: str) -> SiteName:
        """Name a call in the running module, and count it."""
        path = self.path
        module = self.running
        names_calls = type(module) in self._named or isinstance(module, _POOLING)
        base = path if path and names_calls else f"{path}/{kind}" if path else kind
        # A call in PyTorch's own modules stands in no file of the user's.
        is_functional = base != path and not type(module).__module__.startswith("torch.")
        after = self._returned if is_functional else None
        name = SiteName(self._number(base), base, kind, _origin(), after)
        if self.handwritten is not None:
            self.handwritten.names.append(name)
        return name

    def next(self, base: str) -> str:
        """Return the name that the next call with a base name will get, without counting it."""
        count = self._counts[base]
        return f"{base}:{count}" if count else base

    def _number(self, base: str) -> str:
        text = self.next(base)
        self._counts[base] += 1
        return text

    def classify_call(self, call: FunctionCall) -> str | None:
        """Return the kind of an activation call, or None for any other call."""
        kind = call.operation.kind
        if not kind or not isinstance(source := call.input, Tensor):
            return None
        # A function of parameters alone, such as a mask or a positive weight, is not an activation.
        if self.layouts.is_constant(source):
            return None
        # PyTorch's ReLU6 calls the function of its base class.
        if kind == "hardtanh" and type(self.running) is nn.ReLU6:
            return "relu6"
        # A sine of positions is not an activation.
        return kind if kind != "sin" or self.layouts.is_sampled(source) else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = FunctionCall(func, args, kwargs)
        handwritten = self.handwritten
        self.current_id = self.number_activation(call)
        if handwritten is None or not handwritten.possible:
            return self.called(call)
        sampled = list(filter(self.layouts.is_sampled, call.tensors))
        uses_data = handwritten.before(call.operation, sampled)
        if uses_data and handwritten.possible and not handwritten.begun:
            handwritten.begun = True
            self.handwritten_begins(handwritten)
        output = self.called(call)
        if uses_data:
            handwritten.after(call.operation, len(sampled), output)
        return output

    def called(self, call: FunctionCall) -> Any:
        """Call a PyTorch function, with `current` set to its name."""
        kind = self.classify_call(call)
        before = self.current
        self.current = self.name(kind) if kind and kind != "softmax" else None
        try:
            output = self.call(call)
        finally:
            self.current = before
        self.follow(call, output)
        return output

    def call(self, call: FunctionCall) -> Any:
        """Call a PyTorch function. Subclasses override this method."""
        return call.run()

    @property
    def candidates(self) -> tuple[str, ...]:
        """Names that `current` may end up with. There are none if there is no current name."""
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
        """Track the axes of a call's output."""
        self.layouts.follow(call, output)

    def handwritten_begins(self, handwritten: HandwrittenCall) -> None:
        """Handle a possible handwritten activation before its first operation on its input."""

    def handwritten_ends(
        self, handwritten: HandwrittenCall, output: Any, name: SiteName | None
    ) -> None:
        """Handle the end of a possible handwritten activation. `name` is None if it is not one."""

    def around(self, call: ModuleCall) -> Any:
        """Run a module call, which may be a handwritten activation."""
        if (outer := self.handwritten) is not None:
            outer.possible = False
        source = self._handwritten_input(call)
        if source is not None:
            call.handwritten = HandwrittenCall(call.module, source, call.id)
        output = None
        try:
            output = super().around(call)
        finally:
            self._returned = call.id.path
            if call.handwritten is not None:
                self._end_handwritten(call.handwritten, output)
        return output

    def _end_handwritten(self, handwritten: HandwrittenCall, output: Any) -> None:
        """End a possible handwritten activation, whose output is None after an error."""
        module = handwritten.module
        is_activation = handwritten.is_activation(output)
        if is_activation:
            self._handwritten_modules.add(module)
        elif handwritten.is_decided(output) and module not in self._handwritten_modules:
            # Don't check it again. A module that was an activation once stays one.
            self._may_be_activation[module] = False
        name = self._name_handwritten(handwritten, output) if is_activation else None
        self.handwritten_ends(handwritten, output, name)

    def _name_handwritten(self, handwritten: HandwrittenCall, output: Any) -> SiteName:
        """Name a handwritten activation, and rename the calls inside it."""
        for inner in handwritten.names:
            self._counts[inner.base] -= 1
        self.layouts.adopt(output, handwritten.source)
        base = self._paths[handwritten.module]
        name = SiteName(self._number(base), base, handwritten.kind, _origin())
        if len(handwritten.names) == 1:
            inner = handwritten.names[0]
            inner.text = name.text
            inner.base = base
            inner.after = None
        else:
            # A probe that sees the pieces treats each as a site.
            pieces: Counter[str] = Counter()
            for inner in handwritten.names:
                inner.base = f"{name.text}/{inner.kind}"
                number = pieces[inner.kind]
                inner.text = f"{inner.base}:{number}" if number else inner.base
                pieces[inner.kind] += 1
        return name

    def _handwritten_input(self, call: ModuleCall) -> Tensor | None:
        """Return the input of a possible handwritten activation, else None."""
        module = call.module
        if module not in self._may_be_activation:
            # The model itself has no name for a site.
            self._may_be_activation[module] = module is not self.model and self._may_be_handwritten(
                module
            )
        arguments = [*call.args, *call.kwargs.values()]
        if not self._may_be_activation[module] or len(arguments) != 1:
            return None
        return arguments[0] if isinstance(arguments[0], Tensor) else None

    def _may_be_handwritten(self, module: nn.Module) -> bool:
        if any(True for _ in module.children()) or isinstance(module, nn.Dropout | nn.Identity):
            return False
        # PyTorch's own activation modules are registered; its other modules are not.
        if type(module) in self._named or type(module).__module__.startswith("torch.nn."):
            return False
        sizes = ((tensor.numel(), max(tensor.shape, default=1)) for tensor in module.parameters())
        return all(numbers == longest for numbers, longest in sizes)


# Folders of the instrumentation and of PyTorch, whose frames are skipped.
_OUTSIDE_THE_MODEL = (
    f"{Path(__file__).parent}{os.sep}",
    f"{Path(__file__).parent.parent / 'probes'}{os.sep}",
    f"{Path(torch.__file__).parent}{os.sep}",
)


def _origin() -> Origin | None:
    """Return the position in the model's code from which the current call is made."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_OUTSIDE_THE_MODEL):
            return Origin(code.co_filename, code.co_firstlineno, frame.f_lasti, frame.f_lineno or 0)
        frame = frame.f_back
    return None


def running_module(modules: Container[nn.Module]) -> nn.Module | None:
    """Return the innermost of `modules` that is running in this thread, or None.

    It is found on Python's call stack, for code that runs outside `SiteNames.hooked`. A
    module's own hooks count as part of its call.

    Examples
    --------
    >>> class Layer(nn.Module):
    ...     def forward(self, x):
    ...         return running_module({model, self}) is self
    >>> model = nn.Sequential(Layer())
    >>> model(0), running_module({model})
    (True, None)
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals["self"] in modules:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None
