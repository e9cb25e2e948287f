"""Crops of the two photographs that scikit-learn ships."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nlbench.citation import Source
from nlbench.options import Option
from nlbench.subjects.data import Dataset, Preprocessing, dataset

from .images import IMAGENET_PREPROCESSING
from .items import IndexedItems

FILES = ("china.jpg", "flower.jpg")
MIN_RELATIVE_SIDE = 0.15
"""Smallest side of a random crop, relative to the shorter side of a photograph."""


@cache
def _photographs() -> tuple[Image.Image, ...]:
    from sklearn.datasets import load_sample_image

    return tuple(Image.fromarray(load_sample_image(name)) for name in FILES)


def crops(count: int, seed: int, preprocessing: Preprocessing) -> IndexedItems:
    """Return square crops at random positions and scales. The first two are photographs' centres.

    Examples
    --------
    >>> crops(2, 0, IMAGENET_PREPROCESSING)[1][0].shape
    torch.Size([3, 224, 224])
    """
    draws = np.random.RandomState(seed).uniform(size=(count, 3))
    sides = MIN_RELATIVE_SIDE * (1 / MIN_RELATIVE_SIDE) ** draws[:, :1]
    boxes = np.concatenate([sides, draws[:, 1:]], axis=1)
    # Central crops keep the same fraction of the image as the preprocessing.
    boxes[: len(FILES)] = preprocessing.crop / preprocessing.resize, 0.5, 0.5
    size = (preprocessing.crop, preprocessing.crop)
    resampling = Image.Resampling[preprocessing.interpolation.upper()]

    def read(index: int) -> tuple[Tensor, int]:
        photograph = _photographs()[index % len(FILES)]
        relative_side, *position = boxes[index]
        side = relative_side * min(photograph.size)
        left, top = (
            p * (length - side) for p, length in zip(position, photograph.size, strict=True)
        )
        crop = photograph.resize(size, resampling, (left, top, left + side, top + side))
        return torch.from_numpy(np.asarray(crop, dtype=np.float32) / 255).permute(2, 0, 1), 0

    return IndexedItems(read, count)


@dataset(
    options={
        "count": Option(128, "crops per split", minimum=2, maximum=100_000),
        "seed": Option(0, "seed for the positions and scales", minimum=0, maximum=2**31 - 1),
    }
)
def photographs(count: int = 128, seed: int = 0) -> Dataset:
    """Crops of two photographs, a temple and a flower, included in scikit-learn.

    Side and normalisation are those that the model's weights expect, else 224 pixels as for
    ImageNet. Positions and scales are drawn by NumPy's legacy generator, but the first two crops of
    each split are the centres of the two photographs. There are no labels.

    Examples
    --------
    >>> photographs().sample(2).inputs.shape
    torch.Size([2, 3, 224, 224])
    """

    def preprocess(steps: Preprocessing) -> Dataset:
        return Dataset(
            "photographs",
            crops(count, 2 * seed + 1, steps),
            crops(count, 2 * seed, steps),
            shape=(3, steps.crop, steps.crop),
            classes=1000,
            mean=steps.mean,
            std=steps.std,
            preprocessing=(
                f"{count} square crops of scikit-learn's {' and '.join(FILES)}, resized to "
                f"{steps.crop} pixels ({steps.interpolation}, antialiased), seed {seed}; "
                f"divided by 255; normalised per channel by mean {steps.mean} and standard "
                f"deviation {steps.std}"
            ),
            source=Source("two photographs of scikit-learn's load_sample_images, CC BY 2.0"),
            labelled=False,
            adapt=preprocess,
        )

    return preprocess(IMAGENET_PREPROCESSING)
