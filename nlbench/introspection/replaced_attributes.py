"""Functions, classes and constants of PyTorch and NumPy that were replaced, found by identity."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, ValuesView
from itertools import chain
from operator import is_not
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


class AttributeSnapshot:
    """The attributes of the modules and classes of PyTorch and NumPy, at one time.

    Only replaced and deleted attributes are changes. Additions aren't, since imports make them;
    but a function added to a class is one if it hides a function of a base class. Modules imported
    after the snapshot are not compared.

    Examples
    --------
    >>> before = AttributeSnapshot()
    >>> torch.relu, relu = torch.tanh, torch.relu
    >>> list(before.restore()), torch.relu is relu
    ([('torch.relu', True)], True)
    """

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType] = {}
        self._attributes: dict[Any, dict[str, Any]] = {}
        self._views: list[ValuesView[Any]] = []
        self._values: list[Any] = []
        self.update()

    def update(self) -> None:
        """Take the snapshot again; cheap, since only what changed is copied."""
        modules = _modules()
        if modules == self._modules and self._is_unchanged():
            return
        self._modules = modules
        known = self._attributes
        self._attributes = {
            owner: before
            if _is_same(before := known.get(owner, {}), now := vars(owner))
            else dict(now)
            for owner in (*self._modules.values(), *_classes(self._modules))
        }
        # Each hook that is registered changes a counter of handles.
        compared = self._attributes.keys() - {RemovableHandle}
        self._views = [vars(owner).values() for owner in compared]
        self._values = list(chain.from_iterable(self._views))

    def _is_unchanged(self) -> bool:
        """Compare all values at once, which is three times as fast as owner by owner."""
        now = chain.from_iterable(self._views)
        is_as_long = sum(map(len, self._views)) == len(self._values)
        return is_as_long and not any(map(is_not, now, self._values))

    def restore(self) -> Iterator[tuple[str, bool]]:
        """Restore what was replaced, and yield each name with False if that was not possible."""
        for name, module in self._modules.items():
            if sys.modules.get(name) is not module and not name.startswith(_NAMESPACES):
                sys.modules[name] = module
                yield f"sys.modules['{name}']", True
        changed = () if self._is_unchanged() else self._attributes.items()
        for owner, before in changed:
            if not _is_same(before, vars(owner)):
                yield from self._restore_owner(owner, before)

    def _restore_owner(self, owner: Any, before: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
        now = vars(owner).copy()
        changed = [
            attribute
            for attribute, value in before.items()
            if now.get(attribute, _MISSING) is not value
            and _is_fixed(owner, attribute, value)
            and not _is_wrapped_by_torch(now.get(attribute), value)
        ]
        if isinstance(owner, type) or owner is torch._VF:
            hidden = super(owner, owner) if isinstance(owner, type) else owner.vf
            changed += [
                attribute
                for attribute in now.keys() - before.keys()
                if (callable(now[attribute]) or isinstance(now[attribute], property))
                and (base := getattr(hidden, attribute, None)) is not None
                and not _is_wrapped_by_torch(now[attribute], base)
            ]
        for attribute in changed:
            try:
                if attribute in before:
                    setattr(owner, attribute, before[attribute])
                else:
                    delattr(owner, attribute)
            except (AttributeError, TypeError):
                pass
            after = vars(owner).get(attribute, _MISSING)
            is_restored = after is before.get(attribute, _MISSING)
            yield f"{self._name(owner)}.{attribute}", is_restored

    def _name(self, owner: Any) -> str:
        """Return the shortest name by which a module or class can be reached."""
        names = [name for name, module in self._modules.items() if module is owner] or [
            f"{name}.{attribute}"
            for name, module in self._modules.items()
            for attribute, value in self._attributes[module].items()
            if value is owner
        ]
        return min(names, key=len)


_MISSING = object()


def _is_same(before: Mapping[str, object], now: Mapping[str, object]) -> bool:
    """Return True if two mappings hold the same objects."""
    return len(before) == len(now) and not any(map(is_not, now.values(), before.values()))


_NAMESPACES = "torch.ops."
"""Prefix of the namespaces of operators, which aren't in `sys.modules`."""

_ROOTS = frozenset({"torch", "torchvision", "numpy", "math", "random"})

_PRIVATE = frozenset({"torch._C", "torch._C._nn", "torch._VF", "torch._tensor", "torch._refs"})
"""Modules that public functions call; other private ones are PyTorch's own workings."""


def _modules() -> dict[str, ModuleType]:
    """Return the imported modules that are compared, and the namespaces of operators."""
    modules = {
        name: module
        for name, module in sys.modules.copy().items()
        if name.partition(".")[0] in _ROOTS
        and ("._" not in name or name in _PRIVATE)
        and isinstance(module, ModuleType)
    }
    namespaces = {
        f"{_NAMESPACES}{name}": namespace
        for name, namespace in vars(torch.ops).copy().items()
        if isinstance(namespace, ModuleType)
    }
    return namespaces | modules


_LEGACY_TYPE = type(torch.FloatTensor)
"""Type of classes such as `torch.FloatTensor`, of which no tensor is an instance."""

_CLASSES: dict[str, list[type]] = {}
"""The classes of each module, by the module's name."""


def _classes(modules: Mapping[str, ModuleType]) -> dict[type, None]:
    for name in modules.keys() - _CLASSES.keys():
        _CLASSES[name] = [
            value
            for value in vars(modules[name]).copy().values()
            # Not `isinstance`, for which some deprecated objects warn.
            if issubclass(kind := type(value), type)
            and kind is not _LEGACY_TYPE
            and str(value.__module__).partition(".")[0] in _ROOTS
        ]
    return dict.fromkeys(kind for name in modules for kind in _CLASSES[name])


def _is_fixed(owner: object, attribute: str, value: object) -> bool:
    """Return True for functions, classes, modules and constants, which are never replaced."""
    if callable(value) or isinstance(value, ModuleType):
        return True
    if isinstance(owner, type):  # Classes count their instances, for example.
        return isinstance(value, property)
    return not attribute.startswith("_") and isinstance(value, (torch.dtype, float, int, str))


def _is_wrapped_by_torch(now: object, before: object) -> bool:
    """Return True if PyTorch replaced a function, as its compiler wraps `torch.manual_seed`."""
    if isinstance(now, property):
        return isinstance(before, property) and _file(now.fget).startswith(_TORCH_FOLDER)
    is_wrapper = getattr(now, "__wrapped__", None) is before
    return _file(now).startswith(_TORCH_FOLDER if is_wrapper else _COMPILER_FOLDER)


def _file(function: object) -> str:
    """Return the file of a Python function, or an empty string."""
    return getattr(getattr(function, "__code__", None), "co_filename", "")


_TORCH_FOLDER = str(Path(torch.__file__).parent) + os.sep
_COMPILER_FOLDER = _TORCH_FOLDER + "_dynamo" + os.sep
