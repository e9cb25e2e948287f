"""The tokenizer of a model, for datasets of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tokenizer:
    """The tokens in which a model reads text.

    Parameters
    ----------
    name : str
        For descriptions.
    encode : callable
        Maps texts to their tokens, without marks of start and end.
    size : int
        Number of different tokens.
    start, end : tuple of int
        Marks around each input of the model.
    separator : tuple of int
        Mark between two texts in one input.
    predicts_next : bool
        True if the label of a token is the next token; otherwise there are no labels.

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


def _bytes_of(texts: Sequence[str]) -> list[list[int]]:
    return [list(text.encode()) for text in texts]


BYTES = Tokenizer("bytes", _bytes_of, 256, predicts_next=True)
"""The bytes of UTF-8, for models that declare no tokenizer."""
