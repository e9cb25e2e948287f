"""Items that are made: points, and pictures drawn when asked for, each from its own seed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset as TorchDataset

__all__ = ["Noise", "Patterns", "Points", "prototypes_of", "stream"]


class Points(TorchDataset[tuple[Tensor, int]]):
    """Rows of a tensor, without a label that means anything."""

    def __init__(self, points: Tensor) -> None:
        self._points = points

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._points[index], 0


class Noise(TorchDataset[tuple[Tensor, int]]):
    """Uniform noise in [0, 1] with labels at random, each item from a seed of its own."""

    def __init__(self, shape: tuple[int, ...], classes: int, size: int, seed: int, part: int):
        self._shape = shape
        self._classes = classes
        self._size = size
        self._streams = (seed, part)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = stream(*self._streams, index)
        tensor = torch.rand(self._shape, generator=generator)
        return tensor, int(torch.randint(self._classes, (), generator=generator))


def stream(*parts: int) -> torch.Generator:
    """Give a generator to each combination of numbers from 0 to 2³¹ - 1.

    Combinations that differ in the last number alone never share one. Others may, far apart:
    PyTorch seeds its generator on the CPU with 32 bits.
    """
    state = 0
    for part in parts:
        # A linear congruential step with the constants of Steele and Vigna (2021).
        state = (state * 0xD1342543DE82EF95 + part + 1) % 2**63
    return torch.Generator().manual_seed(state)


class Patterns(TorchDataset[tuple[Tensor, int]]):
    """Pictures of `synthetic`, each drawn from a seed of its own when it is asked for."""

    def __init__(
        self, prototypes: Tensor, size: int, difficulty: float, seed: int, part: int
    ) -> None:
        self._prototypes = prototypes
        self._size = size
        self._difficulty = difficulty
        self._streams = (seed, part)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = stream(*self._streams, index)
        classes, _, side, _ = self._prototypes.shape
        label = index % classes
        reach = side // 8
        down, right = torch.randint(-reach, reach + 1, (2,), generator=generator).tolist()
        figure = self._prototypes[label].roll((down, right), dims=(1, 2))
        clutter = _fields(1, self._prototypes.shape[1:], generator)[0]
        grain = torch.randn(figure.shape, generator=generator)
        d = self._difficulty
        mixed = (
            math.sqrt(1 - d) * figure + math.sqrt(0.8 * d) * clutter + math.sqrt(0.2 * d) * grain
        )
        return (0.5 + mixed / 6).clamp(0, 1), label


def _fields(count: int, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Smooth random pictures of mean 0 and variance 1: coarse noise, enlarged."""
    channels, side, _ = shape
    coarse = torch.randn(count, channels, 5, 5, generator=generator)
    fine = functional.interpolate(coarse, size=(side, side), mode="bicubic", align_corners=True)
    axes = (1, 2, 3)
    return (fine - fine.mean(axes, keepdim=True)) / fine.std(axes, keepdim=True)


def prototypes_of(classes: int, shape: Sequence[int], seed: int) -> Tensor:
    """One smooth pattern a class, (classes, *shape), for `Patterns`."""
    return _fields(classes, shape, stream(seed, 2))
