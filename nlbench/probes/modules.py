"""Know where in a network a function is called, and how the call is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from .ops import NAMED_MODULES

__all__ = ["Naming", "Places", "following"]


class Places:
    """The modules that are running, and how often each activation was called in this pass.

    Parameters
    ----------
    model : torch.nn.Module
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._stack: list[nn.Module] = []
        self._calls: Counter[str] = Counter()

    @property
    def place(self) -> str:
        """Dotted name of the module whose forward is running."""
        return (self._names.get(self._stack[-1], "") if self._stack else "") or "the network"

    def site(self, kind: str) -> str:
        """Name the next activation call, as the probe `sites` does."""
        module = self._stack[-1] if self._stack else None
        path = self._names.get(module, "") if module is not None else ""
        own = bool(path) and isinstance(module, NAMED_MODULES)
        label = path if own else f"{path}/{kind}" if path else kind
        count = self._calls[label]
        self._calls[label] += 1
        return f"{label}:{count}" if count else label

    def restart(self) -> None:
        """Forget the calls of the last pass."""
        self._calls.clear()

    def _enter(self, module: nn.Module, args: object) -> None:
        self._stack.append(module)

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        self._stack.pop()


@contextmanager
def following(model: nn.Module) -> Iterator[Places]:
    """Follow which module of a model is running."""
    places = Places(model)
    handles = []
    try:
        for module in model.modules():
            # The last hook before and the first after forward, so that a user's own hooks
            # count as called from outside.
            handles.append(module.register_forward_pre_hook(places._enter))
            handles.append(
                module.register_forward_hook(places._leave, prepend=True, always_call=True)
            )
        yield places
    finally:
        for handle in handles:
            handle.remove()


class Naming:
    """Names the activation calls of one forward pass, each its own.

    Parameters
    ----------
    paths : mapping of Module to str
        Where each module is in the model.

    Examples
    --------
    >>> relu = nn.ReLU()
    >>> naming = Naming({relu: "layer.relu"})
    >>> base = naming.base(relu, "relu")
    >>> naming.number(base), naming.number(base)
    ('layer.relu', 'layer.relu:1')
    """

    def __init__(self, paths: Mapping[nn.Module, str]) -> None:
        self._paths = paths
        self._counts: Counter[str] = Counter()

    def path(self, module: nn.Module | None) -> str:
        """Where a module is; empty for the model itself, and outside all modules."""
        return self._paths.get(module, "") if module is not None else ""

    def base(self, module: nn.Module | None, kind: str) -> str:
        """Name a call in a running module, without the call's number."""
        path = self.path(module)
        if path and type(module) in NAMED_MODULES:
            return path
        return f"{path}/{kind}" if path else kind

    def next(self, base: str) -> str:
        """Name the next call of a base, without counting it."""
        count = self._counts[base]
        return f"{base}:{count}" if count else base

    def number(self, base: str) -> str:
        """Name a call of a base, and count it."""
        name = self.next(base)
        self._counts[base] += 1
        return name

    def give_back(self, base: str) -> None:
        """Forget the last call of a base."""
        self._counts[base] -= 1
