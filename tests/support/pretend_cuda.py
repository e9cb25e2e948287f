"""A simulated CUDA device: its tensors report ``cuda:0`` and are computed on the CPU.

They raise the errors of GPU tensors, for example when mixed with CPU tensors or converted to
NumPy, and count kernels and synchronisations. Code that reproduces the CPU's results here has no
tensor on the wrong device, and a test can limit the synchronisations of a pass. Streams,
allocators and rounding are not simulated. The patches apply to the whole process, so nothing else
should use PyTorch meanwhile.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from nlbench.subjects import inputs as model_inputs

__all__ = ["DEVICE", "DefaultGenerator", "PretendCuda", "PretendTensor", "current"]

# Device of all simulated tensors from PyTorch's view.
DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")

# Views and allocations, which run no kernel.
NO_KERNEL = frozenset([
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "diagonal", "empty",
    "empty_like", "empty_strided", "expand", "lift_fresh", "narrow", "new_empty",
    "new_empty_strided", "permute", "reshape", "select", "slice", "split", "split_with_sizes",
    "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view", "view_as_real",
])  # fmt: skip

# Operations that synchronise with the host for their result or its size.
WAITS = frozenset([
    "_linalg_check_errors", "_linalg_eigh", "_linalg_svd", "_local_scalar_dense", "_unique2",
    "allclose", "bincount", "equal", "is_nonzero", "item", "linalg_eigh", "linalg_lstsq",
    "linalg_svd", "masked_select", "nonzero", "repeat_interleave", "unique", "unique_consecutive",
    "unique_dim",
])  # fmt: skip

# In-place changes of shape.
RESHAPES = frozenset([
    "as_strided_", "resize_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_",
    "unsqueeze_",
])  # fmt: skip

INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})


class PretendTensor(torch.Tensor):
    """A tensor on the simulated device, with its values in `cpu_tensor`."""

    cpu_tensor: Tensor

    @staticmethod
    def __new__(cls: type[PretendTensor], cpu_tensor: Tensor) -> PretendTensor:
        if cpu_tensor.dtype in (torch.float64, torch.complex128) and not current().has_double:
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype: the MPS framework has no float64"
            )
        # Views of a wrapper can't be inference tensors.
        with torch.inference_mode(False):
            wrapper: PretendTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                cpu_tensor.shape,
                strides=cpu_tensor.stride(),
                storage_offset=cpu_tensor.storage_offset(),
                dtype=cpu_tensor.dtype,
                device=DEVICE,
                requires_grad=False,
            )
        wrapper.cpu_tensor = cpu_tensor
        return wrapper

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The simulated device."""
        return current().device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """True on a simulated NVIDIA GPU."""
        return self.device.type == "cuda"

    @property
    def is_mps(self) -> bool:  # type: ignore[override]
        """True on a simulated Apple GPU."""
        return self.device.type == "mps"

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PretendTensor({self.cpu_tensor!r})"

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Raise the error of a GPU tensor."""
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy "
            "the tensor to host memory first."
        )

    __array__ = numpy

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, list):
            # PyTorch copies the index to the device, which synchronises.
            index = torch.tensor(index).to(self.device)
        picked: Tensor = super().__getitem__(index)
        return picked

    def new_tensor(  # type: ignore[override]
        self, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False
    ) -> Tensor:
        """Create a tensor on the device."""
        tensor = torch.tensor(data, dtype=dtype or self.dtype).to(device or self.device)
        return tensor.requires_grad_(requires_grad)

    def tolist(self) -> Any:
        """Synchronise, and return the values."""
        current().count_wait("tolist")
        return self.cpu_tensor.tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the CPU tensor, which views share."""
        return self.cpu_tensor.untyped_storage()

    def data_ptr(self) -> int:
        """Return the address of the storage."""
        return self.cpu_tensor.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with torch.no_grad():
            copied: Tensor = PretendTensor(self.cpu_tensor.detach().clone())
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})


class _Generator(torch.Generator):
    """A CPU generator, since PyTorch can't create one for an absent device."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        is_pretended = torch.device(device).type in ("cuda", current().device.type)
        return super().__new__(cls, "cpu" if is_pretended else device)  # type: ignore[call-arg]


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Handles operations without a tensor on the device, such as ``torch.zeros``."""


def _torch_dispatch(
    self: _Mode, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    return _dispatch(func, args, kwargs or {})


# Defining it in the class would import PyTorch's compiler, which takes seconds.
_Mode.__torch_dispatch__ = _torch_dispatch  # type: ignore[method-assign, assignment]


_RUNNING: list[PretendCuda] = []


def current() -> PretendCuda:
    """Return the active device."""
    return _RUNNING[-1] if _RUNNING else PretendCuda()


class PretendCuda(contextlib.ExitStack):
    """A context with a simulated CUDA device.

    Attributes
    ----------
    device : torch.device
    has_double : bool
        True if it supports double precision.
    kernels : Counter
        Number of kernels by operation.
    waits : Counter
        Number of synchronisations by operation.
    places : Counter
        Number of synchronisations by line of code and operation.

    Examples
    --------
    >>> with PretendCuda() as device:
    ...     total = torch.arange(4.0).to("cuda").sum()
    ...     total.is_cuda, float(total), dict(device.kernels)
    (True, 6.0, {'sum': 1, '_local_scalar_dense': 1})
    >>> sorted(device.waits)
    ['_local_scalar_dense', 'from the CPU']
    """

    device = torch.device("cuda", 0)
    has_double = True

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.places: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> PretendCuda:
        super().__enter__()
        try:
            self._begin()
        except BaseException:
            self.close()  # Other tests must not run on this device.
            raise
        return self

    def _begin(self) -> None:
        _RUNNING.append(self)
        self.callback(_RUNNING.remove, self)
        torch._C._ensureCUDADeviceGuardSet()
        # A wrapper can't replace a plain tensor in place: `Module.to` makes new parameters.
        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        self.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
        self.enter_context(mock.patch.object(torch.cuda, "_lazy_init"))
        for owner, functions in self.stand_ins():
            for name, stand_in in functions.items():
                self.enter_context(mock.patch.object(owner, name, stand_in))
        self.enter_context(mock.patch.object(torch, "tensor", _make_then_move(torch.tensor)))
        as_tensor = _make_then_move(torch.as_tensor)
        self.enter_context(mock.patch.object(torch, "as_tensor", as_tensor))
        self.enter_context(mock.patch.object(torch, "Generator", _Generator))
        backward = _backward(torch.autograd.backward)
        self.enter_context(mock.patch.object(torch.autograd, "backward", backward))
        grad = _grad(torch.autograd.grad)
        self.enter_context(mock.patch.object(torch.autograd, "grad", grad))
        self.enter_context(mock.patch.object(threading.Thread, "run", _in_mode(_RUN)))
        # nlbench refuses wrapper tensors as inputs.
        dense = _accept_wrappers(model_inputs.dense)
        self.enter_context(mock.patch.object(model_inputs, "dense", dense))
        # cuDNN's operations don't exist on a CPU.
        self.callback(torch._C._set_cudnn_enabled, torch._C._get_cudnn_enabled())
        torch._C._set_cudnn_enabled(False)
        self.enter_context(self.modes())

    def modes(self) -> contextlib.AbstractContextManager[Any]:
        """Return the modes that handle PyTorch's operations in a thread."""
        return _Mode()  # type: ignore[no-untyped-call]

    def stand_ins(self) -> Sequence[tuple[Any, dict[str, Any]]]:
        """Return replacements for functions of PyTorch's modules that access the device."""
        return [(torch.cuda, _cuda_functions())]

    def reset(self) -> None:
        """Reset the counters."""
        self.kernels.clear()
        self.waits.clear()
        self.places.clear()

    def count_wait(self, what: str) -> None:
        """Count a synchronisation."""
        self.waits[what] += 1
        self.places[_place(), what] += 1

    def count_kernel(self, name: str) -> None:
        """Count a kernel."""
        if name.rstrip("_") not in NO_KERNEL:
            self.kernels[name] += 1


_RUN = threading.Thread.run


def _accept_wrappers(dense: Callable[[str, Tensor], Tensor]) -> Callable[[str, Tensor], Tensor]:
    def accept(label: str, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, PretendTensor) else dense(label, tensor)

    return accept


def _in_mode(run: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    def inside(self: threading.Thread) -> None:
        # Modes are per thread.
        with current().modes():
            run(self)

    return inside


def _place() -> str:
    """Return the innermost line of code outside PyTorch."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_back is not None:
        name = frame.f_code.co_filename
        if name != __file__ and not Path(name).is_relative_to(_PYTORCH):
            return f"{'/'.join(Path(name).parts[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


_PYTORCH = Path(torch.__file__).parent


def _make_then_move(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def make_on_device(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        device = torch.device(device) if device is not None else None
        if device is None or device.type not in ("cuda", current().device.type):
            return make(data, *args, device=device, **kwargs)
        if isinstance(data, torch.Tensor):
            return data.to(device, *args, **kwargs)
        return make(data, *args, **kwargs).to(device)

    return make_on_device


def _backward(real: Callable[..., None]) -> Callable[..., None]:
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        root, first = _unwrap(tensors), _unwrap(grad_tensors)
        if not isinstance(root, PretendTensor):
            real(tensors, grad_tensors, *args, **kwargs)
            return
        with torch.no_grad():
            for node, gradients in _gradients(root, first):
                if hasattr(node, "variable"):
                    leaf, gradient = node.variable, gradients[0]
                    leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient

    return backward


def _grad(real: Callable[..., Any]) -> Callable[..., Any]:
    def grad(
        outputs: Any,
        inputs: Any,
        grad_outputs: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        **kwargs: Any,
    ) -> Any:
        root, first = _unwrap(outputs), _unwrap(grad_outputs)
        if not isinstance(root, PretendTensor):
            return real(outputs, inputs, grad_outputs, retain_graph, create_graph, **kwargs)
        targets = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        results: list[Tensor | None] = [None] * len(targets)
        with torch.set_grad_enabled(create_graph):
            for node, gradients in _gradients(root, first, targets):
                for i, target in enumerate(targets):
                    if _produces(node, target):
                        results[i] = gradients.get(target.output_nr)
        return tuple(results)

    return grad


def _unwrap(content: Any) -> Any:
    return content[0] if isinstance(content, Sequence) and len(content) == 1 else content


def _produces(node: Any, tensor: Tensor) -> bool:
    """Return True if a node of the graph produces a tensor."""
    return node is tensor.grad_fn if tensor.grad_fn else getattr(node, "variable", 0) is tensor


def _gradients(
    root: Tensor, first: Tensor | None, targets: Sequence[Tensor] | None = None
) -> Iterator[tuple[Any, dict[int, Tensor]]]:
    """Run the backward pass node by node in this thread; PyTorch would use a thread per GPU.

    Nodes that don't lead to a target are skipped.
    """
    first = torch.ones_like(root) if first is None else first
    pending: dict[Any, dict[int, Tensor]] = {root.grad_fn: {root.output_nr: first}}
    order = _topological_order(root.grad_fn)
    relevant: set[Any] = set()
    for node in reversed(order):
        is_target = targets is None or any(_produces(node, target) for target in targets)
        if is_target or any(before in relevant for before, _ in node.next_functions):
            relevant.add(node)
    for node in order:
        gradients = pending.pop(node, {})
        yield node, gradients
        if not gradients or not any(before in relevant for before, _ in node.next_functions):
            continue
        outputs = node(*(gradients.get(i) for i in range(len(node._input_metadata))))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        for (before, number), gradient in zip(node.next_functions, outputs, strict=True):
            if before is None or gradient is None:
                continue
            shape = before._input_metadata[number].shape
            # The gradient of a broadcast tensor is a sum.
            gradient = gradient if gradient.shape == shape else gradient.sum_to_size(shape)
            sums = pending.setdefault(before, {})
            sums[number] = gradient + sums[number] if number in sums else gradient


def _topological_order(end: Any) -> list[Any]:
    """Sort the nodes of the backward graph topologically."""
    order: list[Any] = []
    seen = {end}
    path = [(end, iter(end.next_functions))]
    while path:
        node, rest = path[-1]
        for before, _ in rest:
            if before is not None and before not in seen:
                seen.add(before)
                path.append((before, iter(before.next_functions)))
                break
        else:
            order.append(node)
            path.pop()
    return order[::-1]


class _Stream:
    device = PretendCuda.device

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def synchronize(self) -> None:
        current().count_wait("stream.synchronize")

    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        current().count_wait("event.synchronize")

    def elapsed_time(self, end: Any) -> float:
        return 0.0


class DefaultGenerator:
    """The default generator of a simulated device."""

    # PyTorch can create generators only for the CPU.
    device = CPU

    def __init__(self) -> None:
        self._generator = torch.default_generator.clone_state()

    def get_state(self) -> Tensor:
        """Return the generator's state."""
        return self._generator.get_state()

    def set_state(self, state: Tensor) -> None:
        """Set the generator's state."""
        self._generator.set_state(state)

    def manual_seed(self, seed: int) -> None:
        """Seed the generator."""
        self._generator.manual_seed(seed)


def _cuda_functions() -> dict[str, Any]:
    generator = DefaultGenerator()
    properties = SimpleNamespace(
        name="Pretended GPU", major=9, minor=0, total_memory=24 * 2**30, multi_processor_count=1
    )
    return {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: current().count_wait("synchronize"),
        "current_stream": lambda device=None: _Stream(),
        "default_stream": lambda device=None: _Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "Stream": _Stream,
        "Event": _Event,
        "mem_get_info": lambda device=None: (20 * 2**30, 24 * 2**30),
        "memory_reserved": lambda device=None: 0,
        "set_per_process_memory_fraction": lambda fraction, device=None: None,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "set_rng_state": lambda state, device="cuda": generator.set_state(state),
        "manual_seed": lambda seed: generator.manual_seed(seed),
        "manual_seed_all": lambda seed: generator.manual_seed(seed),
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "default_generators": (generator,),
    }


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the values of its tensors; raise the errors of a GPU."""
    cuda = current()
    name = func._schema.name.partition("::")[2]
    tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
    simulated = [x for x in tensors if isinstance(x, PretendTensor)]
    target = kwargs.get("device")
    target = torch.device(target) if target is not None else None
    if name == "to":
        # Inference mode doesn't decompose `Tensor.to`.
        others = [x for x in args[1:] if isinstance(x, torch.Tensor)]
        devices = [x for x in args[1:] if isinstance(x, torch.device)]
        target = (devices + [x.device for x in others] + [target])[0]
        args = tuple(CPU if isinstance(x, torch.device) else x for x in args)
        args = (args[0], *(x.cpu_tensor if isinstance(x, PretendTensor) else x for x in args[1:]))
    if name == "_pin_memory":
        return tensors[0].clone()
    if name in ("_to_copy", "to"):
        return _copy(func, tensors[0], target, args, kwargs)
    if name in ("copy_", "_copy_from", "set_"):
        return _overwrite(func, tensors, args, kwargs)
    if not simulated and (target is None or target.type != "cuda"):
        return func(*args, **kwargs)
    if simulated and target is None:
        _check_devices(name, tensors)
    is_mask = name in INDEXING and any(
        isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
        for index in args[1] or ()
    )
    if name in WAITS or is_mask:
        cuda.count_wait(f"{name}[mask]" if is_mask else name)
    cuda.count_kernel(name)
    kwargs = dict(kwargs)
    kwargs.pop("pin_memory", None)
    # Selects among a GPU's routines; a CPU has one.
    kwargs.pop("driver", None)
    if target is not None:
        kwargs["device"] = CPU if target.type == "cuda" else target
    inner, named = tree_map_only(PretendTensor, lambda x: x.cpu_tensor, (args, kwargs))
    output = CELLS.get(name, func)(*inner, **named)
    if name == "_efficientzerotensor":
        # A zero derivative of forward mode, which has no memory.
        output = torch.zeros_like(output)
    if name == "_local_scalar_dense" or (target is not None and target.type != "cuda"):
        return output
    known = {id(x.cpu_tensor): x for x in simulated}
    if name in RESHAPES:
        # The wrapper has its own shape.
        simulated[0].data = PretendTensor(simulated[0].cpu_tensor)
    return tree_map_only(
        torch.Tensor, lambda x: known[id(x)] if id(x) in known else PretendTensor(x), output
    )


def _lstm_cell(
    inputs: Tensor, hidden: Tensor, cell: Tensor, *biases: Tensor | None
) -> tuple[Tensor, ...]:
    gates = sum((b for b in biases if b is not None), inputs + hidden)
    enter, keep, new, leave = gates.chunk(4, 1)
    cell = keep.sigmoid() * cell + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * cell.tanh(), cell, torch.empty_like(gates)


def _gru_cell(
    inputs: Tensor,
    hidden: Tensor,
    state: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, ...]:
    inputs = inputs if input_bias is None else inputs + input_bias
    hidden = hidden if hidden_bias is None else hidden + hidden_bias
    (reset, update, new), (own_reset, own_update, own_new) = inputs.chunk(3, 1), hidden.chunk(3, 1)
    new = (new + (reset + own_reset).sigmoid() * own_new).tanh()
    state = new + (update + own_update).sigmoid() * (state - new)
    return state, state.new_empty(len(state), 5 * state.shape[1])


# Kernels that a CPU lacks; their outputs for the backward pass are empty.
CELLS: dict[str, Callable[..., Any]] = {
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_gru_cell": _gru_cell,
}


def _check_devices(name: str, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        is_scalar = tensor.ndim == 0 and name != "index_select"
        if tensor.device.type != "cpu" or is_scalar:
            continue
        if name in INDEXING:
            # PyTorch copies such an index, and synchronises.
            current().count_wait(f"{name}[index on the CPU]")
            continue
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{current().device} and {tensor.device}! ({name})"
        )


def _copy(
    func: Any,
    source: Tensor,
    target: torch.device | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    target = target or source.device
    cpu_tensor = source.cpu_tensor if isinstance(source, PretendTensor) else source
    if target.type == "meta":
        return func(cpu_tensor, *args[1:], **kwargs)
    named = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
    if func._schema.name.endswith("_to_copy") or "device" in kwargs:
        named["device"] = CPU
    output = func(cpu_tensor, *args[1:], **named)
    if target.type == current().device.type:
        target = DEVICE
    if target.type != "cuda":
        if isinstance(source, PretendTensor) and not kwargs.get("non_blocking"):
            current().count_wait("to the CPU")
        return output
    if isinstance(source, PretendTensor):
        current().count_kernel("_to_copy")
    elif not kwargs.get("non_blocking"):
        current().count_wait("from the CPU")
    return PretendTensor(output)


def _overwrite(
    func: Any, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    target, *rest = tensors
    if rest and isinstance(target, PretendTensor) != isinstance(rest[0], PretendTensor):
        current().count_wait("copy_")
    else:
        current().count_kernel("copy_")
    inner, named = tree_map_only(PretendTensor, lambda x: x.cpu_tensor, (args, kwargs))
    func(*inner, **named)
    return target
