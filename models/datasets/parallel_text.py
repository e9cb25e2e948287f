"""Parallel text: sentence pairs as integer tensors, with their vocabulary."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nlbench.citation import Source
from nlbench.errors import RequestError
from nlbench.options import Option
from nlbench.serialization.files import read_text
from nlbench.subjects.data import Dataset, dataset
from nlbench.subjects.weights import read_metadata

PAD, START, END, UNKNOWN = range(4)
_SPECIAL_TOKENS = ("[PAD]", "[START]", "[END]", "[UNKNOWN]")


class Vocabulary:
    """Tokens and their indices, for both languages of a corpus.

    They are read from the JSON format of the tokenizers library. The indices 0 to 3 are padding,
    start, end and unknown.

    Examples
    --------
    >>> words = Vocabulary.learn(["one cat", "two cats"], 32)
    >>> words.decode(words.encode(["two cats"]))
    ['two cats']
    """

    def __init__(self, text: str) -> None:
        tokenizers = _library()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:
            # The library raises plain Exception.
            raise RequestError(f"not a vocabulary: {str(error).splitlines()[0][:80]}") from error
        indices = [self._tokenizer.token_to_id(token) for token in _SPECIAL_TOKENS]
        if indices != [PAD, START, END, UNKNOWN]:
            raise RequestError(
                f"the first tokens of the vocabulary are not {', '.join(_SPECIAL_TOKENS)}"
            )
        self.text = text

    @classmethod
    def learn(cls, sentences: Iterable[str], size: int) -> Vocabulary:
        """Learn a byte-pair vocabulary from sentences."""
        tokenizers = _library()
        from tokenizers import decoders, models, pre_tokenizers, trainers

        tokenizer = tokenizers.Tokenizer(models.BPE(unk_token=_SPECIAL_TOKENS[UNKNOWN]))
        # A space becomes part of the following word, so that decoding restores it.
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=list(_SPECIAL_TOKENS), show_progress=False
        )
        tokenizer.train_from_iterator(list(sentences), trainer)
        return cls(tokenizer.to_str())

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Load the vocabulary of a checkpoint, or a tokenizer's JSON file."""
        header = read_metadata(path)
        if "vocabulary" in header:
            return cls(header["vocabulary"])
        if path.suffix == ".safetensors":
            raise RequestError(f"{path} is not a checkpoint with a vocabulary")
        text = read_text(path)
        try:
            return cls(text)
        except RequestError as error:
            raise RequestError(f"{path}: {error}") from error

    @property
    def size(self) -> int:
        """Number of tokens."""
        return int(self._tokenizer.get_vocab_size())

    @property
    def hash(self) -> str:
        """SHA-256 of the vocabulary."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def encode(self, sentences: Sequence[str]) -> list[list[int]]:
        """Return the token indices of each sentence, without special tokens."""
        encodings = self._tokenizer.encode_batch(list(sentences), add_special_tokens=False)
        return [list(encoding.ids) for encoding in encodings]

    def decode(self, rows: Iterable[Sequence[int]]) -> list[str]:
        """Return the sentences, each up to its end token."""
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


@dataclass(frozen=True)
class SentencePairs:
    """Sentence pairs of one split, as text and as tokens.

    Parameters
    ----------
    inputs : integer tensor of shape (n, 2, length)
        The source followed by the end token, and the target preceded by the start token.
    target_tokens : integer tensor of shape (n, length)
        The next token at each position up to the end token, then -100, which the loss ignores.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    inputs: Tensor
    target_tokens: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.target_tokens[index]


@dataclass(frozen=True)
class ParallelText(Dataset):
    """Sentence pairs for a translation network. Both splits are `SentencePairs`.

    Inputs are one integer tensor of shape (n, 2, length), padded with 0: ``[:, 0]`` is the source,
    ``[:, 1]`` the target shifted by one. Labels are the next tokens.
    """

    train: SentencePairs  # type: ignore[assignment]
    test: SentencePairs  # type: ignore[assignment]
    vocabulary: Vocabulary = field(kw_only=True)
    bleu_tokens: str = field(kw_only=True)

    def check_weights(self, metadata: Mapping[str, str]) -> None:
        """Raise if weights were trained with a different vocabulary, by their metadata."""
        vocabulary = metadata.get("vocabulary", self.vocabulary.text)
        if vocabulary != self.vocabulary.text:
            raise RequestError(
                f"the weights were trained with a different vocabulary from that of {self.name}; "
                "use the options they were trained with, or parallel.vocabulary_of=CHECKPOINT"
            )


def make_parallel(
    name: str,
    train: Sequence[tuple[str, str]],
    test: Sequence[tuple[str, str]],
    *,
    vocabulary: int | Vocabulary,
    length: int,
    bleu_tokens: str,
    origin: str,
    source: Source,
) -> ParallelText:
    """Build a dataset of sentence pairs.

    Parameters
    ----------
    vocabulary : int or Vocabulary
        An int is the size of a vocabulary learnt from the training pairs.
    length : int
        Maximum number of tokens per sentence, without special ones; longer pairs are dropped.
    bleu_tokens, origin, source
        See `ParallelText`; `origin` becomes part of the preprocessing.
    """
    words = (
        vocabulary
        if isinstance(vocabulary, Vocabulary)
        else Vocabulary.learn((text for pair in train for text in pair), vocabulary)
    )
    splits = {}
    dropped = 0
    for split, pairs in (("train", train), ("test", test)):
        sources = words.encode([source for source, _ in pairs])
        targets = words.encode([target for _, target in pairs])
        fits = [
            i
            for i in range(len(pairs))
            if max(len(sources[i]), len(targets[i])) <= length and sources[i] and targets[i]
        ]
        dropped += len(pairs) - len(fits)
        if not fits:
            raise RequestError(
                f"{name}: the {split} split has no pair of 1 to {length} tokens per sentence"
            )
        splits[split] = SentencePairs(
            tuple(pairs[i][0] for i in fits),
            tuple(pairs[i][1] for i in fits),
            torch.stack(
                [
                    _pad([[*sources[i], END] for i in fits], length + 1),
                    _pad([[START, *targets[i]] for i in fits], length + 1),
                ],
                dim=1,
            ),
            _pad([[*targets[i], END] for i in fits], length + 1, -100),
        )
    return ParallelText(
        name=name,
        train=splits["train"],
        test=splits["test"],
        shape=(2, length + 1),
        classes=words.size,
        vocabulary=words,
        bleu_tokens=bleu_tokens,
        preprocessing=(
            f"{origin}; byte-pair vocabulary of {words.size} tokens, hash {words.hash[:12]}; "
            f"sentences filled up to {length + 1} tokens, {dropped} pairs left out as empty or "
            f"longer than {length}"
        ),
        source=source,
    )


def _pad(rows: Sequence[Sequence[int]], length: int, filler: int = PAD) -> Tensor:
    return torch.tensor([[*row, *[filler] * (length - len(row))] for row in rows], dtype=torch.long)


@dataset(
    options={
        "source": Option("", "file of sentences, one per line"),
        "target": Option("", "file of their translations, line by line"),
        "test": Option(0.1, "fraction of the pairs in the test split", minimum=0, maximum=1),
        "seed": Option(0, "seed for the split", minimum=0, maximum=2**32 - 1),
        "vocabulary": Option(
            8000, "size of the vocabulary for both languages", minimum=16, maximum=2**20
        ),
        "vocabulary_of": Option("", "checkpoint or tokenizer file with a vocabulary to use"),
        "length": Option(
            64, "maximum tokens per sentence; longer pairs are dropped", minimum=2, maximum=2**17
        ),
        "bleu": Option("13a", "tokenizer for BLEU: 13a, char, intl, zh, none"),
    }
)
def parallel(
    source: str = "",
    target: str = "",
    test: float = 0.1,
    seed: int = 0,
    vocabulary: int = 8000,
    vocabulary_of: str = "",
    length: int = 64,
    bleu: str = "13a",
) -> ParallelText:
    r"""Sentence pairs from two text files, one sentence per line.

    Lines that are empty in both files are dropped. The split is drawn by NumPy's legacy generator,
    whose stream is frozen. The vocabulary is learnt from the training split by default.

    Examples
    --------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "en").write_text("one cat\ntwo cats\n" * 5)
    >>> _ = (folder / "de").write_text("eine Katze\nzwei Katzen\n" * 5)
    >>> parallel(str(folder / "en"), str(folder / "de"), vocabulary=64).shape
    (2, 65)
    """
    pairs = list(zip(*_lines_of_both(source, target), strict=True))
    pairs = [(a, b) for a, b in pairs if a or b]
    count = round(test * len(pairs))
    if not 0 < count < len(pairs):
        raise RequestError(
            f"parallel: the test split would have {count} of {len(pairs)} pairs, expected at least "
            "one pair in each split"
        )
    order = np.random.RandomState(seed).permutation(len(pairs)).tolist()
    return make_parallel(
        "parallel",
        [pairs[i] for i in order[count:]],
        [pairs[i] for i in order[:count]],
        vocabulary=Vocabulary.load(Path(vocabulary_of)) if vocabulary_of else vocabulary,
        length=length,
        bleu_tokens=bleu,
        origin=(
            f"{len(pairs)} pairs of {Path(source).name} and {Path(target).name}; test split: the "
            f"first {count} of numpy RandomState({seed}).permutation"
        ),
        source=Source(f"{Path(source).name}, {Path(target).name}"),
    )


def _lines_of_both(source: str, target: str) -> tuple[list[str], list[str]]:
    if not source or not target:
        raise RequestError(
            "parallel needs two text files, one sentence per line: "
            "--set parallel.source=FILE --set parallel.target=FILE"
        )
    lines = _lines(Path(source)), _lines(Path(target))
    if len(lines[0]) != len(lines[1]):
        raise RequestError(
            f"parallel: {source} has {len(lines[0])} lines and {target} {len(lines[1])}; "
            "expected a translation for each line"
        )
    return lines


def _lines(path: Path) -> list[str]:
    text = read_text(path).removeprefix("\ufeff").replace("\r\n", "\n")
    # str.splitlines would also split at characters that may occur within a sentence.
    return [line.strip() for line in text.removesuffix("\n").split("\n")]
