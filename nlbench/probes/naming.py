"""What the calls of activations are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import nn

from .activations import NAMED_MODULES

__all__ = ["Naming"]


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
