"""Networks inside wrappers: compiled, parallel, averaged and exported modules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from .exported import ExportedNetwork, is_exported

F = TypeVar("F", bound=Callable[..., Any])

_WRAPPERS = (nn.DataParallel, DistributedDataParallel, AveragedModel)
"""Wrappers that only call their attribute ``module``."""


@contextmanager
def unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the network inside a model's wrappers, which are put back on exit.

    The network runs without a compiler and in one thread. Its modules have the names that they have
    without wrappers. Wrappers of modules inside the model are taken off, too.

    Examples
    --------
    >>> network = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> model = nn.DataParallel(network)
    >>> with unwrapped(model) as inside:
    ...     inside is network
    True
    """
    with ExitStack() as stack:
        network = _take_off_wrappers(model, stack)
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            # For functions that are compiled where they are defined.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield network


def remove_wrappers(model: nn.Module) -> nn.Module:
    """Take a model's wrappers off for good, and return the network inside.

    Examples
    --------
    >>> remove_wrappers(nn.Sequential(nn.DataParallel(nn.ReLU())))
    Sequential(
      (0): ReLU()
    )
    """
    with ExitStack() as stack:
        network = _take_off_wrappers(model, stack)
        stack.pop_all()
    return network


def through_wrappers(function: F) -> F:
    """Call a function of a model with the network inside the model's wrappers."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        model = kwargs.pop("model") if not args else args[0]
        with unwrapped(model) as network:
            return function(network, *args[1:], **kwargs)

    return cast("F", call)


def _take_off_wrappers(model: nn.Module, stack: ExitStack) -> nn.Module:
    """Return the network inside a model's wrappers. The stack puts them back."""
    network = _inside(model)
    # The table of a scripted module can't be iterated.
    modules = [m for m in network.modules() if not isinstance(m, torch.jit.ScriptModule)]
    for module in modules:
        for name, child in list(module._modules.items()):
            if child is not None and (inner := _inside(child)) is not child:
                stack.callback(module._modules.__setitem__, name, child)
                module._modules[name] = inner
    for module in modules:
        _take_off_compiled_calls(module, stack)
    return network


def _inside(module: nn.Module) -> nn.Module:
    """Return the module inside all wrappers of a module."""
    while True:
        if _is_compiled(module):
            module = module._orig_mod  # type: ignore[assignment]
        elif isinstance(module, _WRAPPERS):
            module = module.module
        elif is_exported(module):
            return ExportedNetwork(module)  # type: ignore[arg-type]
        else:
            return module


def _is_compiled(module: nn.Module) -> bool:
    # Its class is not imported, since that takes seconds.
    return type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod")


def _take_off_compiled_calls(module: nn.Module, stack: ExitStack) -> None:
    """Replace compiled functions in a module's attributes by the functions themselves."""
    attributes = vars(module)
    for name, value in list(attributes.items()):
        original: Any = getattr(value, "_torchdynamo_orig_callable", None)
        if name == "_compiled_call_impl":
            original = None
        elif original is None:
            continue
        stack.callback(attributes.__setitem__, name, value)
        attributes[name] = original
