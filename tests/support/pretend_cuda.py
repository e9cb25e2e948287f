"""A pretended CUDA device: tensors that say ``cuda:0``, computed on the CPU.

They refuse what a GPU refuses (to be mixed with tensors of the CPU, to become NumPy arrays) and
count what costs time there: kernels, and operations that block until the device has finished.
So whatever runs here and gives the CPU's numbers has no tensor on the wrong device, and a test
can hold a pass to a budget of synchronisations. Streams, allocators and rounding are not
pretended; only a GPU shows those.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map, tree_map_only

__all__ = ["PretendCuda", "PretendTensor"]

DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")

# Operations that only look at a tensor in another way, or allocate: no kernel runs.
NO_KERNEL = frozenset(
    [
        "_reshape_alias",
        "_unsafe_view",
        "alias",
        "as_strided",
        "detach",
        "diagonal",
        "empty",
        "empty_like",
        "empty_strided",
        "expand",
        "lift_fresh",
        "narrow",
        "new_empty",
        "new_empty_strided",
        "permute",
        "reshape",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unfold",
        "unsqueeze",
        "view",
        "view_as_real",
    ]
)

# Operations whose result, or its size, the host has to wait for.
WAITS = frozenset(
    [
        "_linalg_check_errors",
        "_linalg_eigh",
        "_linalg_svd",
        "_local_scalar_dense",
        "_unique2",
        "allclose",
        "bincount",
        "equal",
        "is_nonzero",
        "item",
        "linalg_eigh",
        "linalg_lstsq",
        "linalg_svd",
        "masked_select",
        "nonzero",
        "repeat_interleave",
        "unique",
        "unique_consecutive",
        "unique_dim",
    ]
)

INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})


class PretendTensor(torch.Tensor):
    """A tensor of the pretended device; `held` has its numbers."""

    @staticmethod
    def __new__(cls, held):
        # Views of an inference tensor can't be taken of a wrapper.
        with torch.inference_mode(False):
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                held.shape,
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device=DEVICE,
                requires_grad=False,
            )
        made.held = held
        return made

    def __repr__(self):
        return f"PretendTensor({self.held!r})"

    def numpy(self, *args, **kwargs):
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the "
            "tensor to host memory first."
        )

    __array__ = numpy

    def __getitem__(self, index):
        if isinstance(index, list):
            # PyTorch makes the index a tensor of the device, which waits.
            index = torch.tensor(index).to(DEVICE)
        return super().__getitem__(index)

    def new_tensor(self, data, *, dtype=None, device=None, requires_grad=False):
        made = torch.tensor(data, dtype=dtype or self.dtype).to(device or DEVICE)
        return made.requires_grad_(requires_grad)

    def tolist(self):
        _current().waited("tolist")
        return self.held.tolist()

    def untyped_storage(self):
        return self.held.untyped_storage()

    def data_ptr(self):
        return self.held.data_ptr()

    def __deepcopy__(self, memo):
        with torch.no_grad():
            copied = PretendTensor(self.held.detach().clone())
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _dispatch(func, args, kwargs or {})


def _generator(device="cpu"):
    # PyTorch can't make one of a device that isn't there, nor tell whose it is.
    return _GENERATOR("cpu" if torch.device(device).type == "cuda" else device)


_GENERATOR = torch.Generator


class _Mode(TorchDispatchMode):
    """Sees what is asked for on the device without a tensor of it, such as ``torch.zeros``."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _dispatch(func, args, kwargs or {})


_RUNNING: list[PretendCuda] = []


def _current():
    return _RUNNING[-1] if _RUNNING else PretendCuda()


class PretendCuda(contextlib.ExitStack):
    """While it is entered there is a CUDA device.

    Attributes
    ----------
    kernels : Counter
        How often each operation ran on it.
    waits : Counter
        How often the host waited for it, by operation.
    places : Counter
        The same by line of nlbench that made it wait.
    """

    def __init__(self):
        super().__init__()
        self.kernels, self.waits, self.places = Counter(), Counter(), Counter()

    def __enter__(self):
        super().__enter__()
        _RUNNING.append(self)
        self.callback(_RUNNING.remove, self)
        torch._C._ensureCUDADeviceGuardSet()
        # A wrapper can't take a plain tensor's place; `Module.to` makes parameters anew.
        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        self.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
        for name, stand_in in _cuda_functions().items():
            self.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        self.enter_context(mock.patch.object(torch, "tensor", _made_then_moved(torch.tensor)))
        as_tensor = _made_then_moved(torch.as_tensor)
        self.enter_context(mock.patch.object(torch, "as_tensor", as_tensor))
        self.enter_context(mock.patch.object(torch, "Generator", _generator))
        self.enter_context(mock.patch.object(threading.Thread, "run", _in_mode(_RUN)))
        # Its kernels are operations of their own, which a CPU doesn't have.
        self.enter_context(torch.backends.cudnn.flags(enabled=False))
        self.enter_context(_Mode())
        return self

    def reset(self):
        """Count from here."""
        for counter in (self.kernels, self.waits, self.places):
            counter.clear()

    def waited(self, what):
        self.waits[what] += 1
        self.places[_place(), what] += 1

    def ran(self, name):
        if name.rstrip("_") not in NO_KERNEL:
            self.kernels[name] += 1


_RUN = threading.Thread.run


def _in_mode(run):
    def inside(self):
        # Modes belong to a thread.
        with _Mode():
            run(self)

    return inside


def _place():
    """The line of nlbench that is at work."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "nlbench/" in name and "/site-packages/" not in name and "/tests/" not in name:
            return f"{name.rpartition('nlbench/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def _made_then_moved(make):
    def made(data, *args, device=None, **kwargs):
        device = torch.device(device) if device is not None else None
        if device is None or device.type != "cuda":
            return make(data, *args, device=device, **kwargs)
        if isinstance(data, torch.Tensor):
            return data.to(device, *args, **kwargs)
        return make(data, *args, **kwargs).to(device)

    return made


def _cuda_functions():
    class Stream:
        device = DEVICE

        def __init__(self, *args, **kwargs):
            pass

        def synchronize(self):
            _current().waited("stream.synchronize")

        def wait_stream(self, other):
            pass

        def wait_event(self, event):
            pass

        def record_event(self, event=None):
            return event or Event()

    class Event:
        def __init__(self, *args, **kwargs):
            pass

        def record(self, stream=None):
            pass

        def wait(self, stream=None):
            pass

        def query(self):
            return True

        def synchronize(self):
            _current().waited("event.synchronize")

        def elapsed_time(self, end):
            return 0.0

    class Generator:
        # Where PyTorch can make another one like it.
        device = CPU

        def __init__(self):
            self._generator = torch.Generator()

        def get_state(self):
            return self._generator.get_state()

        def set_state(self, state):
            self._generator.set_state(state)

        def manual_seed(self, seed):
            self._generator.manual_seed(seed)

    generator = Generator()
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
        "synchronize": lambda device=None: _current().waited("synchronize"),
        "current_stream": lambda device=None: Stream(),
        "default_stream": lambda device=None: Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "Stream": Stream,
        "Event": Event,
        "mem_get_info": lambda device=None: (20 * 2**30, 24 * 2**30),
        "memory_reserved": lambda device=None: 0,
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


def _dispatch(func, args, kwargs):
    """Run an operation on what its tensors hold; refuse what a GPU refuses."""
    cuda = _current()
    name = func._schema.name.partition("::")[2]
    tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
    here = [x for x in tensors if isinstance(x, PretendTensor)]
    wanted = kwargs.get("device")
    wanted = torch.device(wanted) if wanted is not None else None
    if name == "to":
        # In inference mode `Tensor.to` comes as it is.
        others = [x for x in args[1:] if isinstance(x, torch.Tensor)]
        devices = [x for x in args[1:] if isinstance(x, torch.device)]
        wanted = (devices + [x.device for x in others] + [wanted])[0]
        args = tuple(CPU if isinstance(x, torch.device) else x for x in args)
        args = (args[0], *(x.held if isinstance(x, PretendTensor) else x for x in args[1:]))
    if name in ("_to_copy", "_pin_memory", "to"):
        return _copied(func, tensors[0], wanted, args, kwargs)
    if name in ("copy_", "_copy_from", "set_"):
        return _overwritten(func, tensors, args, kwargs)
    if not here and (wanted is None or wanted.type != "cuda"):
        return func(*args, **kwargs)
    if here and wanted is None:
        _check_mixture(name, tensors)
    is_mask = name in INDEXING and any(
        isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
        for index in args[1] or ()
    )
    if name in WAITS or is_mask:
        cuda.waited(f"{name}[mask]" if is_mask else name)
    cuda.ran(name)
    kwargs = dict(kwargs)
    kwargs.pop("pin_memory", None)
    if wanted is not None:
        kwargs["device"] = CPU if wanted.type == "cuda" else wanted
    inner, named = tree_map_only(PretendTensor, lambda x: x.held, (args, kwargs))
    output = func(*inner, **named)
    if name == "_efficientzerotensor":
        # Forward mode's stand-in for a derivative that is zero: it has no memory.
        output = torch.zeros_like(output)
    if name == "_local_scalar_dense" or (wanted is not None and wanted.type != "cuda"):
        return output
    known = {id(x.held): x for x in here}
    return tree_map_only(
        torch.Tensor, lambda x: known[id(x)] if id(x) in known else PretendTensor(x), output
    )


def _check_mixture(name, tensors):
    for tensor in tensors:
        is_number = tensor.ndim == 0 and name != "index_select"
        if tensor.device.type != "cpu" or is_number:
            continue
        if name in INDEXING:
            # PyTorch copies such an index, and waits for it.
            _current().waited(f"{name}[index of the CPU]")
            continue
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"cuda:0 and {tensor.device}! ({name})"
        )


def _copied(func, source, wanted, args, kwargs):
    target = wanted or source.device
    held = source.held if isinstance(source, PretendTensor) else source
    if target.type == "meta":
        return func(held, *args[1:], **kwargs)
    named = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
    if func._schema.name.endswith("_to_copy") or "device" in kwargs:
        named["device"] = CPU
    output = func(held, *args[1:], **named)
    if target.type != "cuda":
        if isinstance(source, PretendTensor) and not kwargs.get("non_blocking"):
            _current().waited("to the CPU")
        return output
    if isinstance(source, PretendTensor):
        _current().ran("_to_copy")
    elif not kwargs.get("non_blocking"):
        _current().waited("from the CPU")
    return PretendTensor(output)


def _overwritten(func, tensors, args, kwargs):
    target, *rest = tensors
    if rest and isinstance(target, PretendTensor) != isinstance(rest[0], PretendTensor):
        _current().waited("copy_")
    else:
        _current().ran("copy_")
    inner, named = tree_map(lambda x: x.held if isinstance(x, PretendTensor) else x, (args, kwargs))
    func(*inner, **named)
    return target
