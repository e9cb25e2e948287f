"""Tokenizers of models, for text datasets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tokenizer:
    """The vocabulary and special tokens that a model uses to read text.

    Parameters
    ----------
    name : str
        Name used in descriptions.
    encode : callable
        Maps texts to token ids, without special tokens.
    size : int
        Vocabulary size.
    start, end : tuple of int
        Special tokens at the start and end of each input to the model.
    separator : tuple of int
        Special tokens between two texts in the same input.
    predicts_next : bool
        True if each token's label is the next token; otherwise there are no labels.

    Examples
    --------
    >>> BYTES.encode(["né"])
    [[110, 195, 169]]
    """

    name: str
    encode: Callable[[Sequence[str]], Sequence[Sequence[int]]]
    size: int
    start: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    separator: tuple[int, ...] = ()
    predicts_next: bool = False


def from_library(name: str, loaded: Any, **special: Any) -> Tokenizer:
    """Return a tokenizer of the tokenizers library, with the special tokens that a model uses."""

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [part.ids for part in loaded.encode_batch(texts, add_special_tokens=False)]

    return Tokenizer(name, encode, loaded.get_vocab_size(), **special)


BYTES = Tokenizer(
    "bytes", lambda texts: [list(text.encode()) for text in texts], 256, predicts_next=True
)
"""UTF-8 bytes as tokens, for models that declare no tokenizer."""
