"""Datasets of token rows: windows of text, for the tokenizer of a network."""

from __future__ import annotations

import importlib
import platform
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nlbench.citation import Source
from nlbench.errors import RequestError, nearest
from nlbench.options import Option
from nlbench.registry import Family
from nlbench.subjects.data import Sample, dataset

from .catalogue import MEMBERS

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["StandardLibraryText", "TokenRows"]


@dataclass(frozen=True)
class TokenRows:
    """Rows of tokens of equal length, without padding.

    Parameters
    ----------
    name : str
    rows : mapping of str to integer tensor of shape (n, length)
        By split.
    classes : int
        Size of the vocabulary.
    preprocessing : str
    source : Source
    labels : mapping of str to integer tensor of shape (n, length), optional
        The next token at each position.
    """

    name: str
    rows: Mapping[str, Tensor]
    classes: int
    preprocessing: str
    source: Source = field(default_factory=lambda: Source(""))
    labels: Mapping[str, Tensor] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a row."""
        return tuple(self.rows["test"].shape[1:])

    def normalize(self, inputs: Tensor) -> Tensor:
        """Return the tokens unchanged."""
        return inputs

    def sample(self, count: int | None, *, split: str = "test", seed: int = 0) -> Sample:
        """Draw rows without replacement."""
        import torch

        if split not in self.rows:
            raise RequestError(f"{self.name} has no split '{split}'; expected test or train")
        rows = self.rows[split]
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count]
        labels = None if self.labels is None else self.labels[split][order]
        return Sample(rows[order], rows[order], labels)


class StandardLibraryText(Family):
    """Python's standard library as text, for the tokenizer of a network in the zoo."""

    description = "source of Python's standard library, as tokens of a network in the zoo"

    def names(self) -> Sequence[str]:
        """Return the networks with a tokenizer of text."""
        return tuple(_WINDOWS)

    def describe(self, name: str) -> str:
        """Return a description in one line."""
        return f"{self.description}: {name}"

    def load(self, name: str) -> Callable[..., TokenRows]:
        """Return the function that builds the dataset.

        Raises
        ------
        nlbench.RequestError
            If there is no such tokenizer.
        """
        if name not in _WINDOWS:
            hint = nearest(name, _WINDOWS, "stdlib-text/")
            raise RequestError(f"there is no dataset 'stdlib-text/{name}'{hint}")

        def build(windows: int = _WINDOWS[name], length: int = 64) -> TokenRows:
            return _windows_of_text(name, windows, length)

        build.__doc__ = f"Source of Python's standard library, as tokens of {name}."
        return dataset(
            options={
                "windows": Option(
                    _WINDOWS[name], "windows of each split", minimum=1, maximum=100_000
                ),
                "length": Option(64, "tokens of a window", minimum=4, maximum=8192),
            },
            version=f"Python {platform.python_version()}",
        )(build)


# Defaults: a window of SmolLM2 takes six times the time of one of MiniLM.
_WINDOWS = {"smollm2-135m": 32, "minilm-l6": 128}


def _windows_of_text(name: str, windows: int, length: int) -> TokenRows:
    """Cut the files of each split into windows, and choose some, evenly spread."""
    import torch

    member = MEMBERS[name]
    if member.problem:
        raise RequestError(f"stdlib-text/{name}: {member.problem}")
    tokenizer = importlib.import_module(f"{__package__}.{member.module}").tokenizer(
        member.file.verified()
    )
    is_causal = name == "smollm2-135m"
    marks = [] if is_causal else [tokenizer.token_to_id(mark) for mark in ("[CLS]", "[SEP]")]
    # A causal network predicts the token after the window.
    size = length + 1 if is_causal else length - 2
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    rows, labels = {}, {}
    for split, paths in (
        ("test", files[::4]),
        ("train", [f for f in files if f not in files[::4]]),
    ):
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
        pieces = [
            encoding.ids[start : start + size]
            for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)
            for start in range(0, len(encoding.ids) - size + 1, size)
        ]
        if len(pieces) < windows:
            raise RequestError(
                f"stdlib-text/{name}: {windows} windows requested, the {split} split has "
                f"{len(pieces)}"
            )
        table = torch.tensor([pieces[len(pieces) * i // windows] for i in range(windows)])
        if is_causal:
            rows[split], labels[split] = table[:, :-1].contiguous(), table[:, 1:].contiguous()
        else:
            first, last = (torch.full((len(table), 1), mark) for mark in marks)
            rows[split] = torch.cat([first, table, last], dim=1)
    return TokenRows(
        f"stdlib-text/{name}",
        rows,
        tokenizer.get_vocab_size(),
        f"{len(files)} files of Python {platform.python_version()}'s standard library, every "
        f"fourth for test; {windows} windows of {length} tokens of {name}, spread over the files",
        Source("Python's standard library"),
        labels if is_causal else None,
    )
