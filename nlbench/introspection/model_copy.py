"""Copies of a model in another dtype, on another device or on the meta device.

Converting a network's parameters and buffers does not affect dtypes named in its forward method
(``x.float()``), constants created there (``torch.ones(3)``), or tensors from elsewhere, such as
global variables. `FloatTypeMode` does.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_, is_not
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nlbench.errors import Unobservable, first_line

from .batch_independence import other_samples
from .function_calls import tensors_in, unobserved_calls
from .memory import is_out_of_memory
from .model_output import validated_outputs
from .model_state import evaluation_mode, preserve_attributes, refuse_unobservable
from .pytree import tree_leaves, tree_map
from .random_state import preserve_rng_state, rng_state
from .wrappers import through_wrappers

Network = TypeVar("Network", bound=nn.Module)


def own_float_type(network: nn.Module) -> torch.dtype:
    """Return the float type of most of a network's weights. PyTorch's default if it has none.

    Examples
    --------
    >>> own_float_type(nn.Linear(2, 2).half()), own_float_type(nn.ReLU())
    (torch.float16, torch.float32)
    """
    sizes: Counter[torch.dtype] = Counter()
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.is_floating_point():
            sizes[tensor.dtype] += tensor.numel()
    return max(sizes, key=sizes.__getitem__) if sizes else torch.get_default_dtype()


class FloatTypeMode(TorchFunctionMode):
    """Function mode in which a network of type `own` computes in the floating-point type `dtype`.

    Where the forward method names the network's type or a wider one, `dtype` is used instead.
    Tensors that it creates or reads from elsewhere are converted when they are combined with
    tensors of type `dtype`. Constants are rounded to the network's precision. Conversions to a
    narrower type are kept, since they round.

    Examples
    --------
    >>> with FloatTypeMode(torch.float32, torch.float64):
    ...     x = torch.ones(2) @ torch.ones(2).double()
    ...     print(x.dtype, x.float().dtype, x.half().dtype)
    torch.float64 torch.float64 torch.float16
    """

    def __init__(self, own: torch.dtype, dtype: torch.dtype) -> None:
        super().__init__()
        self.own = own
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if name == "__get__":
            return func(*args, **kwargs)
        # These checks are not part of the network.
        with unobserved_calls():
            floats = [t for t in tensors_in((*args, *kwargs.values())) if t.is_floating_point()]
            if floats:
                args, kwargs = self._convert(name, floats, args, kwargs)
                target = _named_type(name, args)
                if target is not None and self._replaces(target):
                    func = Tensor.to
                    args = (args[0], self.dtype)
                    kwargs = {}
        result = func(*args, **kwargs)
        if floats or not isinstance(result, Tensor):
            return result
        with unobserved_calls():
            return result.to(self.dtype) if self._replaces(result.dtype) else result

    def _replaces(self, dtype: torch.dtype) -> bool:
        """Return True for a floating-point type at least as wide as the network's own."""
        return dtype.is_floating_point and torch.promote_types(dtype, self.own) == dtype

    def _convert(
        self, name: str, floats: Sequence[Tensor], args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Replace types, and convert tensors that are combined with tensors of `dtype`."""
        is_mixed = len({t.dtype for t in floats}) > 1 and any(t.dtype == self.dtype for t in floats)
        written = args[0] if args and _writes_first(name) else kwargs.get("out")

        def convert(value: Any) -> Any:
            if isinstance(value, torch.dtype):
                return self.dtype if self._replaces(value) else value
            if is_mixed and isinstance(value, Tensor) and value is not written:
                return value.to(self.dtype) if value.is_floating_point() else value
            return value

        if is_mixed:
            args, kwargs = tree_map(convert, (args, kwargs))
            return args, kwargs
        # A dtype is always an argument itself, never inside a container.
        return tuple(map(convert, args)), {k: convert(v) for k, v in kwargs.items()}


def _writes_first(name: str) -> bool:
    """Return True for the name of a method that changes its tensor in place."""
    if name.startswith("__"):
        return name.startswith("__i") or name == "__setitem__"
    return name.endswith("_")


def _named_type(name: str, args: Sequence[Any]) -> torch.dtype | None:
    """Return the dtype that a method converts to, if its name or argument specifies one."""
    if name in ("float", "double", "half", "bfloat16"):
        return getattr(torch, name)
    if name != "type" or len(args) < 2:
        return None
    named = args[1]
    if isinstance(named, str):
        named = getattr(torch, named.rpartition(".")[2], None)
    dtype_of_type = getattr(named, "dtype", None)
    return dtype_of_type if isinstance(dtype_of_type, torch.dtype) else None


def computing_in(network: Network, mode: FloatTypeMode) -> Network:
    """Make every call of a network run in a mode, and return the network."""
    kind = getattr(type(network), "_without_mode", type(network))

    def call(self: Network, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return kind.__call__(self, *args, **kwargs)

    # Unlike a wrapper or hooks, this doesn't affect module names or copying.
    members = {"__call__": call, "_without_mode": kind, "__module__": kind.__module__}
    network.__class__ = type(kind.__name__, (kind,), members)
    return network


def double_copy(model: nn.Module, inputs: Tensor | None = None) -> nn.Module:
    """Copy a model in eval mode so that it computes in float64. See `typed_copy`."""
    return typed_copy(model, torch.float64, inputs)


@through_wrappers
def typed_copy(model: nn.Module, dtype: torch.dtype, inputs: Tensor | None = None) -> nn.Module:
    """Copy a model in eval mode so that it computes in another dtype.

    Parameters, buffers and everything else that the forward method uses are converted: tensors in
    any attribute, constants that it creates, and global variables; see `FloatTypeMode`.

    A model on a device without float64 (see `precise_device`) is copied to the CPU, even for
    float32, since its outputs are processed in double precision.

    A copy that doesn't compute what the model does on `inputs` (n, ...) is refused. It may read
    what the model has kept for another input, in a global dictionary, for example.

    Examples
    --------
    >>> model = nn.Linear(2, 2).half()
    >>> typed_copy(model, torch.float64).weight.dtype, model.weight.dtype
    (torch.float64, torch.float16)
    """
    _refuse_uncopyable(model)
    if any(t.is_meta for t in iter_tensors(model)):
        raise Unobservable("the model is on the device meta: it has shapes, but no weights")
    is_unsupported = any(t.device.type in _WITHOUT_FLOAT64 for t in iter_tensors(model))

    def convert(tensor: Tensor) -> Tensor:
        moved = tensor.detach().cpu() if is_unsupported else tensor.detach()
        return moved.to(dtype if moved.is_floating_point() else moved.dtype, copy=True)

    # PyTorch's copy of a parameter has its dtype, and would have to be converted afterwards.
    parameters = (t for t in model.parameters() if type(t) is nn.Parameter)
    replaced = {id(t): nn.Parameter(convert(t), t.requires_grad) for t in parameters}
    copied = _deep_copy(model, replaced, convert)
    if is_unsupported:
        copied = copied.cpu()
    copied = copied.to(dtype)
    if dtype == torch.float64:
        # In channels-last format, depthwise convolutions in float64 take four times as long.
        copied = copied.to(memory_format=torch.contiguous_format)
    copied = computing_in(copied, FloatTypeMode(own_float_type(model), dtype))
    if inputs is not None:
        _check_copy(model, copied, dtype, inputs)
    return copied


COARSEST_EPS = 2**-8
"""Relative rounding of bfloat16, in which parts of a network may compute."""
NOISE_FACTOR = 16
"""Difference of a copy's output that is tolerated, in effects of rounding the input so."""
RELATIVE_TOLERANCE = 2**-5
"""Difference that is always tolerated, relative to the largest output."""


def _check_copy(model: nn.Module, copied: nn.Module, dtype: torch.dtype, inputs: Tensor) -> None:
    """Raise if a copy doesn't compute what a model does, which has seen another input since."""
    own = own_float_type(model)
    device = next((t.device for t in iter_tensors(model)), inputs.device)
    sample = inputs[:1].to(device, own)
    signs = torch.randint(2, sample.shape, generator=torch.Generator().manual_seed(0))
    signs = 2 * signs.to(sample) - 1

    def run(network: nn.Module, inputs: Tensor) -> Tensor:
        return validated_outputs(network(inputs.clone()), 1).detach().double().cpu()

    with evaluation_mode(model), preserve_attributes(model), preserve_rng_state(device):
        before = rng_state(device)
        try:
            expected = run(model, sample)
            nudged = run(model, sample * (1 + COARSEST_EPS * signs))
            other = run(model, other_samples(inputs)[0].to(device, own))
        except Exception:  # Nothing to compare with.
            return
        if rng_state(device) != before:  # The outputs of one network differ, too.
            return
        try:
            output = run(copied, sample.to(precise_device(model, inputs), dtype))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            reason = f"a copy of it in {str(dtype).removeprefix('torch.')} can't be run"
            raise Unobservable(f"{reason}: {first_line(error)}") from error
    scale = torch.maximum(expected.abs(), other.abs()).amax()
    noise = (nudged - expected).abs().amax()
    tolerance = RELATIVE_TOLERANCE * scale + NOISE_FACTOR * noise
    if output.shape != expected.shape or bool(((output - expected).abs() > tolerance).any()):
        raise Unobservable(
            "a copy of it doesn't compute the same, for example since it reads what the network "
            "keeps in a global variable"
        )


_WITHOUT_FLOAT64 = ("mps",)


def precise_device(model: nn.Module, inputs: Tensor) -> torch.device:
    """Return the device to use for a double-precision copy of a model.

    It is the device of the model, or of `inputs` if the model has no parameters or buffers. The
    CPU is used instead of Apple's GPU, which has no float64.

    Examples
    --------
    >>> precise_device(nn.Linear(2, 3), torch.zeros(1, 2))
    device(type='cpu')
    """
    device = next((t.device for t in iter_tensors(model)), inputs.device)
    return torch.device("cpu") if device.type in _WITHOUT_FLOAT64 else device


@through_wrappers
def cpu_copy(model: nn.Module) -> nn.Module:
    """Copy a model to the CPU in eval mode, without an intermediate copy on its own device.

    Examples
    --------
    >>> cpu_copy(nn.Linear(2, 3)).weight.device
    device(type='cpu')
    """
    refuse_unobservable(model)
    return _deep_copy(model, {id(t): _copy_to_cpu(t) for t in iter_tensors(model)}, _copy_to_cpu)


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    moved = tensor.detach().cpu().clone() if tensor.device.type == "cpu" else tensor.detach().cpu()
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


@through_wrappers
def shape_copy(model: nn.Module) -> nn.Module:
    """Copy a model to the ``meta`` device in eval mode, with floating-point tensors as float64.

    Examples
    --------
    >>> shape_copy(nn.Linear(2, 3)).weight.device, shape_copy(nn.Linear(2, 3)).weight.shape
    (device(type='meta'), torch.Size([3, 2]))
    """
    _refuse_uncopyable(model)
    copied = _deep_copy(model, {id(t): _copy_shape(t) for t in iter_tensors(model)}, _copy_shape)
    return computing_in(copied, FloatTypeMode(own_float_type(model), torch.float64))


def iter_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield a model's parameters and buffers."""
    yield from model.parameters()
    yield from model.buffers()


def _refuse_uncopyable(model: nn.Module) -> None:
    refuse_unobservable(model)
    # Conversion to a real dtype would drop imaginary parts.
    if any(t.is_complex() for t in iter_tensors(model)):
        raise Unobservable("the model has complex numbers, expected real ones")
    quantized = next((name for name, m in model.named_modules() if _is_quantized(m)), None)
    if quantized is not None:
        raise Unobservable(
            f"{quantized or 'the model'} has quantised weights, so the model can't be copied in "
            "another type; only measures of activations can be used; for others pass the module "
            "it was made from"
        )


def _is_quantized(module: nn.Module) -> bool:
    """Return True for a module of PyTorch with quantised weights or activations."""
    is_quantizing = type(module).__module__.startswith("torch.ao.nn.quantized")
    return is_quantizing or any(t.is_quantized for t in iter_tensors(module))


def _deep_copy(
    model: nn.Module, replaced: dict[int, Any], copy_tensor: Callable[[Tensor], Tensor]
) -> nn.Module:
    """Copy a model in eval mode.

    `replaced` maps the ids of tensors to existing copies. Attributes that can't be copied, such as
    locks and read-only mappings, are shared with the copy if they hold no tensors.
    """
    with _TensorCopies(copy_tensor):
        try:
            return rebound_copy(model, dict(replaced)).eval()
        except Exception as error:
            shared = _uncopyable_attributes(model, replaced)
            # An attribute can raise any exception.
            if shared:
                with contextlib.suppress(Exception):
                    return rebound_copy(model, replaced | shared).eval()
            reason = first_line(error)
            raise Unobservable(f"the model can't be copied: {reason}") from error


def rebound_copy(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a deep copy whose hooks and functions refer to the copy where they refer to the model.

    Python's copy of a function is the function itself, with its variables.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> _ = model[0].register_forward_hook(lambda *_: setattr(model, "is_run", True))
    >>> _ = rebound_copy(model)(torch.zeros(1, 2))
    >>> hasattr(model, "is_run")
    False
    """
    memo = {} if memo is None else memo
    copied = copy.deepcopy(model, memo)
    closures = _Closures(model, copied, memo)
    for module in copied.modules():
        for name, value in vars(module).items():
            if isinstance(value, dict):
                for key, item in value.items():
                    dict.__setitem__(value, key, closures.rebound(item))
            else:
                vars(module)[name] = closures.rebound(value)
    return copied


class _Closures:
    """Functions whose variables refer to a model, and the same with references to its copy."""

    def __init__(self, model: nn.Module, copied: nn.Module, memo: dict[int, Any]) -> None:
        self._memo = memo
        # Originals are kept with their copies, so that no other object gets their id.
        self._copies: dict[int, tuple[Any, Any]] = {}
        for parts in (nn.Module.modules, iter_tensors):
            originals: list[Any] = list(parts(model))
            twins: list[Any] = list(parts(copied))
            if len(originals) == len(twins):
                self._copies |= {id(a): (a, b) for a, b in zip(originals, twins, strict=True)}

    def rebound(self, value: Any) -> Any:
        """Return a value that refers to the copy. The same value if it doesn't refer to either."""
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        if isinstance(value, MethodType):
            function = self.rebound(value.__func__)
            is_same = function is value.__func__
            return value if is_same else MethodType(function, value.__self__)
        if type(value) in (list, tuple):
            items = [self.rebound(item) for item in value]
            return value if all(map(is_, items, value)) else type(value)(items)
        if isinstance(value, weakref.ref) and (target := self._copies.get(id(value()))):
            return weakref.ref(target[1])
        if not isinstance(value, FunctionType):
            return value
        self._copies[id(value)] = value, value  # It may refer to itself.
        cells = tuple(map(self._rebound_cell, value.__closure__ or ()))
        names = value.__globals__.keys() & set(value.__code__.co_names)
        used = {name: value.__globals__[name] for name in names}
        changed = {
            name: self._copies[id(item)][1]
            for name, item in used.items()
            if isinstance(item, nn.Module | Tensor) and id(item) in self._copies
        }
        if changed or any(map(is_not, cells, value.__closure__ or ())):
            variables = {**value.__globals__, **changed} if changed else value.__globals__
            function = FunctionType(
                value.__code__, variables, value.__name__, value.__defaults__, cells
            )
            function.__kwdefaults__ = value.__kwdefaults__
            function.__dict__.update(vars(value))
            self._copies[id(value)] = value, function
        return self._copies[id(value)][1]

    def _rebound_cell(self, cell: CellType) -> CellType:
        try:
            content = cell.cell_contents
        except ValueError:  # The cell is empty.
            return cell
        new = self.rebound(content)
        if new is content and (id(content) in self._memo or self._is_owner(content)):
            new = copy.deepcopy(content, self._memo)
        return cell if new is content else CellType(new)

    def _is_owner(self, value: Any) -> bool:
        """Return True for an object one of whose attributes is the model or a part of it."""
        attributes = getattr(value, "__dict__", None)
        if isinstance(value, nn.Module | ModuleType | type) or not isinstance(attributes, dict):
            return False
        return any(id(leaf) in self._copies for leaf in tree_leaves(attributes))


def _uncopyable_attributes(model: nn.Module, replaced: Mapping[int, Any]) -> dict[int, Any]:
    """Return the attributes that can't be copied and hold no tensors, by their ids."""
    shared = {}
    for module in model.modules():
        for value in vars(module).values():
            if id(value) in shared or _holds_tensors(value):
                continue
            try:
                copy.deepcopy(value, dict(replaced))
            except Exception:
                shared[id(value)] = value
    return shared


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, list | tuple | set | frozenset | deque):
        return any(map(_holds_tensors, value))
    return isinstance(value, Tensor | nn.Module)


class _TensorCopies(TorchFunctionMode):
    """Function mode that deep-copies tensors with a given function.

    This includes tensors with a gradient graph, which PyTorch refuses to copy. PyTorch's older
    `weight_norm` stores the weight as one, and computes it again before each forward pass.
    """

    def __init__(self, copy_tensor: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._copy_tensor = copy_tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.clone and args[0].layout != torch.strided:
            # PyTorch can't clone the data of a sparse parameter as it does for others.
            return self._copy_tensor(args[0])
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = self._copy_tensor(tensor)
        return memo[id(tensor)]


def _copy_shape(tensor: Tensor) -> Tensor:
    """Return an empty copy of a tensor on the ``meta`` device, float64 if it is floating-point."""
    dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
    empty = torch.empty_like(tensor, dtype=dtype, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=False)
    return empty
