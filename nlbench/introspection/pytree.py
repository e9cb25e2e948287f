"""Nested containers of tensors, as PyTorch's own functions flatten them."""

from torch.utils._pytree import tree_iter, tree_leaves, tree_map

__all__ = ["tree_iter", "tree_leaves", "tree_map"]
