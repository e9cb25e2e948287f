"""A call of an operation, as the rules of the channel graph see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from nlbench.errors import Undefined

from .nodes import Builder

__all__ = ["Call", "Refused", "Rule"]


class Refused(Exception):
    """Why a call can't be followed; whoever catches it knows where it is."""


@dataclass(frozen=True)
class Call:
    """One call of an operation.

    Parameters
    ----------
    name : str
        Without the underscore of an in-place form.
    function : callable
    args, kwargs
        What it was given.
    output
        What it gave.
    nodes_of : callable
        From a tensor to its nodes, None for a constant.
    builder : Builder
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    nodes_of: Callable[[Any], Tensor | None]
    builder: Builder

    def arg(self, place: int, name: str, default: Any = None) -> Any:
        """Give an argument that may have been passed by position or by name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    def nodes(self, value: Any) -> Tensor:
        """Give the nodes of a tensor, a constant's being -1."""
        found = self.nodes_of(value)
        return torch.full((), -1).expand(tuple(value.shape)) if found is None else found

    @property
    def first(self) -> Tensor:
        """Nodes of the first argument."""
        return self.nodes(self.arg(0, "input"))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the output."""
        return tuple(self.output.shape)

    def only(self, *values: Any) -> None:
        """Refuse if any other argument than these depends on the input."""
        own = {id(value) for value in values}
        for value in (*self.args, *self.kwargs.values()):
            if (
                isinstance(value, Tensor)
                and id(value) not in own
                and self.nodes_of(value) is not None
            ):
                raise Refused("its weights depend on the input")

    def fixed(self, values: Any) -> None:
        """Refuse if what picks or counts entries depends on the input or has no numbers."""
        for value in tree_iter(values):
            if isinstance(value, Tensor) and self.nodes_of(value) is not None:
                raise Refused("which entries it takes depends on the input")
            if isinstance(value, Tensor) and value.is_meta:
                raise Undefined(
                    f"{self.name}: which entries it takes is not there, the model is on device meta"
                )


Rule = Callable[[Call], Any]
"""From a call to the nodes of its output, one tensor of them for each tensor."""
