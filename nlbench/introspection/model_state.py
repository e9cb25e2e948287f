"""Use somebody's model for a while and give it back as it was."""

from __future__ import annotations

import copy
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy

from nlbench.errors import RequestError, Undefined, first_line

from .shared_setting import SharedSetting

__all__ = [
    "attributes_kept",
    "cpu_copy",
    "double_copy",
    "evaluation_mode",
    "given_tensor",
    "outputs_of",
    "precise_device",
    "refuse_unobservable",
    "shape_copy",
    "tensors_of",
    "typed_copy",
    "with_plain_attention",
    "without_fast_path",
]


class _Lent:
    """A module as it was when the first of several passes began to use it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.users = 0
        self.training = module.training
        self.buffers = [
            (name, buffer, buffer.clone())
            for name, buffer in module._buffers.items()
            if buffer is not None and not is_lazy(buffer)
        ]
        self.attributes = _attributes(module)
        self.registered = _registered(module)

    def give_back(self) -> list[tuple[Tensor, Tensor]]:
        """Put it back; return the buffers that can hold what they held, with copies of that."""
        module = self.module()
        if module is None:
            return []
        _LENT.pop(module, None)
        # A module that makes its layers when it is first run has become another for good.
        if _registered(module) == self.registered:
            _restore_attributes(module, self.attributes)
        module.training = self.training
        kept, there = [], dict(module._buffers.items())
        for name, buffer, before in self.buffers:
            now = there.get(name)
            if now is None or not _is_like(now, before):
                continue
            # A model moved to another device meanwhile keeps its new buffers.
            if now.device == buffer.device:
                module._buffers[name] = buffer
            if _is_like(buffer, before):
                kept.append((buffer, before))
        return kept


def _registered(module: nn.Module) -> list[str]:
    """Names of what a module is made of, those that are still to be made apart."""
    tensors = (*module._parameters.items(), *module._buffers.items())
    made = [name for name, tensor in tensors if tensor is not None and not is_lazy(tensor)]
    # By its keys: the table of a scripted module can't be iterated.
    return [type(module).__name__, *made, *module._modules.keys()]


_LENT: weakref.WeakKeyDictionary[nn.Module, _Lent] = weakref.WeakKeyDictionary()
_LOCK = threading.RLock()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode without gradients; put every module back after.

    Buffers that the forward pass changes, such as a counter of calls, get their values back, and
    so do plain attributes that it sets. A buffer that it replaces by another shape is a cache
    that has grown, and stays, as does what it puts into a list or dictionary. Passes that overlap,
    in several threads, may share modules: the last one to end puts them back. A caller's
    `torch.inference_mode` is left meanwhile: in it nothing has a derivative.
    """
    with _LOCK:
        lent = [_lend(module) for module in model.modules()]
        for one in lent:
            one.users += 1
    try:
        try:
            with _LOCK:
                model.eval()
        except NotImplementedError as error:
            # What `torch.export` gives was fixed in the mode that it was exported in.
            raise RequestError(
                f"the model ({type(model).__name__}) can't be put into evaluation mode: {error}; "
                "pass the module it was made from"
            ) from error
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        with _LOCK, torch.no_grad():
            for one in lent:
                one.users -= 1
            _refill([pair for one in lent if one.users == 0 for pair in one.give_back()])


def _lend(module: nn.Module) -> _Lent:
    if module not in _LENT:
        _LENT[module] = _Lent(module)
    return _LENT[module]


def _is_like(buffer: Tensor, before: Tensor) -> bool:
    """Whether it could hold the same; a buffer of another shape is a cache that has grown."""
    same = buffer.shape == before.shape and buffer.dtype == before.dtype
    return same and not buffer.is_meta


def _refill(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Give buffers back what they held, those that hold something else.

    What is equal is not written to, since a caller may be going to take derivatives through it.
    A GPU is waited for once, not for each buffer.
    """
    compared = defaultdict(list)
    for buffer, before in pairs:
        if buffer.layout == torch.strided:
            compared[buffer.device].append((buffer, before))
        else:
            # PyTorch compares no sparse tensors.
            buffer.copy_(before)
    for of_device in compared.values():
        differ = torch.stack([(buffer != before).any() for buffer, before in of_device])
        for (buffer, before), differs in zip(of_device, differ.tolist(), strict=True):
            if differs:
                buffer.copy_(before)


@contextmanager
def _fast_path_off() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


without_fast_path = SharedSetting(_fast_path_off)
"""Has transformer layers call their activations one by one.

In evaluation PyTorch replaces a whole `torch.nn.TransformerEncoderLayer` by one kernel, whose
activations nobody can see and whose output differs by rounding.
"""

with_plain_attention = SharedSetting(lambda: sdpa_kernel(SDPBackend.MATH))
"""Has attention computed step by step: its fused forms have no second derivatives."""


def refuse_unobservable(model: nn.Module) -> None:
    """Refuse a model of which a part is compiled or scripted, or runs in other threads.

    Raises
    ------
    nlbench.RequestError
        Naming the part.
    """
    for name, module in model.named_modules():
        is_compiled = type(module).__name__ == "OptimizedModule" or (
            getattr(module, "_compiled_call_impl", None) is not None
        )
        if isinstance(module, torch.jit.ScriptModule) or is_compiled:
            what = "compiled" if is_compiled else "scripted"
            raise RequestError(
                f"{name or 'the model'} is {what}, so its activations can't be observed; "
                "pass the module it was made from"
            )
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise RequestError(
                f"{name or 'the model'} is a DataParallel on several devices, each with a thread "
                "of its own, so its activations can't be observed; pass its .module"
            )


def double_copy(model: nn.Module) -> nn.Module:
    """Copy a model, in eval mode and float64; see `typed_copy`."""
    return typed_copy(model, torch.float64)


def typed_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy a model, in eval mode and another dtype; the model itself is left alone.

    On a device that has no float64 (`precise_device`) the copy is on the CPU, also in float32:
    what is made of its outputs is of double precision.

    Raises
    ------
    nlbench.RequestError
        If the model is compiled or scripted, can't be copied, has complex numbers or has
        none at all, as on the ``meta`` device.

    Examples
    --------
    >>> model = nn.Linear(2, 2).half()
    >>> typed_copy(model, torch.float64).weight.dtype, model.weight.dtype
    (torch.float64, torch.float16)
    """
    _check(model)
    if any(t.is_meta for t in tensors_of(model)):
        raise RequestError("the model is on the device meta: it has shapes, but no weights")
    twin = _copied(model, {id(t): t.detach().clone() for t in _computed(model)})
    if any(t.device.type in _SINGLE_PRECISION for t in tensors_of(twin)):
        twin = twin.cpu()
    return twin.to(dtype)


_SINGLE_PRECISION = ("mps",)
"""Devices without float64."""


def precise_device(model: nn.Module, given: Tensor) -> torch.device:
    """Where a copy of a model is, and its inputs have to be, for numbers of double precision.

    The model's own device (of one without numbers that of what it is given); the CPU in place of
    Apple's GPU, which has no float64.

    Examples
    --------
    >>> precise_device(nn.Linear(2, 3), torch.zeros(1, 2))
    device(type='cpu')
    """
    device = next((t.device for t in tensors_of(model)), given.device)
    return torch.device("cpu") if device.type in _SINGLE_PRECISION else device


def cpu_copy(model: nn.Module) -> nn.Module:
    """Copy a model to the CPU, in eval mode, without room for a copy on its own device.

    Raises
    ------
    nlbench.RequestError
        If the model is compiled or scripted, or can't be copied.

    Examples
    --------
    >>> cpu_copy(nn.Linear(2, 3)).weight.device
    device(type='cpu')
    """
    refuse_unobservable(model)
    return _copied(model, {id(t): _on_cpu(t) for t in (*tensors_of(model), *_kept(model))})


def _on_cpu(tensor: Tensor) -> Tensor:
    moved = tensor.detach().cpu().clone() if tensor.device.type == "cpu" else tensor.detach().cpu()
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


def shape_copy(model: nn.Module) -> nn.Module:
    """Copy a model, in eval mode, with shapes in place of numbers, floats as float64.

    Raises
    ------
    nlbench.RequestError
        If the model is compiled or scripted, can't be copied or has complex numbers.

    Examples
    --------
    >>> shape_copy(nn.Linear(2, 3)).weight.device, shape_copy(nn.Linear(2, 3)).weight.shape
    (device(type='meta'), torch.Size([3, 2]))
    """
    _check(model)
    tensors = [*tensors_of(model), *_computed(model)]
    return _copied(model, {id(t): _shape_of(t) for t in tensors})


def given_tensor(output: object) -> Tensor:
    """Take what a model gives for a tensor; no probe makes anything of something else.

    Raises
    ------
    nlbench.Undefined

    Examples
    --------
    >>> given_tensor((torch.ones(1), torch.ones(1)))
    Traceback (most recent call last):
    nlbench.errors.Undefined: the model gives a tuple, expected a tensor
    """
    if not isinstance(output, Tensor):
        raise Undefined(f"the model gives a {type(output).__name__}, expected a tensor")
    return output


def outputs_of(output: object, samples: int) -> Tensor:
    """Take what a model gives for the outputs of so many samples.

    Raises
    ------
    nlbench.Undefined
        If it is no tensor, or none with a row a sample.

    Examples
    --------
    >>> outputs_of(torch.ones(3, 2), 3).shape
    torch.Size([3, 2])
    """
    tensor = given_tensor(output)
    if tensor.dim() == 0 or len(tensor) != samples:
        inputs = "one input" if samples == 1 else f"{samples} inputs"
        raise Undefined(
            f"the model gives shape {tuple(tensor.shape)} for {inputs}, expected one "
            "output an input along the first axis"
        )
    return tensor


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Give a model's parameters and buffers."""
    yield from model.parameters()
    yield from model.buffers()


def _check(model: nn.Module) -> None:
    refuse_unobservable(model)
    # To convert them to floats drops their imaginary parts.
    if any(t.is_complex() for t in tensors_of(model)):
        raise RequestError("the model has complex numbers, expected real ones")


def _copied(model: nn.Module, replaced: dict[int, Any]) -> nn.Module:
    """Copy a model in eval mode, with some of its tensors, by identity, replaced by others."""
    try:
        return copy.deepcopy(model, replaced).eval()
    except (RuntimeError, TypeError) as error:
        reason = first_line(error)
        raise RequestError(f"the model can't be copied: {reason}") from error


def _kept(model: nn.Module) -> Iterator[Tensor]:
    """Give tensors that are plain attributes of modules."""
    return (t for m in model.modules() for t in vars(m).values() if isinstance(t, Tensor))


def _computed(model: nn.Module) -> list[Tensor]:
    """Give those of them that were computed: PyTorch refuses to copy them.

    Older weight normalisation leaves its product so, and computes it again before each forward
    pass.
    """
    return [tensor for tensor in _kept(model) if not tensor.is_leaf]


def _shape_of(tensor: Tensor) -> Tensor:
    """Give a tensor without numbers, floats in float64."""
    dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
    empty = torch.empty_like(tensor, dtype=dtype, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=False)
    return empty


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Undo what a pass sets on modules, such as a mask that is made once and kept.

    A network run without numbers would keep a mask without numbers. What lies deeper than in a
    list, dictionary, set or queue that is an attribute, and the numbers of a tensor that is one,
    are not looked after.

    Examples
    --------
    >>> model = nn.Identity()
    >>> with attributes_kept(model):
    ...     model.mask = [1]
    >>> hasattr(model, "mask")
    False
    """
    before = [(m, type(m), _attributes(m, whole=True)) for m in model.modules()]
    try:
        yield
    finally:
        for module, kind, attributes in before:
            # A lazy module has become another for good.
            if type(module) is kind:
                _restore_attributes(module, attributes, whole=True)


# A module's own tables: parameters, buffers, children and hooks.
_TABLES = frozenset(vars(nn.Module()))
_HOLDERS = (dict, list, set, deque)


def _attributes(module: nn.Module, *, whole: bool = False) -> dict[str, tuple[Any, Any]]:
    """Attributes of a module; whole: its tables too, with copies of what holds others."""
    return {
        name: (value, copy.copy(value) if whole and isinstance(value, _HOLDERS) else None)
        for name, value in vars(module).items()
        if whole or name not in _TABLES
    }


def _restore_attributes(
    module: nn.Module, attributes: Mapping[str, tuple[Any, Any]], *, whole: bool = False
) -> None:
    own = vars(module)
    for name in [n for n in own if n not in attributes and (whole or n not in _TABLES)]:
        del own[name]
    for name, (value, content) in attributes.items():
        # The same containers again: others, as handles of hooks, refer to them.
        if whole and isinstance(value, dict | set):
            value.clear()
            value.update(content)
        elif whole and isinstance(value, list | deque):
            value.clear()
            value.extend(content)
        own[name] = value
