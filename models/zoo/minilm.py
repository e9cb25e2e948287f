"""The sentence encoder all-MiniLM-L6-v2."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from nlbench.subjects.tokenizer import Tokenizer, from_library
from nlbench.subjects.weights import read_checkpoint

from .catalogue import Member

PAD = 0


class SentenceEncoder(nn.Module):
    """Mean of the tokens' last hidden states, scaled to norm 1, as in sentence-transformers."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (n, t), padded with 0, to sentence embeddings (n, width)."""
        mask = tokens != PAD
        hidden = self.bert(tokens, attention_mask=mask.long()).last_hidden_state
        weights = mask[..., None].to(hidden.dtype)
        return functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=1)


def build(member: Member) -> SentenceEncoder:
    """Build the network, freshly initialised."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.BertConfig(
        vocab_size=30522,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        attn_implementation="eager",
    )
    return SentenceEncoder(transformers.BertModel(config, add_pooling_layer=False))


def read(path: Path) -> dict[str, Tensor]:
    """Read the state dict, without the pooler, which sentence embeddings don't use."""
    state, _ = read_checkpoint(path)
    unused = ("pooler.", "embeddings.position_ids")
    return {f"bert.{name}": t for name, t in state.items() if not name.startswith(unused)}


def tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer next to the weights, for text datasets."""
    loaded = load_tokenizer(path)
    start, end = ((loaded.token_to_id(token),) for token in ("[CLS]", "[SEP]"))
    return from_library("MiniLM", loaded, start=start, end=end, separator=end)


def load_tokenizer(path: Path) -> Any:
    """Load the tokenizer next to the weights, without truncation or padding."""
    import tokenizers

    loaded = tokenizers.Tokenizer.from_file(str(path.with_name("tokenizer.json")))
    loaded.no_truncation()
    loaded.no_padding()
    return loaded
