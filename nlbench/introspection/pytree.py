"""Nested containers of tensors, as PyTorch's own functions flatten them, and objects of tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import (
    MappingKey,
    SequenceKey,
    keystr,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_iter,
    tree_leaves,
    tree_map,
    tree_structure,
    tree_unflatten,
)

__all__ = [
    "ObjectOfTensors",
    "SequenceKey",
    "keystr",
    "object_parts",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_iter",
    "tree_leaves",
    "tree_map",
    "tree_structure",
    "tree_unflatten",
]


def object_parts(value: object) -> dict[str, Any]:
    """Return the attributes of an object that holds tensors, such as a dataclass or a graph.

    Empty for everything else: containers, which PyTorch flattens itself, modules and datasets.

    Examples
    --------
    >>> import torch
    >>> from types import SimpleNamespace
    >>> object_parts(SimpleNamespace(x=torch.ones(1), size=3))
    {'x': tensor([1.]), 'size': 3}
    >>> object_parts([torch.ones(1)])
    {}
    """
    if isinstance(value, Tensor | Mapping | nn.Module | type) or hasattr(value, "__array__"):
        return {}
    to_dict = getattr(value, "to_dict", None)
    if isinstance(value, Iterable) and not callable(to_dict):
        return {}
    parts = to_dict() if callable(to_dict) else getattr(value, "__dict__", {})
    if not isinstance(parts, Mapping) or not any(isinstance(p, Tensor) for p in parts.values()):
        return {}
    return {str(name): part for name, part in parts.items()}


class ObjectOfTensors:
    """An object that PyTorch can't flatten, as a node with the attributes that are given.

    The flattened node is put together again as a copy of the object with these attributes.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> node = ObjectOfTensors(SimpleNamespace(x=1, name="graph"), {"x": 1})
    >>> tree_map(lambda value: value + 1, node)
    namespace(x=2, name='graph')
    """

    def __init__(self, template: object, parts: Mapping[str, Any]) -> None:
        self.template = template
        self.parts = dict(parts)

    def __eq__(self, other: object) -> bool:
        """Return True for the same attributes of an object of the same class."""
        if not isinstance(other, ObjectOfTensors):
            return NotImplemented
        return type(self.template) is type(other.template) and list(self.parts) == list(other.parts)

    __hash__ = None  # type: ignore[assignment]

    @staticmethod
    def build(values: Iterable[Any], node: ObjectOfTensors) -> Any:
        """Return a copy of the node's object with other values of its attributes."""
        built = copy.copy(node.template)
        for name, value in zip(node.parts, values, strict=True):
            try:
                setattr(built, name, value)
            except AttributeError:  # A frozen dataclass.
                object.__setattr__(built, name, value)
        return built


register_pytree_node(
    ObjectOfTensors,
    lambda node: (list(node.parts.values()), node),
    ObjectOfTensors.build,
    flatten_with_keys_fn=lambda node: (
        [(MappingKey(name), part) for name, part in node.parts.items()],
        node,
    ),
)
