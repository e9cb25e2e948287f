"""Text files, tokenized for the model being measured and cut into windows."""

from __future__ import annotations

import glob
import itertools
import os
import platform
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from nlbench.citation import Source
from nlbench.errors import RequestError, system_text
from nlbench.options import Option
from nlbench.registry import Family
from nlbench.serialization.versions import files_version
from nlbench.subjects.data import Sample, dataset
from nlbench.subjects.tokenizer import BYTES, Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

STANDARD_LIBRARY = "python"

GROUP_COUNTS = (20, 4, 2, 1)
"""Numbers of groups to try; 20 suits the folds of `r2` (5), `linearity` (4), `substitution` (2)."""

TEST_PERIOD = 4
"""Every fourth file belongs to the test split."""

PARTS_OF_ONE_FILE = GROUP_COUNTS[0] * TEST_PERIOD
MAX_CHARACTERS = 2**23
"""Maximum length of a split's text, which takes a few seconds to tokenize."""

OPTIONS = {
    "windows": Option(40, "maximum number of windows per split", minimum=2, maximum=100_000),
    "length": Option(64, "tokens per window", minimum=4, maximum=2**17),
}


class Text(Family):
    """Text files by path, and the source of Python's standard library."""

    description = "text/PATH: a text file, folder or glob, tokenized for the model; text/python"

    def names(self) -> Sequence[str]:
        """Return the only text that every machine has. Paths can't be listed."""
        return (STANDARD_LIBRARY,)

    def matches(self, pattern: str) -> Sequence[str]:
        """Return the pattern itself if it matches any file. The files form one dataset."""
        return (pattern,) if _glob(pattern) else ()

    def describe(self, name: str) -> str:
        """Return a one-line description."""
        is_library = name == STANDARD_LIBRARY
        text = "Source of Python's standard library" if is_library else f"Text of {name}"
        return f"{text}, tokenized for the model."

    def load(self, name: str) -> Callable[..., TextWindows]:
        """Return the function that opens the text."""
        files = tuple(text_files(name))
        build = partial(TextWindows, f"text/{name}", files)
        build.__doc__ = self.describe(name)
        if name == STANDARD_LIBRARY:
            return dataset(options=OPTIONS, version=f"Python {platform.python_version()}")(build)
        return dataset(options=OPTIONS, fingerprint=lambda **_: files_version(files))(build)


def text_files(name: str) -> list[Path]:
    """List the non-empty files of the dataset ``text/NAME``.

    NAME is ``python``, a glob, or the path of a file or a folder (including subfolders, excluding
    hidden files).
    """
    path = Path(_expand(name))
    if name == STANDARD_LIBRARY:
        files = list(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    elif path.is_dir():
        inside = path.rglob("*")
        files = [p for p in inside if not any(n[0] == "." for n in p.relative_to(path).parts)]
    else:
        files = [path] if path.is_file() else _glob(name)
    files = sorted(p for p in files if p.is_file() and p.stat().st_size)
    if not files:
        raise RequestError(
            f"text/{name}: no text files found; expected the path of a text file, a folder or a "
            f"glob, or text/{STANDARD_LIBRARY}"
        )
    return files


def _expand(name: str) -> str:
    return os.path.expanduser(name)  # noqa: PTH111 - Path.expanduser raises for unknown users


def _glob(pattern: str) -> list[Path]:
    # Path.glob doesn't accept absolute patterns.
    return [Path(path) for path in glob.glob(_expand(pattern), recursive=True)]  # noqa: PTH207


@dataclass(frozen=True)
class TextWindows:
    """Windows of equal length from packed text files, ordered so that folds share no file.

    Every fourth file belongs to the test split. The files of a split form g groups of about equal
    size, whose texts are joined and cut into windows. Sample i is from group i mod g, so that folds
    i mod k contain different files for each k that divides g. There are 20 groups unless there is
    little text or there are few files. A single file is cut into 80 parts, which are treated as
    files.

    Parameters
    ----------
    windows : int
        Maximum number of windows per split, spread evenly over each group.
    length : int
        Tokens per window, including special tokens.
    """

    name: str
    files: tuple[Path, ...]
    windows: int
    length: int
    tokenizer: Tokenizer = BYTES

    def tokenized(self, tokenizer: Tokenizer) -> TextWindows:
        """Return the same text, tokenized with `tokenizer`."""
        return replace(self, tokenizer=tokenizer)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a window."""
        return (self.length,)

    @property
    def classes(self) -> int:
        """Size of the vocabulary."""
        return self.tokenizer.size

    @property
    def source(self) -> Source:
        """Source of the text."""
        is_library = self.name == f"text/{STANDARD_LIBRARY}"
        return Source("Python's standard library" if is_library else self.name)

    @property
    def preprocessing(self) -> str:
        """Description of the windows."""
        version = platform.python_version() if self.name == f"text/{STANDARD_LIBRARY}" else ""
        count = len(self.files)
        files = "one file in 80 parts" if count == 1 else f"{count} files"
        return (
            f"{files}{version and f' of Python {version}'}, every fourth for test; at most "
            f"{self.windows} windows of {self.length} tokens ({self.tokenizer.name}) a split, in "
            f"{len(self._test)} groups of {'parts' if count == 1 else 'files'} that alternate"
        )

    def normalize(self, inputs: Tensor) -> Tensor:
        """Return the tokens unchanged."""
        return inputs

    def sample(self, count: int | None, *, split: str = "test", seed: int = 0) -> Sample:
        """Sample windows without replacement, taking the groups of files in turn."""
        import torch

        if split not in ("test", "train"):
            raise RequestError(f"{self.name} has no split '{split}'; expected test or train")
        groups = self._test if split == "test" else self._train
        generator = torch.Generator().manual_seed(seed)
        drawn = [group[torch.randperm(len(group), generator=generator)] for group in groups]
        rounds = itertools.zip_longest(*drawn)
        limit = self.windows if count is None else min(count, self.windows)
        rows = torch.stack([row for each in rounds for row in each if row is not None][:limit])
        if not self.tokenizer.predicts_next:
            return Sample(rows, rows, None)
        inputs = rows[:, :-1].contiguous()
        return Sample(inputs, inputs, rows[:, 1:].contiguous())

    @cached_property
    def _test(self) -> list[Tensor]:
        return self._windows([0])

    @cached_property
    def _train(self) -> list[Tensor]:
        return self._windows(range(1, TEST_PERIOD))

    def _windows(self, remainders: Sequence[int]) -> list[Tensor]:
        """Cut files whose index modulo TEST_PERIOD is in `remainders`, with a tensor per group."""
        import torch

        tokenizer = self.tokenizer
        is_causal = self.tokenizer.predicts_next
        start, end = tokenizer.start, () if is_causal else tokenizer.end
        # The label of the last token is the token after the window.
        size = self.length + is_causal - len(start) - len(end)
        if size < 1:
            minimum = len(start + end) + 1 - is_causal
            raise RequestError(
                f"{self.name}: text.length is {self.length}, expected at least {minimum}"
            )
        texts = [[*p, *tokenizer.separator] for p in tokenizer.encode(self._texts(remainders))]
        for group_count in GROUP_COUNTS:
            groups = [list(itertools.chain(*group)) for group in _balance(texts, group_count)]
            # Groups take turns, so the first ones may provide one more window.
            fitting = min(len(tokens) // size * group_count + i for i, tokens in enumerate(groups))
            if fitting >= max(2, group_count):
                break
        else:
            raise RequestError(
                f"{self.name}: the text is too short for two windows of {self.length} tokens per "
                f"split; reduce text.length"
            )
        count = min(self.windows, fitting)
        windows = []
        for i, tokens in enumerate(groups):
            rows = max(1, -(-(count - i) // group_count))
            starts = [len(tokens) // size * j // rows * size for j in range(rows)]
            windows.append(torch.tensor([[*start, *tokens[s : s + size], *end] for s in starts]))
        return windows

    def _texts(self, remainders: Sequence[int]) -> list[str]:
        """Read the files of a split, or cut the only file."""
        if len(self.files) == 1:
            text = _read(self.files[0], MAX_CHARACTERS * TEST_PERIOD)
            size = -(-len(text) // PARTS_OF_ONE_FILE)
            parts = [text[i : i + size] for i in range(0, len(text), size)]
            return [part for i, part in enumerate(parts) if i % TEST_PERIOD in remainders]
        files = [path for i, path in enumerate(self.files) if i % TEST_PERIOD in remainders]
        return [_read(path, MAX_CHARACTERS // len(files)) for path in files]


def _read(path: Path, limit: int) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(max(limit, 1))
    except OSError as error:
        raise RequestError(f"can't read {path}: {system_text(error)}") from error
    if "\0" in text:
        raise RequestError(
            f"{path} is not text: it contains null bytes; use a glob to select only text files"
        )
    return text


def _balance(texts: Sequence[list[int]], count: int) -> list[list[list[int]]]:
    """Assign texts, longest first, each to the group that is shortest so far.

    Examples
    --------
    >>> _balance([[1], [2, 2, 2], [3, 3], [4, 4]], 2)
    [[[1], [2, 2, 2]], [[3, 3], [4, 4]]]
    """
    groups: list[list[int]] = [[] for _ in range(count)]
    lengths = [0] * count
    for index in sorted(range(len(texts)), key=lambda i: -len(texts[i])):
        shortest = lengths.index(min(lengths))
        groups[shortest].append(index)
        lengths[shortest] += len(texts[index])
    folds = []
    for group in groups:
        folds.append([texts[i] for i in sorted(group)])
    return folds
