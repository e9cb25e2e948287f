"""Recording of a network as a program.

The network runs once on one input while every operation that PyTorch dispatches is recorded.
Operations that depend on the input become steps of the program; everything else, including
parameters, is constant. Function calls, in-place operations and skip connections are recorded as
well as modules, and control flow that depends on shapes is resolved.

Several tensors may share memory that is modified in place. Each write is logged with the positions
it covers, and a tensor that overlaps them is updated when it is next read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from nlbench.errors import NlbenchError, NotFinite, RequestError, UnsupportedOperation, first_line
from nlbench.introspection.function_calls import (
    SPARSE_LAYOUTS,
    DispatchMode,
    FunctionCall,
    modes_disabled,
    out_of_place,
    positional,
    tensors_in,
    unobserved_calls,
    written_in,
)
from nlbench.introspection.model_copy import double_copy, precise_device, shape_copy
from nlbench.introspection.model_output import validated_outputs
from nlbench.introspection.module_stack import ModuleCall, SiteName, SiteNames
from nlbench.introspection.operations import known, load_errors, load_operations, registered
from nlbench.introspection.pytree import tree_iter, tree_map
from nlbench.introspection.write_log import WriteLog, get_memory_key
from nlbench.parsers import unique
from nlbench.probes.lines.rules import kinks
from nlbench.probes.lines.rules.rounding import peak
from nlbench.probes.lines.rules.rule import Input, NotAffine, RecordedCall, Rule

from .program import Program, ProgramStep
from .rows import may_permute, permutation, permuting_rule, row_rule


def record_program(network: nn.Module, example: Tensor) -> Program:
    """Record a network on one input (1, *input) of its dtype, which may be modified in place.

    Examples
    --------
    >>> network = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()).double()
    >>> program = record_program(network, torch.zeros(1, 2, dtype=torch.float64))
    >>> [step.operation for step in program.steps], program.sites
    (['linear', 'relu'], ('1',))
    """
    recorder = Recorder(network, example)
    output = run_once(network, example, recorder.recording(), recorder.check_refused)
    value = recorder.output_value(output)
    return _drop_unused(recorder.program, value, tuple(example.shape[1:]))


def untraceable_reason(model: nn.Module, example: Tensor) -> str:
    """Return why a network can't be traced: the first problem and its place, or an empty string.

    If the network allows it, only shapes are computed, so a large network costs as little as a
    small one. Problems that depend on values, such as non-finite weights, are detected only when
    the network is traced. The model may be on the ``meta`` device.

    Examples
    --------
    >>> network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.GELU())
    >>> untraceable_reason(network, torch.zeros(1, 2))
    'gelu at 1: not piecewise affine'
    """
    network = shape_copy(model)
    try:
        record_program(network, torch.empty(example.shape, dtype=torch.float64, device="meta"))
    except UnsupportedOperation as error:
        return str(error)
    except (NlbenchError, RuntimeError, TypeError, ValueError):
        # Some operation requires values.
        try:
            network = double_copy(model)
            device = precise_device(network, example)
            record_program(network, example[:1].to(device, copy=True).double())
        except UnsupportedOperation as error:
            return str(error)
    return ""


def run_once(
    network: nn.Module,
    example: Tensor,
    context: AbstractContextManager[object],
    on_output: Callable[[object], object] = lambda output: None,
) -> Tensor:
    """Run a network on one input, (1, ...), within a context, and validate its output.

    `on_output` is called with the output before it is validated.
    """
    try:
        with torch.no_grad(), context:
            output = network(example)
    except NlbenchError:
        raise
    except (RuntimeError, TypeError, IndexError, ValueError, AssertionError) as error:
        reason = first_line(error)
        # Part of PyTorch's message if a gradient is computed in inference mode.
        if "does not require grad" in reason:
            why = "the network computes a derivative in its forward pass"
            raise UnsupportedOperation("grad", "the network", why) from error
        raise RequestError(
            f"the network can't be run on one input of shape {tuple(example.shape)}: {reason}"
        ) from error
    on_output(output)
    output = validated_outputs(output, 1)
    if not output.is_meta and not torch.isfinite(output).all():
        raise NotFinite("the network's output is not finite")
    return output


def _drop_unused(steps: Sequence[ProgramStep], output: int, shape: tuple[int, ...]) -> Program:
    """Drop steps that the output doesn't need, and record the last use of each value."""
    needed = {output}
    used: list[ProgramStep] = []
    for step in reversed(steps):
        if step.output in needed:
            ends = tuple({i for i in step.inputs if i not in needed})
            used.append(replace(step, ends=ends))
            needed.update(step.inputs)
    return Program(tuple(reversed(used)), output, shape)


@dataclass(frozen=True)
class _StorageLayout:
    """Layout of a tensor's elements in its storage."""

    size: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _StorageLayout:
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        return cls(size, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def positions(self) -> Tensor:
        """Return the position of each element, (numel,)."""
        positions = torch.arange(self.size)
        return positions.as_strided(self.shape, self.stride, self.offset).flatten()


class _OperatorCall(FunctionCall):
    """A dispatched operation, with the tensors into which it writes."""

    written: Sequence[Tensor] = ()


class Recorder(DispatchMode):
    """Recorder of the operations that are dispatched while a network runs on one input.

    The input may be modified in place, and every recorded tensor must have its dtype.
    """

    def __init__(self, network: nn.Module, example: Tensor) -> None:
        load_operations("lines")
        super().__init__()
        # Operations that depend on the input, in call order. Value 0 is the input.
        self.steps: list[ProgramStep] = []
        self._dtype = example.dtype
        self._names = _CallNames(network, self)
        self._names.begin(example)
        self._sites: list[SiteName | None] = []
        self._composites: list[str] = []
        # Index of each tensor's value. References are weak, so recording keeps no memory alive.
        self._values: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
        # Index of the value that each tensor transposes.
        self._transposed: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
        # Tensors whose first axis holds several rows of the sample; their values have a further
        # axis before it, that of the points.
        self._folded: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()
        # Positions and new content of each write.
        self._writes: WriteLog[tuple[_StorageLayout, Any]] = WriteLog()
        self._input_shape = tuple(example.shape[1:])
        self._constants: set[Hashable] = set()
        # Why tensors can't be traced, which matters if the output depends on them, and why the
        # memory into which they were written can't.
        self._refused: MutableMapping[Tensor, UnsupportedOperation] = WeakTensorKeyDictionary()
        self._refused_memory: dict[Hashable, UnsupportedOperation] = {}
        # Indices of maxima, which are returned along with the maxima but rarely used.
        self._indices: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()
        self._bind(example, 0)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the dispatched operations and the modules that call them."""
        # In this mode, operations such as convolutions are dispatched under their own names.
        with torch.inference_mode(), self._names.hooked(), self._names, self:
            yield

    @property
    def program(self) -> list[ProgramStep]:
        """Steps with the names of their sites, once the network has run."""
        named = zip(self.steps, self._sites, strict=True)
        return [replace(step, site=name.text if name else "") for step, name in named]

    def output_value(self, output: Tensor) -> int:
        """Return the index of the value that the network returns, which may be a constant."""
        self._refresh(output, "forward")
        if output in self._transposed or output in self._folded:
            raise self._refusal("forward", _MOVES_SAMPLES)
        if output not in self._values:
            constant = output.clone()
            rule = Rule(
                lambda points: constant.expand(len(points[0]), *constant.shape[1:]),
                lambda inputs, bounds, result: peak(result),
            )
            self._add_step("constant", [0], rule, output)
        return self._values[output]

    def attend(self, forward: Callable[..., Any], *inputs: Any, **kwargs: Any) -> Any:
        """Refuse attention by name, since an error about its first step would be misleading."""
        if any(x in self._values for x in tensors_in((inputs, kwargs))):
            name = "multi_head_attention_forward"
            raise self._refusal(name, self._why_not(name))
        return forward(*inputs, **kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = positional(func, tuple(args), kwargs or {})
        operation = _OperatorCall(func, args, kwargs)
        operation.written = written_in(func, args, kwargs)
        depth = len(self._composites)
        try:
            return self._record(operation)
        except UnsupportedOperation as error:
            del self._composites[depth:]
            return self._run_refused(operation, error)

    def _run_refused(self, operation: _OperatorCall, error: UnsupportedOperation) -> Any:
        """Run an operation that can't be traced, unless its result decides what runs later.

        The network may only store the result, as it does with statistics of its activations.
        """
        if operation.takes in _READING_VALUES or _READING_TAGS.intersection(
            operation.function.tags
        ):
            raise error
        if any(get_memory_key(tensor) in self._constants for tensor in operation.written):
            raise error
        result = operation.run()
        for tensor in tree_iter(result):
            if not isinstance(tensor, Tensor):
                raise error
            self._refused[tensor] = error
        self._refused_memory |= {get_memory_key(tensor): error for tensor in operation.written}
        return result

    def check_refused(self, *values: object) -> None:
        """Raise if one of the values depends on an operation that can't be traced."""
        tensors = values if self._refused or self._refused_memory else ()
        for tensor in filter(torch.is_tensor, tensors):
            with unobserved_calls():
                memory = get_memory_key(tensor)
            if error := self._refused.get(tensor) or self._refused_memory.get(memory):
                raise error

    def record_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call of a registered autograd function as one operation."""
        with modes_disabled():
            return self._record(_OperatorCall(func, args, kwargs))

    def refuse_reading(self, name: str, args: Sequence[Any]) -> None:
        """Raise on access to the memory of a tensor that depends on the input."""
        if args and isinstance(args[0], Tensor):
            self.check_refused(args[0])
            if not self._is_traced(args[0]):
                return
            raise self._refusal(name, "the computation depends on the values of the input")

    def _is_traced(self, tensor: Tensor) -> bool:
        return tensor in self._values or tensor in self._transposed

    def _record(self, operation: _OperatorCall) -> Any:
        """Run an operation, and record it if it depends on the input."""
        name = operation.name
        tensors = operation.tensors
        self.check_refused(*tensors)
        for tensor in tensors:
            self._refresh(tensor, name)
        if any(a in self._indices for a in tensors):
            raise self._refusal(name, "it uses the positions of maxima")
        traced = list({id(a): a for a in tensors if self._is_traced(a)}.values())
        if not traced:
            return self._run_constant(operation)
        self._check_inputs(operation, traced)
        numbers = {id(a): Input(i) for i, a in enumerate(traced)}
        spec, spec_kwargs = tree_map(
            lambda a: numbers.get(id(a), a), (operation.args, operation.kwargs)
        )
        takes = operation.takes
        if takes == "shape" or (takes == "second shape" and not isinstance(spec[0], Input)):
            return operation.run()
        if _is_transposition(operation):
            return self._transpose(operation)
        is_transposed = any(a in self._transposed for a in traced)
        if is_transposed and (operation.written or any(a in self._values for a in traced)):
            raise self._refusal(name, _MOVES_SAMPLES)
        folded = [a in self._folded for a in traced]
        if not operation.written and not is_transposed and may_permute(name):
            result = self._permute(operation, folded[0])
            if result is not None:
                return result
        if any(folded) and not all(folded):
            raise self._refusal(name, _MOVES_SAMPLES)
        if name in ("copy", "fill", "zero") and operation.written:
            return self._copy(operation, spec, traced)
        if _clamps_to_tensors(operation):
            return self._decompose(operation, partial(_clamp, name), operation.written)
        if not operation.operation.traced:
            return self._decompose(operation, operation.function.decompose)
        constants = {get_memory_key(a) for a in tensors if not self._is_traced(a)}
        call = RecordedCall(name, operation.function, spec, spec_kwargs, (), ())
        if is_transposed:
            self._constants |= constants
            return self._record_transposed(operation, call, traced)
        if operation.written:
            call = self._without_write(operation, call)
        shapes = tuple((*(1,) * any(folded), *a.shape) for a in traced)
        result = operation.run()
        self._constants |= constants
        self._add(replace(call, shapes=shapes), traced, result, operation.written)
        return result

    def _run_constant(self, operation: _OperatorCall) -> Any:
        """Run an operation that doesn't depend on the input."""
        if any(get_memory_key(a) in self._constants for a in operation.written):
            raise self._refusal(operation.name, "it changes a constant that was read before")
        result = operation.run()
        for tensor in operation.written:
            if self._writes.has_writes(tensor):
                self._log_write(tensor, None)
        return result

    def _check_inputs(self, operation: _OperatorCall, traced: list[Tensor]) -> None:
        """Raise if an operation can't be recorded with its tensors."""
        name = operation.name
        if any(a.layout in SPARSE_LAYOUTS for a in operation.tensors):
            raise self._refusal(name, "it reads a sparse tensor")
        if operation.takes in _READING_VALUES:
            raise self._refusal(name, "the computation depends on the values of the input")
        if not all(a.numel() for a in traced):
            raise self._refusal(name, "it takes a tensor without entries")

    def _without_write(self, operation: _OperatorCall, call: RecordedCall) -> RecordedCall:
        """Return the call that returns what an operation in place writes."""
        written = operation.written
        if len(written) != 1 or written[0] is not operation.args[0]:
            raise self._refusal(operation.name, "it writes into a given tensor")
        # The result overwrites the first argument, so a constant is copied.
        first = call.args[0].clone() if isinstance(call.args[0], Tensor) else call.args[0]
        function = out_of_place(operation.function, operation.name)
        return replace(call, function=function, args=(first, *call.args[1:]))

    def _transpose(self, operation: _OperatorCall) -> Any:
        """Transpose a value without adding a step: the result refers to the same value."""
        source = operation.args[0]
        result = operation.run()
        if source in self._transposed:
            self._bind(result, self._transposed[source])
        else:
            self._transposed[result] = self._values[source]
            self._writes.bind(result)
        return result

    def _permute(self, operation: _OperatorCall, is_folded: bool) -> Any:
        """Record a call that moves the elements of a tensor, also to or from its first axis.

        Return None if it doesn't.
        """
        result = operation.run()
        is_result_folded = not _is_one_sample(result)
        if not (is_folded or is_result_folded):
            return None
        positions = permutation(operation.function, operation.args, operation.kwargs)
        if positions is None:
            return None
        shape = tuple(result.shape)[0 if is_result_folded else 1 :]
        source = self._values[operation.args[0]]
        rule = permuting_rule(positions, shape)
        self._add_step(operation.name, [source], rule, result, is_result_folded)
        return result

    def _record_transposed(
        self, operation: _OperatorCall, call: RecordedCall, traced: list[Tensor]
    ) -> Any:
        """Record a call on transposed tensors as the same call on values with samples first."""
        try:
            spec, spec_kwargs = move_samples_first(call.name, call.args, call.kwargs)
        except NotAffine as error:
            raise self._refusal(call.name, str(error)) from None
        result = operation.run()
        if result not in self._transposed:
            value = result.mT
            shapes = tuple((1, *self._find_shape(self._transposed[a])) for a in traced)
            call = replace(call, args=spec, kwargs=spec_kwargs, shapes=shapes)
            self._add(call, traced, value, [])
            self._transposed[result] = self._values[value]
            self._writes.bind(result)
        return result

    def _decompose(
        self, operation: _OperatorCall, parts: Callable[..., Any], written: Sequence[Tensor] = ()
    ) -> Any:
        """Record the parts of an operation that has no rule."""
        self._composites.append(operation.name)
        with self:
            result = parts(*operation.args, **operation.kwargs)
            for tensor in written:
                result = tensor.copy_(result)
        if result is NotImplemented:
            raise self._refusal(operation.name, self._why_not(operation.name))
        self._composites.pop()
        return result

    def _why_not(self, name: str) -> str:
        """Return the reason why an operation can't be traced: not affine, or unknown."""
        for called in (name, *reversed(self._composites)):
            operation = known(called)
            if operation.refused or operation.kind:
                return operation.refused or "not piecewise affine"
        names = {name, *self._composites}
        if any(entry.has_effect for entry in registered() if entry.name in names):
            return "not piecewise affine"
        missing = "".join(f" ({error})" for error in load_errors())
        return f"it is not known; register it with nlbench.register_op{missing}"

    def _add(
        self, call: RecordedCall, traced: list[Tensor], result: Any, written: Sequence[Tensor]
    ) -> None:
        inputs = [(self._values if a in self._values else self._transposed)[a] for a in traced]
        is_folded = traced[0] in self._folded
        rows = len(traced[0]) if is_folded else 1
        for part, tensor in enumerate([result] if isinstance(result, Tensor) else result):
            if not written and tensor in self._values:
                continue  # The operation returned its input.
            if not isinstance(result, Tensor) and not tensor.is_floating_point():
                self._indices[tensor] = None
                continue
            if tensor.dtype != self._dtype:
                raise self._refusal(call.name, f"it converts to {tensor.dtype}")
            if tensor.ndim == 0 or len(tensor) != rows:
                raise self._refusal(call.name, _MOVES_SAMPLES)
            own_call = replace(call, shape=(*(1,) * is_folded, *tensor.shape))
            if not isinstance(result, Tensor):
                own_call = replace(own_call, function=_part(call.function, part))
            try:
                rule = row_rule(own_call, _find_rule) if is_folded else _find_rule(own_call)
            except NotAffine as error:
                raise self._refusal(call.name, str(error)) from None
            self._add_step(call.name, inputs, rule, tensor, is_folded)
            if written:
                self._log_write(tensor, self._values[tensor])

    def _add_step(
        self, name: str, inputs: Sequence[int], rule: Rule, output: Tensor, is_folded: bool = False
    ) -> None:
        value = len(self.steps) + 1
        shape = tuple(output.shape)[0 if is_folded else 1 :]
        if is_folded:
            self._folded[output] = None
        self.steps.append(ProgramStep(name, self._names.place, tuple(inputs), value, rule, shape))
        self._sites.append(self._site(name) if rule.pieces else None)
        self._bind(output, value)

    def _bind(self, tensor: Tensor, value: int) -> None:
        self._values[tensor] = value
        self._writes.bind(tensor)

    def _copy(self, operation: _OperatorCall, spec: Sequence[Any], traced: Sequence[Tensor]) -> Any:
        """Record an assignment to a tensor or to a slice of one."""
        target = operation.args[0]
        source = spec[1] if len(spec) > 1 else None
        result = operation.function(*operation.args)
        shape = tuple(target.shape)
        if target.dtype != self._dtype or not shape or shape[0] != 1:
            raise self._refusal("copy", "it writes into a tensor of a different kind or shape")
        if isinstance(source, Input):
            tensor = traced[source.index]
            call = RecordedCall(
                "expand", _expand, (Input(0), shape), {}, (tuple(tensor.shape),), shape
            )
            if tensor.dtype != self._dtype or tensor.ndim != len(shape):
                raise self._refusal("copy", _MOVES_SAMPLES)
            self._add_step("copy", [self._values[tensor]], _find_rule(call), target)
            self._log_write(target, self._values[target])
        else:
            self._log_write(target, None)
            self._refresh(target, "copy")
        return result

    def _log_write(self, tensor: Tensor, value: int | None) -> None:
        """Log that a tensor was overwritten, with a value or, if None, with constants."""
        content = tensor.clone() if value is None else value
        self._writes.write(tensor, (_StorageLayout.of(tensor), content))
        if value is not None:
            self._writes.bind(tensor)

    def _refresh(self, tensor: Tensor, name: str) -> None:
        """Update a tensor whose memory was overwritten via another tensor."""
        for time, (layout, content) in self._writes.pending(tensor):
            positions = _StorageLayout.of(tensor).positions()
            written = layout.positions()
            order = torch.full((int(max(positions.max(), written.max())) + 1,), -1)
            order[written] = torch.arange(len(written))
            source = order[positions]
            hit = source >= 0
            if bool(hit.any()):
                is_sample = _is_one_sample(tensor) or tensor in self._folded
                if not is_sample or tensor in self._transposed or tensor.dtype != self._dtype:
                    raise self._refusal(name, "it reads a tensor whose memory was changed in place")
                self._assign(tensor, content, hit.nonzero().squeeze(1), source[hit])
            elif not self._is_traced(tensor):
                continue
            self._writes.bind(tensor, time)

    def _assign(self, tensor: Tensor, content: Any, places: Tensor, source: Tensor) -> None:
        """Add a step that inserts overwritten elements into a tensor."""
        base = self._values.get(tensor)
        value = content
        traced = [v for v in (base, value) if isinstance(v, int)]
        if not traced:
            return  # A constant was overwritten with constants.
        numbers = {v: Input(i) for i, v in enumerate(unique(traced))}
        arguments = [
            numbers[v] if isinstance(v, int) else (tensor.clone() if v is None else v)
            for v in (base, value)
        ]
        is_folded = tensor in self._folded
        shape = (*(1,) * is_folded, *tensor.shape)
        shapes = tuple((1, *self._find_shape(v)) for v in numbers)
        call = RecordedCall("assigned", _expand, (*arguments, places, source), {}, shapes, shape)
        self._add_step("copy", list(numbers), _find_rule(call), tensor, is_folded)

    def _find_shape(self, value: int) -> tuple[int, ...]:
        return self.steps[value - 1].shape if value else self._input_shape

    def _refusal(self, name: str, why: str) -> UnsupportedOperation:
        return UnsupportedOperation((self._composites or [name])[0], self._names.place, why)

    def _site(self, name: str) -> SiteName:
        """Return the name for a call that bends: the activation's, or else the operation's."""
        return self._names.current or self._names.name((self._composites or [name])[0])


# Facts and tags of operations whose results, or the shapes of them, depend on values.
_READING_VALUES = ("number", "truth", "values")
_READING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

_MOVES_SAMPLES = "it moves or drops the batch axis"


def _is_one_sample(tensor: Any) -> bool:
    return not isinstance(tensor, Tensor) or (tensor.ndim > 0 and len(tensor) == 1)


def _clamps_to_tensors(operation: _OperatorCall) -> bool:
    bounds = (*operation.args[1:], *operation.kwargs.values())
    has_tensors = any(isinstance(bound, Tensor) for bound in bounds)
    is_clamp = operation.name in ("clamp", "clip", "clamp_min", "clamp_max")
    return is_clamp and "out" not in operation.kwargs and has_tensors


def _clamp(name: str, x: Any, *bounds: Any, **named: Any) -> Any:
    """Clamp to tensor bounds with a maximum and a minimum."""
    low, high = (None, *bounds) if name == "clamp_max" else (*bounds, None, None)[:2]
    low, high = named.get("min", low), named.get("max", high)
    x = x if low is None else torch.maximum(x, low)
    return x if high is None else torch.minimum(x, high)


def _find_rule(call: RecordedCall) -> Rule:
    operation = known(call.name)
    if not operation.traced:
        raise NotAffine("not piecewise affine")
    if operation.line is None:
        return kinks.rule_of_kinks(operation, call)
    return operation.line(call)


class _CallNames(SiteNames):
    """Names of calls. Calls registered as one operation are passed to the recorder."""

    def __init__(self, network: nn.Module, recorder: Recorder) -> None:
        super().__init__(network)
        self._recorder = recorder

    def around(self, call: ModuleCall) -> Any:
        if isinstance(call.module, nn.MultiheadAttention):
            call.forward = partial(self._recorder.attend, call.forward)
        return super().around(call)

    def call(self, call: FunctionCall) -> Any:
        if call.takes == "memory":
            self._recorder.refuse_reading(call.function_name, call.args)
        if hasattr(call.function, "nlbench_op") and call.operation.traced:
            return self._recorder.record_call(call.function, call.args, call.kwargs)
        return super().call(call)


# Transposed tensors have their samples along the last axis: ``weight @ x.T``.
_TRANSPOSING = (
    "T", "adjoint", "mH", "mT", "matrix_H", "moveaxis", "movedim", "numpy_T", "permute",
    "swapaxes", "swapdims", "t", "transpose",
)  # fmt: skip


def _is_transposition(operation: _OperatorCall) -> bool:
    """Return True if a call transposes a matrix."""
    args = operation.args
    if operation.written or operation.name not in _TRANSPOSING or not args or args[0].ndim != 2:
        return False
    matrix = torch.arange(6).reshape(2, 3)
    return torch.equal(operation.function(matrix, *args[1:], **operation.kwargs), matrix.mT)


def move_samples_first(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the equivalent call on matrices that are not transposed.

    `Input` stands in place of the transposed tensors. Raise NotAffine if the call is neither
    elementwise nor a product with a constant on the left.

    Examples
    --------
    >>> weight = torch.tensor([[1.0, 2.0]])
    >>> move_samples_first("mm", (weight, Input(0)), {})
    ((Input(index=0), tensor([[1.],
            [2.]])), {})
    """
    if name in ("mm", "matmul", "addmm"):
        *summand, first, second = args
        if not isinstance(second, Input) or isinstance(first, Input) or first.ndim != 2:
            raise NotAffine("it mixes the samples of a batch")
        return (*map(_transpose, summand), second, first.mT), dict(kwargs)
    selects = name in ("max", "min") and not isinstance(args[1], (Input, Tensor))
    if not known(name).acts or selects:
        raise NotAffine("it moves or drops the batch axis")
    return tuple(tree_map(_transpose, list(args))), tree_map(_transpose, dict(kwargs))


def _transpose(argument: Any) -> Any:
    if not isinstance(argument, Tensor) or argument.numel() == 1:
        return argument
    if argument.ndim != 2:
        raise NotAffine("it mixes the samples of a batch")
    return argument.mT


def _expand(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.expand(len(x), *shape[1:])


def _part(function: Callable[..., Any], index: int) -> Callable[..., Any]:
    """Return a function that computes one of an operation's results."""

    def select(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)[index]

    return select
