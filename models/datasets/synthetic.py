"""Generated data: noise of any shape, and labelled images of random patterns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nlbench.errors import RequestError, shorten
from nlbench.options import Option
from nlbench.parsers import parse_index
from nlbench.subjects.data import Dataset, dataset

if TYPE_CHECKING:
    from torch import Generator, Tensor

MAX_ITEMS = 10**8
MAX_ELEMENTS = 2**28
"""Maximum size of one tensor, or of the patterns of all classes: 1 GiB."""

SEED = Option(0, "seed for the data, independent of the run's seed", minimum=0, maximum=2**31 - 1)


@dataset(
    options={
        "shape": Option("3x32x32", "shape of one tensor, such as 3x224x224 or 16"),
        "classes": Option(10, "number of classes", minimum=1, maximum=1_000_000),
        "size": Option(2048, "tensors per split", minimum=1, maximum=MAX_ITEMS),
        "seed": SEED,
    }
)
def random_tensors(
    shape: str = "3x32x32", classes: int = 10, size: int = 2048, seed: int = 0
) -> Dataset:
    """Random tensors of any shape: independent uniform numbers without meaningful labels.

    Normalised to mean 0 and variance 1. Each tensor is generated on access from its own seed, so a
    larger `size` appends tensors without changing the others, and needs no memory.

    Examples
    --------
    >>> random_tensors("1x8x8").sample(4).inputs.shape
    torch.Size([4, 1, 8, 8])
    """
    import torch

    from .items import generated_items

    lengths = parse_shape("random", shape)

    def draw(index: int, generator: Generator) -> tuple[Tensor, int]:
        tensor = torch.rand(lengths, generator=generator)
        return tensor, int(torch.randint(classes, (), generator=generator))

    return Dataset(
        name="random",
        train=generated_items(draw, size, seed, 0),
        test=generated_items(draw, size, seed, 1),
        shape=lengths,
        classes=classes,
        mean=(0.5,) * lengths[0],
        std=(math.sqrt(1 / 12),) * lengths[0],
        preprocessing=(
            f"uniform noise in [0, 1], {size} tensors of shape {shape} a split, seed {seed}; "
            "normalised to mean 0 and variance 1"
        ),
        labelled=False,
    )


def parse_shape(owner: str, text: str, count: int = 1) -> tuple[int, ...]:
    """Parse the shape of a tensor, and check the total size of `count` such tensors.

    Examples
    --------
    >>> parse_shape("random", "3x32x32")
    (3, 32, 32)
    """
    parts = text.lower().replace("×", "x").split("x")
    lengths = tuple(parse_index(part) or 0 for part in parts)
    if not all(0 < length < 2**20 for length in lengths):
        raise RequestError(
            f"{owner}.shape: expected lengths such as 3x32x32 or 16, got '{shorten(text)}'"
        )
    elements = count * math.prod(lengths)
    if elements > MAX_ELEMENTS:
        tensors = f"{text} has" if count == 1 else f"{count:,} of {text} have"
        raise RequestError(
            f"{owner}.shape: {tensors} {elements:,} elements, expected at most {MAX_ELEMENTS:,}"
        )
    return lengths


@dataset(
    options={
        "size": Option(4096, "training images", minimum=1, maximum=MAX_ITEMS),
        "test_size": Option(1024, "test images", minimum=1, maximum=MAX_ITEMS),
        "classes": Option(10, "number of classes", minimum=2, maximum=10_000),
        "channels": Option(3, "channels of an image", minimum=1, maximum=64),
        "image_size": Option(32, "side of an image in pixels", minimum=8, maximum=1024),
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
    """Synthetic images whose number, classes, resolution and difficulty can be set.

    Each class has a smooth random pattern P: 5×5 Gaussian noise, enlarged by bicubic interpolation,
    with mean 0 and variance 1. An image of difficulty d is the sum of sqrt(1 - d) P', where P' is P
    rolled by up to an eighth of the image, sqrt(0.8 d) times another random pattern, and
    sqrt(0.2 d) times Gaussian noise per pixel. It is divided by 6, shifted by 0.5 and clamped to
    [0, 1]. So d is the fraction of the variance that has no information about the class.

    Images are generated on access from their own seeds, so a larger `size` appends images without
    changing the others, and needs no memory. Classes alternate.

    Examples
    --------
    >>> data = synthetic(classes=4, image_size=16)
    >>> data.sample(8).inputs.shape, data.classes
    (torch.Size([8, 3, 16, 16]), 4)
    """
    import torch

    from .items import generated_items, item_generator

    shape = (channels, image_size, image_size)
    if classes * math.prod(shape) > MAX_ELEMENTS:
        raise RequestError(
            f"synthetic: {classes:,} classes of {channels}x{image_size}x{image_size} have "
            f"{classes * math.prod(shape):,} elements, expected at most {MAX_ELEMENTS:,}"
        )
    patterns = _smooth_patterns(classes, shape, item_generator(seed, 2))
    max_shift = image_size // 8
    d = difficulty

    def draw(index: int, generator: Generator) -> tuple[Tensor, int]:
        label = index % classes
        down, right = torch.randint(-max_shift, max_shift + 1, (2,), generator=generator).tolist()
        pattern = patterns[label].roll((down, right), dims=(1, 2))
        clutter = _smooth_patterns(1, shape, generator)[0]
        noise = torch.randn(shape, generator=generator)
        image = (
            math.sqrt(1 - d) * pattern + math.sqrt(0.8 * d) * clutter + math.sqrt(0.2 * d) * noise
        )
        return (0.5 + image / 6).clamp(0, 1), label

    return Dataset(
        name="synthetic",
        train=generated_items(draw, size, seed, 0),
        test=generated_items(draw, test_size, seed, 1),
        shape=shape,
        classes=classes,
        mean=(0.5,) * channels,
        std=(1 / 6,) * channels,
        preprocessing=(
            f"{classes} smooth patterns, moved, with clutter: difficulty {difficulty:g}, {size} "
            f"training and {test_size} test images of {image_size}x{image_size}, seed {seed}; "
            "normalised by 0.5 and 1/6"
        ),
    )


def _smooth_patterns(count: int, shape: Sequence[int], generator: Generator) -> Tensor:
    """Draw smooth random patterns of mean 0 and variance 1 by enlarging coarse noise."""
    import torch
    from torch.nn import functional

    channels, side, _ = shape
    coarse = torch.randn(count, channels, 5, 5, generator=generator)
    fine = functional.interpolate(coarse, size=(side, side), mode="bicubic", align_corners=True)
    axes = (1, 2, 3)
    return (fine - fine.mean(axes, keepdim=True)) / fine.std(axes, keepdim=True)
