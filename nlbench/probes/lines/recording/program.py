"""Record a network as a straight line of operations.

The network is run once on one input while every operation that PyTorch dispatches is
written down. What depends on the input becomes a step of the program; all else,
parameters included, is a constant. Calls of functions, in-place operations and skip
connections are seen as well as modules, and control flow that depends on shapes is
resolved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from nlbench.errors import (
    NlbenchError,
    NotFinite,
    RequestError,
    UnsupportedOperation,
    first_line,
)
from nlbench.introspection.memory import LiveBytes, PointMemory
from nlbench.introspection.model_state import (
    double_copy,
    outputs_of,
    precise_device,
    shape_copy,
    typed_copy,
)
from nlbench.introspection.module_stack import SiteName, SiteNames
from nlbench.introspection.operations import (
    DispatchMode,
    FunctionCall,
    known,
    load_errors,
    qualified_name,
    written_in,
)
from nlbench.probes.lines.rules import kinks
from nlbench.probes.lines.rules.rule import Input, NotAffine, RecordedCall, Rule, peak

__all__ = [
    "AGREEMENT",
    "ROUNDED",
    "Computed",
    "Program",
    "Recorder",
    "Step",
    "agree",
    "check_program",
    "checked_program",
    "double_copy",
    "is_same",
    "least_point_memory",
    "point_memory_of",
    "program_of",
    "run_alone",
    "run_program",
    "traceable",
    "typed_copy",
    "walk",
    "walk_measured",
]


AGREEMENT = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Relative difference up to which program and network count as the same function."""
ROUNDED = 1000
"""Rounding errors by which two ways of computing the same may differ."""


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
class Program:
    """A network as steps; value 0 is the input.

    Parameters
    ----------
    steps : tuple of Step
    output : int
        Number of the value that the network returns.
    shape : tuple of int
        Of one input.
    """

    steps: tuple[Step, ...]
    output: int
    shape: tuple[int, ...]

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the calls that bend, in order of call."""
        return tuple(step.site for step in self.steps if step.site)


def traceable(model: nn.Module, example: Tensor) -> str:
    """Say why a network can't be traced, from a look at its operations alone.

    Nothing is computed where the network allows it: shapes go through it in place of
    numbers, so that it costs as little for a large network as for a small one. What only
    numbers show, such as a weight that is not finite, is found when it is traced.

    Parameters
    ----------
    model : torch.nn.Module
        It is left as it was; it may be on the ``meta`` device.
    example : tensor of shape (1, *input)
        Of which only the shape counts.

    Returns
    -------
    str
        Empty if it is piecewise affine, else the first operation that isn't, its place
        and the reason.

    Examples
    --------
    >>> traceable(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.GELU()), torch.zeros(1, 2))
    'gelu at 1: not piecewise affine'
    """
    network = shape_copy(model)
    try:
        program_of(network, torch.empty(example.shape, dtype=torch.float64, device="meta"))
    except UnsupportedOperation as error:
        return str(error)
    except (NlbenchError, RuntimeError, TypeError, ValueError):
        # Something on the way wants numbers.
        try:
            network = double_copy(model)
            device = precise_device(network, example)
            program_of(network, example[:1].to(device, copy=True).double())
        except UnsupportedOperation as error:
            return str(error)
    return ""


def least_point_memory(program: Program, dtype: torch.dtype) -> PointMemory:
    """Tell from shapes alone what a point of a program takes at least.

    Examples
    --------
    >>> network = torch.nn.Sequential(torch.nn.Linear(4, 10), torch.nn.ReLU()).double()
    >>> program = program_of(network, torch.zeros(1, 4, dtype=torch.float64))
    >>> least_point_memory(program, torch.float64).width
    160
    """
    return _load(program, dtype.itemsize, {}, {})


def checked_program(network: nn.Module, example: Tensor) -> Program:
    """Record a network and check that the program computes what the network does.

    Parameters
    ----------
    network : torch.nn.Module
        In eval mode, in float64 or float32, see `typed_copy`.
    example : tensor of shape (m, ...), of the same dtype
        Inputs to check with; the first one is recorded.

    Returns
    -------
    Program

    Raises
    ------
    nlbench.UnsupportedOperation
        If an operation is not piecewise affine, mixes the samples of a batch or reads
        values, or if the program does not reproduce the network.
    nlbench.NotFinite
        If the network's output is not finite.
    nlbench.RequestError
        If the network can't be run on such an input.
    nlbench.Undefined
        If it gives no tensor.

    Examples
    --------
    >>> network = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()).double()
    >>> program = checked_program(network, torch.zeros(1, 2, dtype=torch.float64))
    >>> [step.operation for step in program.steps], program.sites
    (['linear', 'relu'], ('1',))
    """
    program = program_of(network, example[:1].clone())
    check_program(program, network, example)
    return program


def check_program(program: Program, network: nn.Module, example: Tensor) -> None:
    """Refuse a program that does not compute what the network does; see `checked_program`.

    Four points are the most that are carried at once.
    """
    found = _checked_alone(program, example)
    expected = run_alone(network, example)
    same = found.shape == expected.shape and bool(agree(found, expected, expected).all())
    if not same:
        raise UnsupportedOperation(
            "forward", "the network", "the recorded program does not reproduce the network's output"
        )


def program_of(network: nn.Module, one: Tensor) -> Program:
    """Record a network, as `checked_program` does, on one input, which it may change; (1, ...)."""
    recorder = Recorder(network, one)
    output = _one_output(network, one, recorder.recording())
    value = recorder.output_value(output)
    return _program(recorder.program, value, tuple(one.shape[1:]))


def agree(values: Tensor, expected: Tensor, others: Tensor) -> Tensor:
    """Tell which outputs are the same but for rounding.

    An output is allowed 1e-9 of its largest magnitude, but no more than a thousandth of what it
    varies by, and a thousand rounding errors of the largest output. (In single precision the
    first two are 1e-3 and a tenth.)

    Parameters
    ----------
    values, expected : tensor of shape (m, ...)
        To be compared.
    others : tensor of shape (n, ...)
        The same outputs at these places and elsewhere, which say how large they are.

    Returns
    -------
    bool tensor of shape (m, k)
    """
    count = len(values)
    values, expected = values.reshape(count, -1), expected.reshape(count, -1)
    if not expected.numel():
        return torch.ones_like(values, dtype=torch.bool)
    relative, precision = AGREEMENT[expected.dtype], torch.finfo(expected.dtype).eps
    # Of others there may be many: none is copied.
    others = others.reshape(len(others), -1)
    high = torch.maximum(others.amax(0).to(expected.dtype), expected.amax(0))
    low = torch.minimum(others.amin(0).to(expected.dtype), expected.amin(0))
    size, spread = torch.maximum(high, -low), high - low
    varies = 1e-3 if expected.dtype == torch.float64 else 0.1
    tolerance = torch.where(
        spread > 0, torch.minimum(relative * size, varies * spread), relative * size
    )
    tolerance = tolerance.clamp(min=float(ROUNDED * precision * size.max()))
    return (values - expected).abs() <= tolerance


def is_same(values: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether outputs agree to `AGREEMENT` of the largest of those that are expected.

    `dtype` is what the network computes in; its output may be of another.
    """
    if values.shape != expected.shape:
        return False
    scale = expected.abs().amax() if expected.numel() else 1.0
    return bool(((values - expected).abs() <= AGREEMENT[dtype] * scale).all())


def run_program(
    program: Program,
    inputs: Tensor,
    look: Callable[[Step, Sequence[Tensor]], None] | None = None,
    *,
    is_direct: bool = False,
) -> Tensor:
    """Run a program on a batch of inputs, (m, ...) to (m, ...).

    `look` is shown each step and what it is given, before it is run; with `is_direct` calls are run
    as they are, where a rule computes them in another way.
    """
    values = {0: inputs}
    for step in program.steps:
        x = [values[i] for i in step.inputs]
        if look is not None:
            look(step, x)
        direct = step.rule.direct if is_direct else None
        values[step.output] = (direct or step.rule.apply)(x)
        for value in step.ends:
            del values[value]
    return values[program.output]


def run_alone(network: nn.Module, inputs: Tensor) -> Tensor:
    """Run a network on each input by itself; (m, ...) to (m, ...).

    Raises
    ------
    nlbench.RequestError, nlbench.Undefined, nlbench.NotFinite
    """
    return torch.cat([_one_output(network, one.clone(), nullcontext()) for one in inputs[:, None]])


def _one_output(network: nn.Module, one: Tensor, context: AbstractContextManager[object]) -> Tensor:
    try:
        with torch.inference_mode(), context:
            output = network(one)
    except NlbenchError:
        raise
    except (RuntimeError, TypeError, IndexError, ValueError, AssertionError) as error:
        reason = first_line(error)
        raise RequestError(
            f"the network can't be run on one input of shape {tuple(one.shape)}: {reason}"
        ) from error
    output = outputs_of(output, 1)
    if not output.is_meta and not torch.isfinite(output).all():
        raise NotFinite("the network's output is not finite")
    return output


@dataclass(frozen=True)
class Computed:
    """A step as a walk comes to it: what it was given and what it gives, with their errors.

    `copies` are the inputs with other last digits, where errors are measured by them.
    """

    step: Step
    inputs: Sequence[Tensor]
    bounds: Sequence[Tensor]
    output: Tensor
    bound: Tensor
    copies: Sequence[Sequence[Tensor]] = ()


def walk(program: Program, inputs: Tensor) -> Iterator[Computed]:
    """Go through a program step by step with a batch of inputs, (m, *input).

    Nothing is kept that no later step needs.
    """
    values, bounds = {0: inputs}, {0: peak(inputs)}
    for step in program.steps:
        x, b = [values[i] for i in step.inputs], [bounds[i] for i in step.inputs]
        output = _applied(step, x)
        values[step.output], bounds[step.output] = output, step.rule.bound(x, b, output)
        yield Computed(step, x, b, output, bounds[step.output])
        # Who has looked at them may hold the lists until there are the next.
        x.clear()
        b.clear()
        del output
        for value in step.ends:
            del values[value], bounds[value]


def _applied(step: Step, inputs: Sequence[Tensor]) -> Tensor:
    try:
        output = step.rule.apply(inputs)
    except RuntimeError as error:
        raise step.refusal("it does not take more than one sample") from error
    if output.shape != (len(inputs[0]), *step.shape):
        raise step.refusal("it mixes the samples of a batch")
    return output


def walk_measured(program: Program, inputs: Tensor, copies: int = 1) -> Iterator[Computed]:
    """Go through a program as `walk` does; the errors are measured, and no rule's estimates.

    Beside the batch go copies in which every number that a step is given is changed by about
    its last digit, at random but the same each time. By how much they come to differ is the
    error: one number a unit, or a channel where there are positions, the largest over the
    batch. (Rounding as an experiment: Vignes, "A stochastic arithmetic for reliable scientific
    computation", Mathematics and Computers in Simulation 35, 1993.)
    """
    generator = torch.Generator(inputs.device).manual_seed(0)
    precision = torch.finfo(inputs.dtype).eps

    def nudged(x: Tensor) -> Tensor:
        sign = torch.randint(0, 2, x.shape, generator=generator, device=x.device, dtype=torch.int8)
        return x * (1 + precision * (2 * sign - 1).to(x.dtype))

    several = [{0: inputs}, *({0: nudged(inputs)} for _ in range(copies))]
    for step in program.steps:
        given = [[values[i] for i in step.inputs] for values in several]
        outputs = [_applied(step, given[0]), *(_applied(step, x) for x in given[1:])]
        bounds = [
            _difference(x, [own[i] for own in given[1:]]) / precision
            for i, x in enumerate(given[0])
        ]
        bound = _difference(outputs[0], outputs[1:]) / precision
        yield Computed(step, given[0], bounds, outputs[0], bound, given[1:])
        for x in (*given, bounds):
            x.clear()
        for i, values in enumerate(several):
            values[step.output], outputs[i] = outputs[i] if i == 0 else nudged(outputs[i]), inputs
            for value in step.ends:
                del values[value]


def _difference(x: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Give the largest difference of each unit, or channel, over the batch: (m, ..., 1)."""
    axes = [0, *range(2, x.ndim)]
    largest = torch.stack([(x - other).abs().amax(axes, keepdim=True) for other in others]).amax(0)
    return largest.expand(len(x), *largest.shape[1:])


def _checked_alone(program: Program, example: Tensor) -> Tensor:
    """Run a program on each example by itself and give the outputs.

    Raises
    ------
    nlbench.UnsupportedOperation
        Of the step that gives other values for an example beside another one.
    """
    count = len(example)
    with torch.inference_mode():
        outputs = [
            _checked_beside(program, example[i : i + 1], example[(i + 1) % count :][:1])
            for i in range(count)
        ]
    return torch.cat(outputs)


def _checked_beside(program: Program, one: Tensor, other: Tensor) -> Tensor:
    precision, output = torch.finfo(one.dtype).eps, one
    steps = zip(walk(program, one), walk(program, torch.cat([other, one])), strict=True)
    for alone, together in steps:
        step, expected = alone.step, alone.output
        if not torch.isfinite(expected).all():
            raise NotFinite(f"the output of {step.operation} at {step.place} is not finite")
        tolerance = AGREEMENT[one.dtype] * expected.abs() + ROUNDED * precision * alone.bound
        # An infinite tolerance is none.
        same = ((together.output[1:] - expected).abs() <= tolerance) & tolerance.isfinite()
        if not bool(same.all()):
            raise step.refusal("it mixes the samples of a batch")
        if step.output == program.output:
            output = expected
    return output


def _program(steps: Sequence[Step], output: int, shape: tuple[int, ...]) -> Program:
    """Leave out what the output doesn't need and note where each value ends."""
    wanted = {output}
    kept: list[Step] = []
    for step in reversed(steps):
        if step.output in wanted:
            ends = tuple({i for i in step.inputs if i not in wanted})
            kept.append(replace(step, ends=ends))
            wanted.update(step.inputs)
    return Program(tuple(reversed(kept)), output, shape)


def point_memory_of(program: Program, inputs: Tensor) -> PointMemory:
    """Measure what a point takes on its way through a program.

    What is computed once and kept is counted if it was not computed before.

    Parameters
    ----------
    program : Program
    inputs : tensor of shape (m, *input)
        Two at least, or what bends is not measured.

    Examples
    --------
    >>> network = torch.nn.Sequential(torch.nn.Linear(4, 10), torch.nn.ReLU()).double()
    >>> inputs = torch.zeros(2, 4, dtype=torch.float64)
    >>> point_memory_of(checked_program(network, inputs), inputs).width
    320
    """
    bound_bytes, own_bytes = {}, {}
    constants, points = 0, len(inputs)
    with torch.inference_mode(), LiveBytes() as live:
        values, bounds = {0: inputs}, {0: peak(inputs)}
        bound_bytes[0] = -(-_bytes(bounds[0]) // points)
        for step in program.steps:
            x, b = [values[i] for i in step.inputs], [bounds[i] for i in step.inputs]
            before = live.restart()
            output = _applied(step, x)
            bound = step.rule.bound(x, b, output)
            # What is kept of it is neither of the two, and what both took stays.
            made = {t.untyped_storage()._cdata: t.untyped_storage() for t in (output, bound)}
            given = {t.untyped_storage()._cdata for t in (*x, *b)}
            new = sum(storage.nbytes() for key, storage in made.items() if key not in given)
            constants += max(0, live.now - before - new)
            most = live.peak - before
            if step.rule.bend is not None and points > 1 and all(n.isfinite().all() for n in b):
                live.restart()
                step.rule.bend(x, b)
                most = max(most, live.peak - before)
            own_bytes[step.output] = -(-max(0, most - new) // points)
            bound_bytes[step.output] = -(-_bytes(bound) // points)
            values[step.output], bounds[step.output] = output, bound
            for value in step.ends:
                del values[value], bounds[value]
    return _load(program, inputs.element_size(), bound_bytes, own_bytes, constants)


def _load(
    program: Program,
    size: int,
    bounds: Mapping[int, int],
    own: Mapping[int, int],
    constants: int = 0,
) -> PointMemory:
    """Add up what a point takes, given the bytes of each value's bound and of its making."""
    alive = {0: size * torch.Size(program.shape).numel()}
    width = most = alive[0] + bounds.get(0, 0)
    alive[0] = width
    waiting = reserve = 0
    for step in program.steps:
        before, largest = sum(alive.values()), max(alive.values())
        output = size * torch.Size(step.shape).numel()
        alive[step.output] = output + bounds.get(step.output, 0)
        after = sum(alive.values())
        workspace = size * step.rule.workspace
        if step.rule.bend is not None:
            waiting += before
            # Signs, and copies of what bends; or of what new points are interpolated from.
            workspace += max(2 * output, 2 * largest)
        width, reserve = max(width, after), max(reserve, size * step.rule.reserve)
        most = max(most, before + after + max(workspace, own.get(step.output, 0)))
        for value in step.ends:
            del alive[value]
    return PointMemory(width, most, waiting, reserve, constants)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


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


class Recorder(DispatchMode):
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
        super().__init__()
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
        written = written_in(func, args, kwargs)
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
        if not known(name).traced:
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
        self._add(
            RecordedCall(name, function, spec, spec_kwargs, shapes, ()), traced, result, written
        )
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
            if operation.refused or operation.kind:
                return operation.refused or "not piecewise affine"
        if any(known(called).has_numbers for called in (name, *self._composites)):
            return "not piecewise affine"
        missing = "".join(f" ({error})" for error in load_errors())
        return f"it is not known; register it with nlbench.register_op{missing}"

    def _add(
        self, call: RecordedCall, traced: list[Tensor], result: Any, written: list[Tensor]
    ) -> None:
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
            call = RecordedCall(
                "expand", _expanded, (Input(0), shape), {}, (tuple(tensor.shape),), shape
            )
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
        call = RecordedCall("assigned", _expanded, (*arguments, places, source), {}, shapes, shape)
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


def _rule_of(call: RecordedCall) -> Rule:
    operation = known(call.name)
    if not operation.traced:
        raise NotAffine("not piecewise affine")
    if operation.line is None:
        return kinks.rule_of_kinks(operation, call)
    rule: Rule = operation.line(call)
    return rule


class _Names(SiteNames):
    """Tells a recorder of calls that are made of several operations, but known as one."""

    def __init__(self, network: nn.Module, recorder: Recorder) -> None:
        super().__init__(network)
        self._recorder = recorder

    def call(self, call: FunctionCall) -> Any:
        name = getattr(call.function, "__name__", "")
        if name in _READS_MEMORY:
            self._recorder.refuse_reading(name, call.args)
        if hasattr(call.function, "nlbench_op") and call.operation.traced:
            return self._recorder.whole(call.function, call.args, call.kwargs)
        return super().call(call)


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


def _expanded(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.expand(len(x), *shape[1:])


def _kept_constant(argument: Any) -> Any:
    return argument.clone() if isinstance(argument, Tensor) else argument


def _part(function: Callable[..., Any], index: int) -> Callable[..., Any]:
    """Make of an operation with several results one with a single result."""

    def one(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)[index]

    return one
