"""Data made up on the spot: noise of any shape, and pictures that can be learnt."""

from __future__ import annotations

import math

from nlbench.errors import RequestError
from nlbench.measure import Source
from nlbench.options import Option
from nlbench.subjects.data import Dataset, dataset

__all__ = ["lengths_of", "random_tensors", "synthetic"]


MOST_ITEMS = 10**8
MOST_NUMBERS = 2**28
"""Of one tensor, or of the patterns of all classes: 1 GiB."""

SEED = Option(0, "of the data, whatever the run's seed is", minimum=0, maximum=2**31 - 1)


@dataset(
    options={
        "shape": Option("3x32x32", "of one tensor, as 3x224x224 or 16"),
        "classes": Option(10, "number of classes", minimum=1, maximum=1_000_000),
        "size": Option(2048, "tensors in each split", minimum=1, maximum=MOST_ITEMS),
        "seed": SEED,
    }
)
def random_tensors(
    shape: str = "3x32x32", classes: int = 10, size: int = 2048, seed: int = 0
) -> Dataset:
    """Random tensors of any shape: independent uniform numbers, labels that mean nothing.

    Normalised to mean 0 and variance 1. Each tensor is drawn from a seed of its own when
    it is asked for, so a larger `size` keeps the first ones and needs no memory.

    Parameters
    ----------
    shape : str
        Lengths of the axes of one tensor, with ``x`` between.
    classes, size, seed : int
        `size` is that of each split.

    Raises
    ------
    nlbench.RequestError
        If the shape can't be read, or a tensor has more than 2²⁸ numbers.

    Examples
    --------
    >>> random_tensors("1x8x8").sample(4).inputs.shape
    torch.Size([4, 1, 8, 8])
    """
    from .items import Noise

    lengths = lengths_of("random", shape)
    return Dataset(
        name="random",
        train=Noise(lengths, classes, size, seed, 0),
        test=Noise(lengths, classes, size, seed, 1),
        shape=lengths,
        classes=classes,
        mean=(0.5,) * lengths[0],
        std=(math.sqrt(1 / 12),) * lengths[0],
        preprocessing=(
            f"uniform noise in [0, 1], {size} tensors of shape {shape} a split, seed {seed}; "
            "normalised to mean 0 and variance 1"
        ),
        source=Source(""),
        labelled=False,
    )


def lengths_of(owner: str, text: str, count: int = 1) -> tuple[int, ...]:
    """Read the lengths of a tensor's axes, of which so many are held at once.

    Raises
    ------
    nlbench.RequestError
        If they can't be read, or all have more than 2²⁸ numbers.

    Examples
    --------
    >>> lengths_of("random", "3x32x32")
    (3, 32, 32)
    """
    parts = text.lower().replace("×", "x").split("x")
    if not all(part.isascii() and part.isdecimal() and 0 < int(part) < 2**20 for part in parts):
        raise RequestError(f"{owner}.shape: expected lengths such as 3x32x32 or 16, got '{text}'")
    lengths = tuple(int(part) for part in parts)
    numbers = count * math.prod(lengths)
    if numbers > MOST_NUMBERS:
        which = text if count == 1 else f"{count:,} of {text}"
        has = "has" if count == 1 else "have"
        raise RequestError(
            f"{owner}.shape: {which} {has} {numbers:,} numbers, expected at most {MOST_NUMBERS:,}"
        )
    return lengths


@dataset(
    options={
        "size": Option(4096, "training images", minimum=1, maximum=MOST_ITEMS),
        "test_size": Option(1024, "test images", minimum=1, maximum=MOST_ITEMS),
        "classes": Option(10, "number of classes", minimum=2, maximum=10_000),
        "channels": Option(3, "channels of an image", minimum=1, maximum=64),
        "image_size": Option(32, "pixels a side", minimum=8, maximum=1024),
        "difficulty": Option(0.7, "0: no clutter, 1: nothing to learn", minimum=0, maximum=1),
        "seed": SEED,
    }
)
def synthetic(
    size: int = 4096,
    test_size: int = 1024,
    classes: int = 10,
    channels: int = 3,
    image_size: int = 32,
    difficulty: float = 0.7,
    seed: int = 0,
) -> Dataset:
    """Made-up pictures to learn, of adjustable number, classes, resolution and difficulty.

    Each class has a smooth random pattern P (5×5 normal noise, enlarged by bicubic
    interpolation, mean 0 and variance 1). An image of difficulty d is
    sqrt(1 - d) P', its class's pattern moved by up to an eighth of the image (around the
    edges), plus sqrt(0.8 d) of another such pattern that is drawn for this image alone,
    plus sqrt(0.2 d) of normal noise a pixel; divided by 6, put around 0.5 and clamped to
    [0, 1]. So d is the share of the variance that tells nothing of the class.

    Images are drawn from seeds of their own when they are asked for: a larger `size`
    keeps the first ones and needs no memory. Classes take turns.

    Parameters
    ----------
    size, test_size : int
        Number of images.
    classes, channels, image_size : int
    difficulty : float
        In [0, 1].
    seed : int

    Raises
    ------
    nlbench.RequestError
        If the patterns of all classes have more than 2²⁸ numbers.

    Examples
    --------
    >>> data = synthetic(classes=4, image_size=16)
    >>> data.sample(8).inputs.shape, data.classes
    (torch.Size([8, 3, 16, 16]), 4)
    """
    from .items import Patterns, prototypes_of

    shape = (channels, image_size, image_size)
    if classes * math.prod(shape) > MOST_NUMBERS:
        raise RequestError(
            f"synthetic: {classes:,} classes of {channels}x{image_size}x{image_size} have "
            f"{classes * math.prod(shape):,} numbers, expected at most {MOST_NUMBERS:,}"
        )
    prototypes = prototypes_of(classes, shape, seed)
    return Dataset(
        name="synthetic",
        train=Patterns(prototypes, size, difficulty, seed, 0),
        test=Patterns(prototypes, test_size, difficulty, seed, 1),
        shape=shape,
        classes=classes,
        mean=(0.5,) * channels,
        std=(1 / 6,) * channels,
        preprocessing=(
            f"{classes} smooth patterns, moved, with clutter: difficulty {difficulty:g}, {size} "
            f"training and {test_size} test images of {image_size}x{image_size}, seed {seed}; "
            "normalised by 0.5 and 1/6"
        ),
        source=Source(""),
    )
