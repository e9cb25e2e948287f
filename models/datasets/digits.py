"""The handwritten digits of scikit-learn, which need no download."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from nlbench.citation import Source
from nlbench.errors import RequestError
from nlbench.subjects.data import Dataset
from nlbench.subjects.samples import InMemoryItems

TEST_IMAGES = 512


def digits() -> Dataset:
    """1,797 handwritten digits as 32×32 images with three identical channels.

    The 8×8 images of scikit-learn, with values from 0 to 16, are divided by 16 and enlarged by
    bilinear interpolation. 512 of them, drawn by NumPy's legacy generator (whose stream is
    frozen), are the test split, the other 1,285 the training split. Mean and standard deviation
    come from the enlarged training images: 0.3054 and 0.3242 for each channel.

    References
    ----------
    E. Alpaydin, C. Kaynak. Optical Recognition of Handwritten Digits. UCI Machine
    Learning Repository, 1998.

    Examples
    --------
    >>> data = digits()
    >>> len(data.train), len(data.test), data.train[0][0].shape
    (1285, 512, torch.Size([3, 32, 32]))
    """
    table = np.loadtxt(_digits_file(), delimiter=",")
    labels = table[:, -1].astype(int)
    small = torch.from_numpy(table[:, :-1]).to(torch.float32).reshape(-1, 1, 8, 8) / 16
    large = functional.interpolate(
        small, size=(32, 32), mode="bilinear", align_corners=False, antialias=False
    )
    images = large.expand(-1, 3, -1, -1).contiguous()
    # RandomState is guaranteed never to change, unlike the splitters of scikit-learn and torch.
    order = np.random.RandomState(0).permutation(len(images))
    test = _take(images, labels, order[:TEST_IMAGES])
    train = _take(images, labels, order[TEST_IMAGES:])
    pixels = train.rows[:, 0].to(torch.float64)
    return Dataset(
        name="digits",
        train=train,
        test=test,
        shape=(3, 32, 32),
        classes=10,
        mean=(pixels.mean().item(),) * 3,
        std=(pixels.std(correction=0).item(),) * 3,
        preprocessing=(
            "8x8 grey images divided by 16 to [0, 1], enlarged to 32x32 by bilinear interpolation "
            "(align_corners=False, no antialiasing), copied to 3 equal channels; test split: the "
            "first 512 of numpy RandomState(0).permutation(1797), training split: the other 1285; "
            "normalised per channel by mean and standard deviation of the training split"
        ),
        source=Source(
            "E. Alpaydin, C. Kaynak. Optical Recognition of Handwritten Digits. "
            "UCI Machine Learning Repository, 1998. doi:10.24432/C50P49; "
            "the 1,797 images of scikit-learn's load_digits"
        ),
    )


def _digits_file() -> Path:
    # Importing scikit-learn takes a second.
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise RequestError("data 'digits' needs scikit-learn, which is not installed")
    return Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"


def _take(images: Tensor, labels: np.ndarray, indices: np.ndarray) -> InMemoryItems:
    return InMemoryItems(images[torch.from_numpy(indices)], labels[indices].tolist())
