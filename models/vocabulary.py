"""A vocabulary of byte pairs, learnt from text by the tokenizers library."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nlbench.errors import RequestError
from nlbench.transforms import header_of

__all__ = ["END", "PAD", "START", "UNKNOWN", "Vocabulary"]

PAD, START, END, UNKNOWN = range(4)
_MARKS = ("[PAD]", "[START]", "[END]", "[UNKNOWN]")


class Vocabulary:
    """Tokens and their numbers, for both languages of a corpus.

    The numbers 0 to 3 are padding, start, end and the unknown.

    Parameters
    ----------
    text : str
        A tokenizer as JSON, as the tokenizers library writes it.

    Raises
    ------
    nlbench.RequestError
        If the library is missing or the text isn't a tokenizer's.

    Examples
    --------
    >>> words = Vocabulary.learnt(["one cat", "two cats"], 32)
    >>> words.decode(words.encode(["two cats"]))
    ['two cats']
    """

    def __init__(self, text: str) -> None:
        tokenizers = _library()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:
            # The library raises the bare class.
            raise RequestError(f"not a vocabulary: {str(error).splitlines()[0][:80]}") from error
        found = [self._tokenizer.token_to_id(mark) for mark in _MARKS]
        if found != [PAD, START, END, UNKNOWN]:
            raise RequestError(f"the vocabulary lacks {', '.join(_MARKS)} as its first tokens")
        self.text = text

    @classmethod
    def learnt(cls, sentences: Iterable[str], size: int) -> Vocabulary:
        """Learn byte pairs from sentences.

        Parameters
        ----------
        sentences : iterable of str
        size : int
            Most tokens, marks included; fewer if the text has no more.
        """
        tokenizers = _library()
        from tokenizers import decoders, models, pre_tokenizers, trainers

        tokenizer = tokenizers.Tokenizer(models.BPE(unk_token=_MARKS[UNKNOWN]))
        # A space becomes part of the word after it, so that decoding gives it back.
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=list(_MARKS), show_progress=False
        )
        tokenizer.train_from_iterator(list(sentences), trainer)
        return cls(tokenizer.to_str())

    @classmethod
    def of_file(cls, path: Path) -> Vocabulary:
        """Read the vocabulary of a checkpoint, or a tokenizer's JSON file.

        Raises
        ------
        nlbench.RequestError
            If there is none in it.
        """
        header = header_of(path)
        if "vocabulary" in header:
            return cls(header["vocabulary"])
        if path.suffix == ".safetensors":
            raise RequestError(f"{path} is no checkpoint with a vocabulary")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"can't read {path}: {error}") from error
        try:
            return cls(text)
        except RequestError as error:
            raise RequestError(f"{path}: {error}") from error

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return int(self._tokenizer.get_vocab_size())

    @property
    def hash(self) -> str:
        """SHA-256 of the vocabulary."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def encode(self, sentences: Sequence[str]) -> list[list[int]]:
        """Numbers of the tokens of each sentence, without marks."""
        found = self._tokenizer.encode_batch(list(sentences), add_special_tokens=False)
        return [list(one.ids) for one in found]

    def decode(self, rows: Iterable[Sequence[int]]) -> list[str]:
        """Sentences, each up to its end mark."""
        sentences = []
        for row in rows:
            tokens = list(row)
            if END in tokens:
                tokens = tokens[: tokens.index(END)]
            sentences.append(str(self._tokenizer.decode(tokens, skip_special_tokens=True)).strip())
        return sentences


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise RequestError(
            "parallel text needs the tokenizers library: pip install 'nlbench[translation]'"
        ) from error
    return tokenizers
