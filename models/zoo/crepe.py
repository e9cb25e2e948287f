"""CREPE, a pitch tracker, and tones of known pitch."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from nlbench.citation import Source
from nlbench.options import Option
from nlbench.subjects.data import Dataset, dataset
from nlbench.subjects.samples import InMemoryItems
from nlbench.subjects.weights import read_checkpoint

from .catalogue import Member

BINS = 360
CENTS_PER_BIN = 20
FIRST_CENTS = 1997.3794084376191
"""Pitch of the first bin, in cents above 10 Hz."""

FRAME = 1024
SAMPLE_RATE = 16_000
_CHANNELS = {"tiny": (128, 16, 16, 16, 32, 64), "full": (1024, 128, 128, 128, 256, 512)}


class Crepe(nn.Module):
    """Six convolutions with ReLU, batch norm and max pooling, and a linear layer to 360 bins.

    The published network applies a sigmoid to the bins; this one returns the logits.

    Examples
    --------
    >>> Crepe(_CHANNELS["tiny"])(torch.zeros(2, 1024)).shape
    torch.Size([2, 360])
    """

    def __init__(self, channels: tuple[int, ...]) -> None:
        super().__init__()
        previous = 1
        for depth, width in enumerate(channels, start=1):
            kernel, stride = (512, 4) if depth == 1 else (64, 1)
            self.add_module(f"conv{depth}", nn.Conv1d(previous, width, kernel, stride))
            self.add_module(f"relu{depth}", nn.ReLU())
            self.add_module(f"conv{depth}_BN", nn.BatchNorm1d(width, eps=0.0010000000474974513))
            self.add_module(f"pool{depth}", nn.MaxPool1d(2))
            previous = width
        self.depth = len(channels)
        self.classifier = nn.Linear(4 * previous, BINS)

    def forward(self, sound: Tensor) -> Tensor:
        """Map frames (n, 1024), each of mean 0 and standard deviation 1, to logits (n, 360)."""
        x = sound[:, None]
        for depth in range(1, self.depth + 1):
            x = functional.pad(x, (254, 254) if depth == 1 else (31, 32))
            for name in (f"conv{depth}", f"relu{depth}", f"conv{depth}_BN", f"pool{depth}"):
                x = self.get_submodule(name)(x)
        return self.classifier(x.transpose(1, 2).flatten(1))


def build(member: Member) -> Crepe:
    """Build the network for a member's size, freshly initialised."""
    return Crepe(_CHANNELS[Path(member.file.name).stem])


def read(path: Path) -> dict[str, Tensor]:
    """Read the state dict, and convert the published 2-D convolutions to 1-D.

    On a CPU, the derivative of the first one takes 30 times as long in two dimensions.
    """
    state = read_checkpoint(path)[0]
    return {name: w.squeeze(-1) if w.ndim == 4 else w for name, w in state.items()}


def bin_frequency(bins: Tensor) -> Tensor:
    """Compute the frequency in Hz of CREPE's pitch bins.

    Examples
    --------
    >>> bin_frequency(torch.tensor([0, 359])).round().tolist()
    [32.0, 2005.0]
    """
    return 10 * 2 ** ((FIRST_CENTS + CENTS_PER_BIN * bins) / 1200)


def harmonic_tones(frequency: Tensor, length: int, generator: Generator) -> Tensor:
    """Generate tones of eight harmonics with random amplitudes and phases at 16 kHz.

    Harmonics above half the sampling rate are omitted. Frequencies (n,) in Hz become tones
    (n, length), each of mean 0 and standard deviation 1.
    """
    time = torch.arange(length, dtype=torch.float64) / SAMPLE_RATE
    number = torch.arange(1, 9, dtype=torch.float64)
    harmonics = frequency.to(torch.float64)[:, None] * number
    draws = torch.rand(2, *harmonics.shape, generator=generator, dtype=torch.float64)
    amplitude = draws[0] / number * (harmonics < SAMPLE_RATE / 2)
    amplitude[:, 0] = 1
    phase = 2 * math.pi * (harmonics[..., None] * time + draws[1][..., None])
    sound = (amplitude[..., None] * phase.sin()).sum(1)
    sound = sound - sound.mean(1, keepdim=True)
    return (sound / sound.std(1, keepdim=True)).float()


@dataset(
    options={
        "count": Option(128, "tones per split", minimum=1, maximum=100_000),
        "seed": Option(0, "seed for pitches, amplitudes and phases", minimum=0, maximum=2**32 - 1),
    }
)
def tones(count: int = 128, seed: int = 0) -> Dataset:
    """Tones of known pitch: frames of 1,024 samples at 16 kHz, labelled with CREPE's bin.

    A tone has eight harmonics with random amplitudes and phases. Its frequency is the centre of one
    of 360 bins of 20 cents, from 31.7 Hz to 2,005 Hz, each equally likely.

    Examples
    --------
    >>> tones().sample(4).inputs.shape
    torch.Size([4, 1024])
    """

    def draw(generator: Generator) -> InMemoryItems:
        bins = torch.randint(BINS, (count,), generator=generator)
        return InMemoryItems(harmonic_tones(bin_frequency(bins), FRAME, generator), bins.tolist())

    return Dataset(
        "tones",
        train=draw(Generator().manual_seed(2 * seed + 1)),
        test=draw(Generator().manual_seed(2 * seed)),
        shape=(FRAME,),
        classes=BINS,
        preprocessing=(
            f"{count} tones of eight harmonics at 16 kHz, seed {seed}; each frame of "
            f"{FRAME} samples has mean 0 and standard deviation 1"
        ),
        source=Source("generated by nlbench's own rules"),
    )
