"""A small causal Transformer over bytes, for the study of linear blocks."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from nlbench.citation import Source
from nlbench.subjects.model import model


class SmallGPT(nn.Module):
    """Transformer with layer norm before attention and MLP, as in GPT-2.

    Parameters
    ----------
    tokens, length : int
        Vocabulary size and maximum input length.

    Examples
    --------
    >>> import torch
    >>> SmallGPT(256, 64)(torch.zeros(2, 7, dtype=torch.long)).shape
    torch.Size([2, 7, 256])
    """

    def __init__(
        self, tokens: int, length: int, blocks: int = 6, width: int = 64, heads: int = 4
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Block(width, heads, blocks) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute next-token logits, of shape (n, t, tokens), for tokens of shape (n, t)."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _Attention(width, heads)
        widen = nn.Linear(width, 4 * width)
        narrow = nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(widen, nn.GELU(), narrow)
        # As in GPT-2, initial weights of layers that write to the residual stream depend on depth.
        shrinkage = (2 * depth) ** -0.5
        layers = {self.attention.joined: 1.0, self.attention.out: shrinkage}
        for linear, scale in {**layers, widen: 1.0, narrow: shrinkage}.items():
            nn.init.normal_(linear.weight, std=0.02 * scale)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.joined, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.joined(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


@model(
    source=Source(
        "A. Radford, J. Wu, R. Child, D. Luan, D. Amodei, I. Sutskever. Language Models are "
        "Unsupervised Multitask Learners. 2019.",
        "GPT-2's architecture, 6 blocks of width 64",
    ),
    recipe="translation",
    data="text/python",
)
def gpt_small(num_classes: int = 256, input_shape: tuple[int, ...] = (64,)) -> SmallGPT:
    """GPT-2-style language model with 6 blocks of width 64.

    Parameters
    ----------
    num_classes : int
        Vocabulary size.
    input_shape : tuple of int
        (length,), the number of tokens per window.
    """
    return SmallGPT(num_classes, *input_shape)
