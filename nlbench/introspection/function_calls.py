"""Calls of PyTorch functions, as seen by function modes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .operations import known, operation

unobserved_calls = torch._C.DisableTorchFunction
"""Context in which function modes and tensor subclasses don't see calls."""


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among values, including those in lists, tuples and dictionaries."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


class FunctionCall:
    """A call of a PyTorch function.

    Attributes
    ----------
    operation : Operation
        The function's entry in the registry.

    Examples
    --------
    >>> import torch
    >>> call = FunctionCall(torch.cat, ([torch.ones(1), torch.ones(2)],), {"dim": 0})
    >>> call.name, len(call.tensors), call.argument(1, "dim"), call.run()
    ('cat', 2, 0, tensor([1., 1., 1.]))
    """

    def __init__(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs or {}
        self.operation = operation(function)

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Tensor arguments, in order."""
        return list(tensors_in((*self.args, *self.kwargs.values())))

    @property
    def name(self) -> str:
        """Name of the operation."""
        return self.operation.name

    @property
    def function_name(self) -> str:
        """Name of the function, with underscores."""
        return getattr(self.function, "__name__", "")

    @property
    def takes(self) -> str:
        """The fact ``takes`` of the operation, or of a special method such as ``__float__``."""
        name = self.function_name
        special = known(name).takes if name.startswith("__") else ""
        return special or self.operation.takes

    @property
    def input(self) -> Any:
        """Input of an activation function, given by position or by name."""
        if self.args:
            return self.args[0]
        return self.kwargs.get("input", next(iter(self.kwargs.values()), None))

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument, by name or by position."""
        return self.kwargs.get(name, self.args[position] if len(self.args) > position else default)

    def run(self) -> Any:
        """Call the function."""
        return self.function(*self.args, **self.kwargs)
