"""Nested containers of tensors, as PyTorch's own functions flatten them."""

from torch.utils._pytree import (
    SequenceKey,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_iter,
    tree_leaves,
    tree_map,
    tree_structure,
    tree_unflatten,
)

__all__ = [
    "SequenceKey",
    "keystr",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_iter",
    "tree_leaves",
    "tree_map",
    "tree_structure",
    "tree_unflatten",
]
