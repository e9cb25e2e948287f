"""Write down what PyTorch dispatches while a network runs on one input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from nlbench.errors import UnsupportedOperation
from nlbench.probes.ops import known, load_errors, operation, qualified_name
from nlbench.probes.site_names import SiteName, SiteNames

from .ops import kinks as kinked_ops
from .ops.rule import Call, Input, NotAffine, Rule, peak

__all__ = ["Recorder", "Step"]


@dataclass(frozen=True)
class Step:
    """One operation of a program.

    Parameters
    ----------
    operation : str
        As PyTorch calls it, without the underscore of an in-place form.
    place : str
        Dotted name of the module whose forward calls it.
    inputs : tuple of int
        Numbers of the values that it reads.
    output : int
        Number of the value that it makes.
    rule : Rule
    shape : tuple of int
        Of the output at one point.
    site : str
        Name of the activation call; empty where nothing bends.
    ends : tuple of int
        Values that no later step reads.
    """

    operation: str
    place: str
    inputs: tuple[int, ...]
    output: int
    rule: Rule
    shape: tuple[int, ...]
    site: str = ""
    ends: tuple[int, ...] = ()

    def refusal(self, why: str) -> UnsupportedOperation:
        """Make the error that names this step."""
        return UnsupportedOperation(self.operation, self.place, why)


@dataclass(frozen=True)
class _Layout:
    """Where in its storage a tensor's numbers lie."""

    size: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Layout:
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        return cls(size, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def places(self) -> Tensor:
        """Give the place of each, (numel,)."""
        places = torch.arange(self.size)
        return places.as_strided(self.shape, self.stride, self.offset).flatten()


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what is dispatched while a network runs on one input.

    Parameters
    ----------
    network : torch.nn.Module
        In eval mode.
    example : tensor of shape (1, *input)
        What the network is run on; it may be changed in place. All that is recorded must
        have its dtype.

    Attributes
    ----------
    steps : list of Step
        What depends on the input, in order of call. Value 0 is the input.
    """

    def __init__(self, network: nn.Module, example: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step] = []
        self._dtype = example.dtype
        self._names = _Names(network, self)
        self._attention = [m for m in network.modules() if isinstance(m, nn.MultiheadAttention)]
        self._names.begin(example)
        self._sites: list[SiteName | None] = []
        self._composites: list[str] = []
        # Tensors by identity: the number of their value and when they got it. References are
        # weak, so that the network holds no more memory than when it isn't watched; a weak
        # reference to a storage keeps its identity from being used again, not its numbers.
        self._values: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
        self._bound_at: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
        # What was overwritten, by storage: when, which of its numbers, and with what.
        self._writes: dict[StorageWeakRef, list[tuple[int, _Layout, Any]]] = {}
        self._input_shape = tuple(example.shape[1:])
        self._constants: set[StorageWeakRef] = set()
        # Where maxima lie: made beside the maxima, mostly left unused.
        self._indices: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()
        self._clock = 0
        self._bind(example, 0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and shielding the recorder from the compiler would
        # import it: seconds, for the first trace of a process.
        return False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Follow which module is running and what it calls, and record what is dispatched."""
        with ExitStack() as entered:
            entered.enter_context(self._names.hooked())
            for module in self._attention:
                hook = module.register_forward_pre_hook(self._refuse_attention)
                entered.callback(hook.remove)
            entered.enter_context(self._names)
            entered.enter_context(self)
            yield

    @property
    def program(self) -> list[Step]:
        """The steps, with the names of their sites, once the network has run."""
        named = zip(self.steps, self._sites, strict=True)
        return [replace(step, site=name.text if name else "") for step, name in named]

    def output_value(self, output: Tensor) -> int:
        """Give the number of the network's output, a constant one included."""
        self._refresh(output, "forward")
        if output not in self._values:
            constant = output.clone()
            rule = Rule(
                lambda points: constant.expand(len(points[0]), *constant.shape[1:]),
                lambda inputs, bounds, result: peak(result),
            )
            self._add_step("constant", [0], rule, output)
        return self._values[output]

    def _refuse_attention(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Refuse attention by its name: its first step moves the axis of samples, a poor reason."""
        if any(isinstance(x, Tensor) and x in self._values for x in inputs):
            name = "multi_head_attention_forward"
            raise self._refusal(name, self._why_not(name))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = _by_position(func, tuple(args), kwargs or {})
        written = _written(func, args, kwargs)
        name = qualified_name(func)
        return self._record(func, name, args, kwargs, written)

    def whole(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call of a registered autograd function, and not what it is made of."""
        name = qualified_name(func)
        with _disable_current_modes():
            return self._record(func, name, args, kwargs, [])

    def refuse_reading(self, name: str, args: Sequence[Any]) -> None:
        """Refuse to hand out the memory of what depends on the input."""
        if args and isinstance(args[0], Tensor) and args[0] in self._values:
            raise self._refusal(name, "the values of the input decide what is computed")

    def _record(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], written: Any
    ) -> Any:
        tensors = [a for a in tree_iter((args, kwargs)) if isinstance(a, Tensor)]
        for tensor in tensors:
            self._refresh(tensor, name)
        traced = list({id(a): a for a in tensors if a in self._values}.values())
        constants = {_storage(a) for a in tensors if a not in self._values}
        if any(a in self._indices for a in tensors):
            raise self._refusal(name, "it uses the positions of maxima")
        if not traced:
            if any(_storage(a) in self._constants for a in written):
                raise self._refusal(name, "it changes a constant that was read before")
            result = func(*args, **kwargs)
            for tensor in written:
                if _storage(tensor) in self._writes:
                    self._note_write(tensor, None)
            return result
        if name in _READS_VALUES:
            raise self._refusal(name, "the values of the input decide what is computed")
        numbers = {id(a): Input(i) for i, a in enumerate(traced)}
        spec, spec_kwargs = tree_map(lambda a: numbers.get(id(a), a), (args, kwargs))
        if _ignores_values(name, spec):
            return func(*args, **kwargs)
        if name in ("copy", "fill", "zero") and written:
            return self._copy(func, args, spec, traced)
        operation = known(name)
        if operation is None or not operation.traced:
            return self._decompose(func, name, args, kwargs)
        function = func
        if written:
            if len(written) != 1 or written[0] is not args[0]:
                raise self._refusal(name, "it writes into a given tensor")
            # The result overwrites the first argument: keep what it was.
            spec = (_kept_constant(spec[0]), *spec[1:])
            function = getattr(getattr(torch.ops.aten, name), func._overloadname)
        shapes = tuple(tuple(a.shape) for a in traced)
        result = func(*args, **kwargs)
        self._constants |= constants
        self._add(Call(name, function, spec, spec_kwargs, shapes, ()), traced, result, written)
        return result

    def _decompose(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record the parts of an operation that has no rule of its own."""
        self._composites.append(name)
        with self:
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            raise self._refusal(name, self._why_not(name))
        self._composites.pop()
        return result

    def _why_not(self, name: str) -> str:
        """Say why an operation can't be traced: it is known not to be affine, or not known."""
        for called in (name, *reversed(self._composites)):
            operation = known(called)
            if operation is not None and (operation.refused or operation.kind):
                return operation.refused or "not piecewise affine"
        found = [known(called) for called in (name, *self._composites)]
        if any(operation is not None and operation.has_numbers for operation in found):
            return "not piecewise affine"
        missing = "".join(f" ({error})" for error in load_errors())
        return f"it is not known; register it with nlbench.register_op{missing}"

    def _add(self, call: Call, traced: list[Tensor], result: Any, written: list[Tensor]) -> None:
        inputs = [self._values[a] for a in traced]
        for part, tensor in enumerate([result] if isinstance(result, Tensor) else result):
            if not written and tensor in self._values:
                continue  # The operation had nothing to do and handed its input on.
            if not isinstance(result, Tensor) and not tensor.is_floating_point():
                self._indices[tensor] = None
                continue
            if tensor.dtype != self._dtype:
                raise self._refusal(call.name, f"it converts to {tensor.dtype}")
            if tensor.ndim == 0 or len(tensor) != 1:
                raise self._refusal(call.name, "it moves or drops the axis of samples")
            made = replace(call, shape=tuple(tensor.shape))
            if not isinstance(result, Tensor):
                made = replace(made, function=_part(call.function, part))
            try:
                rule = _rule_of(made)
            except NotAffine as error:
                raise self._refusal(call.name, str(error)) from None
            self._add_step(call.name, inputs, rule, tensor)
            if written:
                self._note_write(tensor, self._values[tensor])

    def _add_step(self, name: str, inputs: Sequence[int], rule: Rule, output: Tensor) -> None:
        value, shape = len(self.steps) + 1, tuple(output.shape[1:])
        self.steps.append(Step(name, self._names.place, tuple(inputs), value, rule, shape))
        self._sites.append(self._site(name) if rule.bend else None)
        self._bind(output, value)

    def _bind(self, tensor: Tensor, value: int) -> None:
        self._values[tensor] = value
        self._bound_at[tensor] = self._clock

    def _copy(self, func: Any, args: tuple[Any, ...], spec: Sequence[Any], traced: Any) -> Any:
        """Record what is assigned to a tensor, or to a slice of one."""
        target, source = args[0], spec[1] if len(spec) > 1 else None
        result = func(*args)
        shape = tuple(target.shape)
        if target.dtype != self._dtype or not shape or shape[0] != 1:
            raise self._refusal("copy", "it writes into a tensor of another kind or shape")
        if isinstance(source, Input):
            tensor = traced[source.index]
            call = Call("expand", _expanded, (Input(0), shape), {}, (tuple(tensor.shape),), shape)
            if tensor.dtype != self._dtype or tensor.ndim != len(shape):
                raise self._refusal("copy", "it moves or drops the axis of samples")
            self._add_step("copy", [self._values[tensor]], _rule_of(call), target)
            self._note_write(target, self._values[target])
        else:
            self._note_write(target, None)
            self._refresh(target, "copy")
        return result

    def _note_write(self, tensor: Tensor, value: int | None) -> None:
        """Note that a tensor was overwritten, with a value or, None, with constants."""
        self._clock += 1
        content = tensor.clone() if value is None else value
        self._writes = {
            storage: known
            for storage, known in self._writes.items()
            if not storage.expired()  # type: ignore[no-untyped-call]
        }
        self._writes.setdefault(_storage(tensor), []).append(
            (self._clock, _Layout.of(tensor), content)
        )
        if value is not None:
            self._bound_at[tensor] = self._clock

    def _refresh(self, tensor: Tensor, name: str) -> None:
        """Bring a tensor up to date whose memory was overwritten under another name."""
        if not self._writes:
            return
        for clock, layout, content in self._writes.get(_storage(tensor), ()):
            if clock <= self._bound_at.get(tensor, 0):
                continue
            own, places = _Layout.of(tensor).places(), layout.places()
            order = torch.full((int(max(own.max(), places.max())) + 1,), -1)
            order[places] = torch.arange(len(places))
            source = order[own]
            hit = source >= 0
            if bool(hit.any()):
                if tensor.ndim == 0 or len(tensor) != 1 or tensor.dtype != self._dtype:
                    raise self._refusal(name, "it reads a tensor whose memory was changed in place")
                self._assign(tensor, content, hit.nonzero().squeeze(1), source[hit])
            elif tensor not in self._values:
                continue
            self._bound_at[tensor] = clock

    def _assign(self, tensor: Tensor, content: Any, places: Tensor, source: Tensor) -> None:
        """Add the step that puts overwritten numbers to their places in a tensor."""
        base, value = self._values.get(tensor), content
        given = [v for v in (base, value) if isinstance(v, int)]
        if not given:
            return  # Constants in a constant.
        numbers = {v: Input(i) for i, v in enumerate(dict.fromkeys(given))}
        arguments = [
            numbers[v] if isinstance(v, int) else (tensor.clone() if v is None else v)
            for v in (base, value)
        ]
        shape = tuple(tensor.shape)
        shapes = tuple((1, *self._shape_of(v)) for v in numbers)
        call = Call("assigned", _expanded, (*arguments, places, source), {}, shapes, shape)
        self._add_step("copy", list(numbers), _rule_of(call), tensor)

    def _shape_of(self, value: int) -> tuple[int, ...]:
        return self.steps[value - 1].shape if value else self._input_shape

    def _refusal(self, name: str, why: str) -> UnsupportedOperation:
        return UnsupportedOperation((self._composites or [name])[0], self._names.place, why)

    def _site(self, name: str) -> SiteName:
        """Name a call that bends: an activation as it is called, another by its operation."""
        return self._names.current or self._names.name((self._composites or [name])[0])


# The last two precede a copy to NumPy or to a list.
_READS_VALUES = frozenset(
    "_local_scalar_dense item is_nonzero equal allclose nonzero resolve_conj resolve_neg".split()  # noqa: SIM905
)
# What hands out a tensor's memory without an operation that would be dispatched.
_READS_MEMORY = {
    "__array__", "__deepcopy__", "__dlpack__", "__reduce_ex__", "_typed_storage", "data_ptr",
    "numpy", "share_memory_", "storage", "tolist", "untyped_storage",
}  # fmt: skip
_MAKES_CONSTANTS = frozenset(
    [f"{value}_like" for value in ("zeros", "ones", "full", "empty")]
    + [f"new_{value}" for value in ("zeros", "ones", "full", "empty", "tensor")]
)
_FOLLOWS_SHAPE = frozenset(("expand_as", "view_as", "reshape_as", "type_as"))


def _ignores_values(name: str, spec: Sequence[Any]) -> bool:
    """Tell whether a call takes nothing but shape and kind from its traced tensors."""
    return name in _MAKES_CONSTANTS or (name in _FOLLOWS_SHAPE and not isinstance(spec[0], Input))


def _rule_of(call: Call) -> Rule:
    operation = known(call.name)
    if operation is None or not operation.traced:
        raise NotAffine("not piecewise affine")
    if operation.line is None:
        return kinked_ops.rule_of_kinks(operation, call)
    rule: Rule = operation.line(call)
    return rule


class _Names(SiteNames):
    """Tells a recorder of calls that are made of several operations, but known as one."""

    def __init__(self, network: nn.Module, recorder: Recorder) -> None:
        super().__init__(network)
        self._recorder = recorder

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS_MEMORY:
            self._recorder.refuse_reading(name, args)
        if hasattr(func, "nlbench_op"):
            found = operation(func)
            if found is not None and found.traced:
                return self._recorder.whole(func, args, kwargs)
        return super().call(func, args, kwargs)


def _by_position(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move arguments that were passed by name to their places, as far as there is no gap."""
    rest = dict(kwargs)
    for argument in func._schema.arguments[len(args) :]:
        if argument.kwarg_only or argument.name not in rest:
            break
        args = (*args, rest.pop(argument.name))
    return args, rest


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """List the tensors that a call changes in place."""
    written = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            written += [a for a in tree_iter(given) if isinstance(a, Tensor)]
    return written


def _expanded(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.expand(len(x), *shape[1:])


def _kept_constant(argument: Any) -> Any:
    return argument.clone() if isinstance(argument, Tensor) else argument


def _part(function: Callable[..., Any], index: int) -> Callable[..., Any]:
    """Make of an operation with several results one with a single result."""

    def one(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)[index]

    return one
