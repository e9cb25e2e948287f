"""Save, restore, seed and compare the global random generators of Python, NumPy and PyTorch."""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random import MT19937


def rng_state(device: torch.device) -> bytes:
    """Return the state of all global random generators, for comparison with a later one.

    Examples
    --------
    >>> cpu = torch.device("cpu")
    >>> before = rng_state(cpu)
    >>> _ = torch.zeros(3)
    >>> rng_state(cpu) == before
    True
    >>> _ = torch.rand(3)
    >>> rng_state(cpu) == before
    False
    """
    states = random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002
    return pickle.dumps((*states, *(g.get_state().numpy() for g in torch_generators(device))))


def torch_generators(device: torch.device) -> list[torch.Generator]:
    """Return PyTorch's global generators: the CPU's and, for a GPU, the device's."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    elif device.type == "mps":
        generators.append(torch.mps._get_default_mps_generator())
    return generators


@contextmanager
def preserve_rng_state(device: torch.device) -> Iterator[None]:
    """Restore the state of all global random generators on exit.

    This includes the second of each pair of normal deviates that NumPy draws, which swapping its
    bit generator, as `RandomStream` does, would lose.
    """
    python, arrays = random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002
    states = [(generator, generator.get_state()) for generator in torch_generators(device)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        random.setstate(python)
        np.random.set_state(arrays)  # noqa: NPY002


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed PyTorch's generators, and restore the CPU generator on exit."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class RandomStream:
    """A named stream of random numbers, drawn through the global generators.

    While the stream is active, Python's, NumPy's and PyTorch's global generators, and that of a
    GPU, are in a state derived from the stream's name, unless it is empty. The next activation
    continues where the last one ended. Between activations, the generators are in their original
    state.

    Examples
    --------
    >>> first, again = RandomStream("cell"), RandomStream("cell")
    >>> with first.active():
    ...     a, b = torch.rand(1), torch.rand(1)
    >>> with again.active():
    ...     c = torch.rand(1)
    >>> with again.active():
    ...     d = torch.rand(1)
    >>> bool(a == c), bool(b == d)
    (True, True)
    """

    def __init__(self, name: str, device: torch.device | None = None) -> None:
        self._generators: list[torch.Generator] = []
        if not name:
            return
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
        self._generators = torch_generators(device or torch.device("cpu"))
        self._states: tuple[Any, ...] = (
            [torch.Generator(g.device).manual_seed(seed).get_state() for g in self._generators],
            MT19937(seed),
            random.Random(seed).getstate(),
        )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make the global generators draw from this stream, and restore them on exit."""
        if not self._generators:
            yield
            return
        before = self._exchange(self._states)
        try:
            yield
        finally:
            self._states = self._exchange(before)

    def _exchange(self, states: tuple[Any, ...]) -> tuple[Any, ...]:
        before = (
            [generator.get_state() for generator in self._generators],
            # By reference: copying NumPy's state at each update of each measure would take
            # longer than the update of many measures.
            np.random.get_bit_generator(),  # type: ignore[attr-defined]
            random.getstate(),
        )
        for generator, state in zip(self._generators, states[0], strict=True):
            generator.set_state(state)
        np.random.set_bit_generator(states[1])  # type: ignore[attr-defined]
        random.setstate(states[2])
        return before
