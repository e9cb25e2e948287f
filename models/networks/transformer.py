"""A small encoder–decoder Transformer for translation."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nlbench.citation import Source
from nlbench.errors import RequestError
from nlbench.subjects.model import model

ATTENTION = Source(
    "A. Vaswani, N. Shazeer, N. Parmar, J. Uszkoreit, L. Jones, A. N. Gomez, Ł. Kaiser, "
    "I. Polosukhin. Attention Is All You Need. NeurIPS, 2017.",
    "figure 1, at width 64",
)
PAD = 0


class TransformerTiny(nn.Module):
    """Two encoder and two decoder layers of width 64, with ReLU in their feed-forward blocks.

    Both languages share the token embedding, with sinusoidal positional encoding. Each layer has
    four heads and a feed-forward block of width 128. Layer norm comes before each block and at
    the end of each stack.

    Parameters
    ----------
    tokens : int
        Size of the vocabulary; token 0 is padding.

    Examples
    --------
    >>> network = TransformerTiny(50)
    >>> network(torch.ones(3, 2, 7, dtype=torch.long)).shape
    torch.Size([3, 7, 50])
    """

    def __init__(
        self, tokens: int, width: int = 64, heads: int = 4, hidden: int = 128, layers: int = 2
    ) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(tokens, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        encoder = nn.TransformerEncoderLayer(
            width, heads, hidden, 0.0, nn.ReLU(), batch_first=True, norm_first=True
        )
        # Disables PyTorch's fused path in evaluation mode. It applies a ReLU that no probe sees,
        # even if `activation` was replaced.
        encoder.activation_relu_or_gelu = 0
        decoder = nn.TransformerDecoderLayer(
            width, heads, hidden, 0.0, nn.ReLU(), batch_first=True, norm_first=True
        )
        self.transformer = nn.Transformer(
            width,
            heads,
            batch_first=True,
            custom_encoder=nn.TransformerEncoder(
                encoder, layers, nn.LayerNorm(width), enable_nested_tensor=False
            ),
            custom_decoder=nn.TransformerDecoder(decoder, layers, nn.LayerNorm(width)),
        )
        self.logits = nn.Linear(width, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits of the next token, of shape (n, length, tokens).

        Parameters
        ----------
        tokens : integer tensor of shape (n, 2, length)
            The source, and the target shifted by one, with causal masking.
        """
        source = tokens[:, 0]
        target = tokens[:, 1]
        length = tokens.shape[2]
        padding = source == PAD
        causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        hidden = self.transformer(
            self._embed(source),
            self._embed(target),
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return self.logits(hidden)

    def _embed(self, tokens: Tensor) -> Tensor:
        weight = self.embedding.weight
        position = torch.arange(tokens.shape[1], device=weight.device, dtype=weight.dtype)[:, None]
        index = torch.arange(0, self.width, 2, device=weight.device, dtype=weight.dtype)
        angle = position * torch.exp(-math.log(10_000) / self.width * index)
        sines = torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1)
        return self.embedding(tokens) * math.sqrt(self.width) + sines


@model(source=ATTENTION, recipe="translation")
def transformer_tiny(
    num_classes: int = 128, input_shape: tuple[int, ...] = (2, 33)
) -> TransformerTiny:
    """Encoder–decoder Transformer of width 64 for parallel text.

    Examples
    --------
    >>> sum(p.numel() for p in transformer_tiny(128).parameters())
    184192
    """
    if len(input_shape) != 2 or input_shape[0] != 2:
        raise RequestError(
            f"transformer-tiny takes inputs of shape (2, length), not {tuple(input_shape)}; use "
            "parallel text such as number-words"
        )
    return TransformerTiny(num_classes)
