"""Random numbers that depend on their purpose alone, not on what was drawn before."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random import MT19937

__all__ = ["Stream", "untouched"]


class Stream:
    """The global random generators, as one user of theirs finds them.

    While the stream is drawn from, Python's, NumPy's and PyTorch's global generators (the
    device's too) are in a state that the stream's name decides; the next time they go on from
    where they were left. In between they are what they were before.

    Parameters
    ----------
    name : str
        What the numbers are for; empty: the global generators are left as they are.
    device : torch.device, optional
        A CUDA device whose generator is set beside the CPU's.

    Examples
    --------
    >>> first, again = Stream("cell"), Stream("cell")
    >>> with first.drawn():
    ...     a, b = torch.rand(1), torch.rand(1)
    >>> with again.drawn():
    ...     c = torch.rand(1)
    >>> with again.drawn():
    ...     d = torch.rand(1)
    >>> bool(a == c), bool(b == d)
    (True, True)
    """

    def __init__(self, name: str, device: torch.device | None = None) -> None:
        self._torch: list[torch.Generator] = []
        if not name:
            return
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
        self._torch.append(torch.default_generator)
        if device is not None and device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            index = torch.cuda.current_device() if device.index is None else device.index
            self._torch.append(torch.cuda.default_generators[index])
        self._states: tuple[Any, ...] = (
            [torch.Generator(g.device).manual_seed(seed).get_state() for g in self._torch],
            MT19937(seed),
            random.Random(seed).getstate(),
        )

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Let the global generators give this stream for a while, and set them back after."""
        if not self._torch:
            yield
            return
        before = self._exchange(self._states)
        try:
            yield
        finally:
            self._states = self._exchange(before)

    def _exchange(self, states: tuple[Any, ...]) -> tuple[Any, ...]:
        before = (
            [generator.get_state() for generator in self._torch],
            # A pointer changes hands: copying NumPy's state at every look of every measure
            # would take longer than many a measure.
            np.random.get_bit_generator(),  # type: ignore[attr-defined]
            random.getstate(),
        )
        for generator, state in zip(self._torch, states[0], strict=True):
            generator.set_state(state)
        np.random.set_bit_generator(states[1])  # type: ignore[attr-defined]
        random.setstate(states[2])
        return before


@contextmanager
def untouched() -> Iterator[None]:
    """Set NumPy's global generator back afterwards, with what it keeps beside its state.

    It makes normal deviates in pairs; exchanging the generator loses the second one.
    """
    before = np.random.get_state()  # noqa: NPY002 (the global generator is what is kept)
    try:
        yield
    finally:
        np.random.set_state(before)  # noqa: NPY002
