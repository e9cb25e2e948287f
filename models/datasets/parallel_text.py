"""Parallel text: sentence pairs as integer tensors, with the vocabulary that reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nlbench.errors import RequestError
from nlbench.measure import Source
from nlbench.options import Option
from nlbench.serialization.files import read_text
from nlbench.subjects.data import Sample, dataset
from nlbench.subjects.load import header_of

__all__ = [
    "END",
    "PAD",
    "START",
    "UNKNOWN",
    "Pairs",
    "ParallelText",
    "Vocabulary",
    "make_parallel",
    "parallel",
]


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
        text = read_text(path)
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


@dataclass(frozen=True)
class Pairs:
    """Sentence pairs of one split, in words and in tokens.

    Parameters
    ----------
    sources, targets : tuple of str
    inputs : integer tensor of shape (n, 2, length)
        The source with its end mark; and the start mark with the target.
    wanted : integer tensor of shape (n, length)
        The target with its end mark: at each place the token that comes next; then -100, where
        nothing is to be predicted.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    inputs: Tensor
    wanted: Tensor


@dataclass(frozen=True)
class ParallelText:
    """Sentence pairs for a network that translates.

    Its inputs are integer tensors of shape (n, 2, length), so that a subject's inputs are
    one tensor: ``[:, 0]`` the source, ``[:, 1]`` the target shifted by one, filled with 0.

    Parameters
    ----------
    name : str
    train, test : Pairs
    shape : tuple of int
        (2, length).
    classes : int
        Size of the vocabulary.
    vocabulary : Vocabulary
    bleu_tokens : str
        How BLEU cuts a sentence, a name that sacrebleu knows.
    preprocessing : str
    source : Source
    """

    name: str
    train: Pairs
    test: Pairs
    shape: tuple[int, int]
    classes: int
    vocabulary: Vocabulary
    bleu_tokens: str
    preprocessing: str
    source: Source = field(default_factory=lambda: Source(""))

    def normalize(self, inputs: Tensor) -> Tensor:
        """Tokens stay what they are."""
        return inputs

    def split(self, name: str) -> Pairs:
        """Give the split called ``train`` or ``test``."""
        if name not in ("train", "test"):
            raise RequestError(f"{self.name} has no split '{name}'; there are: test, train")
        return self.train if name == "train" else self.test

    def sample(self, count: int | None, *, split: str = "test", seed: int = 0) -> Sample:
        """Draw pairs without replacement; the same ones for the same seed.

        Labels are the tokens wanted.
        """
        pairs = self.split(split)
        size = len(pairs.inputs)
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
        chosen = order[: size if count is None else count]
        inputs = pairs.inputs[chosen]
        return Sample(inputs, inputs, pairs.wanted[chosen])

    def check_weights(self, metadata: Mapping[str, str]) -> None:
        """Refuse weights that were trained under another vocabulary.

        Raises
        ------
        nlbench.RequestError
            If a checkpoint's metadata has another one.
        """
        theirs = metadata.get("vocabulary", self.vocabulary.text)
        if theirs != self.vocabulary.text:
            raise RequestError(
                f"the weights were trained under another vocabulary than that of {self.name}; give "
                "the options of their training, or parallel.vocabulary_of=CHECKPOINT"
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
    """Make a dataset of sentence pairs.

    Parameters
    ----------
    name : str
    train, test : sequence of (str, str)
    vocabulary : int or Vocabulary
        A size: the vocabulary is learnt from the training pairs.
    length : int
        Most tokens of a sentence, without marks; pairs with a longer one are left out.
    bleu_tokens, origin, source
        See `ParallelText`; `origin` goes into the preprocessing.

    Raises
    ------
    nlbench.RequestError
        If a split is empty.
    """
    words = (
        vocabulary
        if isinstance(vocabulary, Vocabulary)
        else Vocabulary.learnt((text for pair in train for text in pair), vocabulary)
    )
    made, left_out = {}, 0
    for split, pairs in (("train", train), ("test", test)):
        sources, targets = (words.encode([pair[side] for pair in pairs]) for side in (0, 1))
        fits = [
            i
            for i in range(len(pairs))
            if max(len(sources[i]), len(targets[i])) <= length and sources[i] and targets[i]
        ]
        left_out += len(pairs) - len(fits)
        if not fits:
            raise RequestError(
                f"{name}: the {split} split has no pair of 1 to {length} tokens a sentence"
            )
        made[split] = Pairs(
            tuple(pairs[i][0] for i in fits),
            tuple(pairs[i][1] for i in fits),
            torch.stack(
                [
                    _padded([[*sources[i], END] for i in fits], length + 1),
                    _padded([[START, *targets[i]] for i in fits], length + 1),
                ],
                dim=1,
            ),
            _padded([[*targets[i], END] for i in fits], length + 1, -100),
        )
    return ParallelText(
        name=name,
        train=made["train"],
        test=made["test"],
        shape=(2, length + 1),
        classes=words.size,
        vocabulary=words,
        bleu_tokens=bleu_tokens,
        preprocessing=(
            f"{origin}; byte-pair vocabulary of {words.size} tokens, hash {words.hash[:12]}; "
            f"sentences filled up to {length + 1} tokens, {left_out} pairs left out as empty or "
            f"longer than {length}"
        ),
        source=source,
    )


def _padded(rows: Sequence[Sequence[int]], length: int, filler: int = PAD) -> Tensor:
    return torch.tensor([[*row, *[filler] * (length - len(row))] for row in rows], dtype=torch.long)


@dataset(
    options={
        "source": Option("", "file of sentences, one a line"),
        "target": Option("", "file of their translations, line by line"),
        "test": Option(0.1, "share of the pairs that are the test split", minimum=0, maximum=1),
        "seed": Option(0, "decides the split", minimum=0, maximum=2**32 - 1),
        "vocabulary": Option(8000, "size of the vocabulary of both languages", minimum=16),
        "vocabulary_of": Option("", "checkpoint or tokenizer file whose vocabulary is used"),
        "length": Option(64, "most tokens of a sentence; longer pairs are left out", minimum=2),
        "bleu": Option("13a", "how BLEU cuts a sentence: 13a, char, intl, zh, none"),
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
    r"""Sentence pairs of two text files, one sentence a line.

    Empty lines of both files are left out. The split is drawn by NumPy's legacy generator,
    whose stream is frozen; the vocabulary is learnt from the training split, unless that of a
    checkpoint is named.

    Raises
    ------
    nlbench.RequestError
        If a file is missing or can't be read, or they have different numbers of lines.

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
            f"parallel: {len(pairs)} pairs, {count} of them for test; both splits need some"
        )
    order = np.random.RandomState(seed).permutation(len(pairs)).tolist()
    return make_parallel(
        "parallel",
        [pairs[i] for i in order[count:]],
        [pairs[i] for i in order[:count]],
        vocabulary=Vocabulary.of_file(Path(vocabulary_of)) if vocabulary_of else vocabulary,
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
            "parallel needs two text files, one sentence a line: "
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
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"parallel: can't read {path}: {reason}") from error
    # Not splitlines: it also cuts at characters that may stand inside a sentence.
    return [line.strip() for line in text.removesuffix("\n").split("\n")]
