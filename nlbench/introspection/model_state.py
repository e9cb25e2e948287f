"""Forward passes that leave a model unchanged, and checks that they do."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from nlbench.errors import RequestError, Undefined, Unobservable

from .threads import one_measurement, torch_threads


class _Snapshot:
    """State of a module before a pass used it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.training = module.training
        self.buffers = [
            (name, buffer, buffer.clone())
            for name, buffer in module._buffers.items()
            if buffer is not None and not is_lazy(buffer)
        ]
        self.attributes = _attributes(module)
        self.tensors = [
            (value, value.clone())
            for value, _ in self.attributes.values()
            if isinstance(value, Tensor) and value.grad_fn is None and not value.is_inference()
        ]
        self.registered = _registered_names(module)

    def restore(self) -> list[tuple[Tensor, Tensor]]:
        """Restore the module. Return pairs of a tensor and the values to copy back into it."""
        module = self.module
        # A module that creates its layers during its first pass has changed permanently.
        if _registered_names(module) == self.registered:
            _restore_attributes(module, self.attributes)
        module.training = self.training
        restorable = [(tensor, before) for tensor, before in self.tensors if _fits(tensor, before)]
        current = dict(module._buffers.items())
        for name, buffer, before in self.buffers:
            now = current.get(name)
            if now is None or not _fits(now, before):
                continue
            # A model that was moved to another device keeps its new buffers.
            if now.device == buffer.device:
                module._buffers[name] = buffer
            if _fits(buffer, before):
                restorable.append((buffer, before))
        return restorable


def _registered_names(module: nn.Module) -> list[str]:
    """Return the names of a module's class, tensors and children, without lazy tensors."""
    tensors = (*module._parameters.items(), *module._buffers.items())
    names = [name for name, tensor in tensors if tensor is not None and not is_lazy(tensor)]
    # Keys only: the table of a scripted module can't be iterated.
    return [type(module).__name__, *names, *module._modules.keys()]


class _OuterState:
    """Class attributes of a model's modules, and the variables of closures in their methods."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        kinds = dict.fromkeys(kind for module in modules for kind in type(module).__mro__)
        self.classes = [(k, _class_values(k)) for k in kinds if not _is_library(k.__module__)]
        members = [v for kind, _ in self.classes for v in vars(kind).values()]
        members += [v for module in modules for k, v in vars(module).items() if k not in _TABLES]
        self.cells: dict[int, tuple[CellType, Any]] = {}
        for member in members:
            self._add_cells(member)

    def _add_cells(self, member: Any) -> None:
        function = getattr(member, "__func__", member)
        if not isinstance(function, FunctionType) or _is_library(function.__module__):
            return
        for cell in function.__closure__ or ():
            if id(cell) not in self.cells:
                with suppress(ValueError):  # The cell is empty.
                    self.cells[id(cell)] = cell, cell.cell_contents
                    self._add_cells(cell.cell_contents)

    def restore(self) -> None:
        for kind, before in self.classes:
            current = _class_values(kind)
            for name in current.keys() - before.keys():
                delattr(kind, name)
            for name, value in before.items():
                if current.get(name, _UNSET) is not value:
                    setattr(kind, name, value)
        for cell, value in self.cells.values():
            cell.cell_contents = value


_UNSET = object()


def _class_values(kind: type) -> dict[str, Any]:
    """Return the attributes of a class, except for its methods and those that Python sets."""
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith("__") and not isinstance(value, FunctionType)
    }


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in ("builtins", "torch", "nlbench")


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode without gradients, and restore every module on exit.

    Buffers and tensor attributes that the forward pass modifies, such as a call counter, and plain
    attributes that it sets are restored, also those of classes, and variables of closures in
    methods. Parameters are not; see `changed_parameters`. A buffer replaced by one with a different
    shape is assumed to be a growing cache and kept, as are items added to a list or dictionary.
    Passes in other threads wait. A caller's
    `torch.inference_mode`, in which nothing has a derivative, is suspended.
    """
    with one_measurement():
        snapshots = [_Snapshot(module) for module in model.modules()]
        outer = _OuterState(model)
        try:
            try:
                model.eval()
            except NotImplementedError as error:
                # An exported program stays in the mode in which it was exported.
                raise RequestError(
                    f"the model ({type(model).__name__}) can't be put into evaluation mode: "
                    f"{error}; pass the module it was made from"
                ) from error
            with torch.inference_mode(False), torch.no_grad():
                yield
        finally:
            with torch.no_grad():
                _refill([pair for snapshot in snapshots for pair in snapshot.restore()])
            outer.restore()


def _fits(buffer: Tensor, before: Tensor) -> bool:
    same = buffer.shape == before.shape and buffer.dtype == before.dtype
    return same and not buffer.is_meta


def _refill(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy previous values back into the buffers that changed.

    Unchanged buffers are not written to, since a caller may take derivatives through them. Each
    GPU is synchronised once, not once per buffer.
    """
    by_device = defaultdict(list)
    for buffer, before in pairs:
        if buffer.layout == torch.strided:
            by_device[buffer.device].append((buffer, before))
        else:
            # PyTorch can't compare sparse tensors.
            buffer.copy_(before)
    for buffers in by_device.values():
        differ = torch.stack([(buffer != before).any() for buffer, before in buffers])
        for (buffer, before), differs in zip(buffers, differ.tolist(), strict=True):
            if differs:
                buffer.copy_(before)


@contextmanager
def preserve_attributes(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of all modules, such as a cached mask, on exit.

    A network that runs on the meta device would cache a mask without values. Attributes that are
    containers are restored too, but neither nested containers nor the values of tensors are.

    Examples
    --------
    >>> model = nn.Identity()
    >>> with preserve_attributes(model):
    ...     model.mask = [1]
    >>> hasattr(model, "mask")
    False
    """
    before = [(m, type(m), _attributes(m, whole=True)) for m in model.modules()]
    try:
        yield
    finally:
        for module, kind, attributes in before:
            # A lazy module has changed its class permanently.
            if type(module) is kind:
                _restore_attributes(module, attributes, whole=True)


# PyTorch's tables of parameters, buffers, children and hooks.
_TABLES = frozenset(vars(nn.Module()))
_CONTAINERS = (OrderedDict, dict, list, set, deque)


def _attributes(module: nn.Module, *, whole: bool = False) -> dict[str, tuple[Any, Any]]:
    """Return a module's attributes.

    With `whole`, include its tables and the items of containers.
    """
    return {
        name: (value, _items(value) if whole else None)
        for name, value in vars(module).items()
        if whole or name not in _TABLES
    }


def _container_type(value: Any) -> Any:
    """Return the type whose methods read and change a container's items, None without one.

    A subclass may refuse changes, convert items or report them. Its own methods are therefore not
    used.
    """
    return next((kind for kind in _CONTAINERS if isinstance(value, kind)), None)


def _items(value: Any) -> list[Any] | None:
    """Return a container's items in order, or None for any other value.

    The items of a mapping are pairs.
    """
    kind = _container_type(value)
    if kind is None:
        return None
    if issubclass(kind, dict):
        return list(kind.items(value))
    return list(kind.__iter__(value))


def _restore_items(value: Any, items: Sequence[Any]) -> None:
    """Restore the items of a container, unless it still has them."""
    kind = _container_type(value)
    if kind is None or _identities(_items(value)) == _identities(items):
        return
    kind.clear(value)
    for item in items:
        if issubclass(kind, dict):
            kind.__setitem__(value, *item)
        elif kind is set:
            kind.add(value, item)
        else:
            kind.append(value, item)


def _identities(items: Sequence[Any] | None) -> list[Any]:
    return [tuple(map(id, item)) if type(item) is tuple else id(item) for item in items or ()]


def _restore_attributes(
    module: nn.Module, attributes: Mapping[str, tuple[Any, Any]], *, whole: bool = False
) -> None:
    current = vars(module)
    for name in [n for n in current if n not in attributes and (whole or n not in _TABLES)]:
        del current[name]
    for name, (value, content) in attributes.items():
        # The same containers, since hook handles refer to them.
        if content is not None:
            _restore_items(value, content)
        current[name] = value


def parameter_checksums(model: nn.Module) -> dict[str, int]:
    """Compute a checksum of each parameter's bits, to detect changes during a forward pass.

    Version counters would miss writes through ``parameter.data``. Each GPU is synchronised once,
    not once per parameter.

    Examples
    --------
    >>> model = nn.Linear(2, 3)
    >>> before = parameter_checksums(model)
    >>> model.bias.data += 1
    >>> changed_parameters(model, before)
    ['bias']
    """
    by_device: dict[torch.device, dict[str, Tensor]] = defaultdict(dict)
    with torch_threads(1):  # One thread already saturates the memory bandwidth.
        for name, parameter in model.named_parameters():
            is_readable = not is_lazy(parameter) and not parameter.is_meta
            if is_readable and parameter.layout == torch.strided and parameter.numel():
                by_device[parameter.device][name] = _bit_sum(parameter.detach())
    return {
        name: checksum
        for sums in by_device.values()
        for name, checksum in zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)
    }


def _bit_sum(tensor: Tensor) -> Tensor:
    """Sum a tensor's bits, read as integers, modulo 2**64."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.contiguous().view(-1)
    size = flat.element_size()
    if flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0:
        # Sums of 64-bit integers are several times faster than those of smaller ones.
        return flat.view(torch.int64).sum()
    return flat.view(_INTEGERS[size]).sum(dtype=torch.int64)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def changed_parameters(model: nn.Module, checksums: Mapping[str, int]) -> list[str]:
    """Return the names of the parameters that differ from their checksums."""
    current = parameter_checksums(model)
    return [name for name, before in checksums.items() if current.get(name, before) != before]


def batch_norm_layers(model: nn.Module) -> list[nn.Module]:
    """List the batch-norm layers that track statistics."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]


def refuse_lazy(model: nn.Module) -> None:
    """Raise if a layer has no weights before its first call."""
    for name, module in model.named_modules():
        if any(map(is_lazy, (*module._parameters.values(), *module._buffers.values()))):
            raise RequestError(
                f"{name or 'the model'} ({type(module).__name__}) has no weights yet; run the "
                "model on a batch once, or load its weights"
            )


@contextmanager
def compilation_refused() -> Iterator[None]:
    """Raise Undefined where this thread compiles a part of a network, as `torch.cond` does.

    Compiled attention stays, in which there are no activations.
    """
    compile_part: Any = torch.compile
    thread = threading.get_ident()
    is_active = True

    def refuse(part: Any = None, *args: Any, **kwargs: Any) -> Any:
        name = getattr(part, "__name__", "").removesuffix("_wrapper").strip("_")
        is_attention = "flex_attention" in name or "block_mask" in name
        if is_active and thread == threading.get_ident() and not is_attention:
            raise Undefined(
                f"the network compiles a part of itself while it runs ({name or 'unnamed'}), as "
                "torch.cond does, which can't be observed; expected Python's if and while"
            )
        return compile_part(part, *args, **kwargs)

    torch.compile = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        is_active = False
        torch.compile = compile_part


def refuse_unobservable(model: nn.Module) -> None:
    """Raise if any part of a model is compiled, scripted or lazy, or runs in other threads."""
    refuse_lazy(model)
    for name, module in model.named_modules():
        is_compiled = type(module).__name__ == "OptimizedModule" or (
            getattr(module, "_compiled_call_impl", None) is not None
        )
        if isinstance(module, torch.jit.ScriptModule) or is_compiled:
            state = "compiled" if is_compiled else "scripted"
            raise Unobservable(
                f"{name or 'the model'} is {state}, so its activations can't be observed; "
                "only measures of the probe function can be used; for others pass the module it "
                "was made from"
            )
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise Unobservable(
                f"{name or 'the model'} is a DataParallel on several devices, each with its own "
                "thread, so its activations can't be observed; pass its .module"
            )
