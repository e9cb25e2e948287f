"""Batches of a dataset's items, augmented, and prefetched in the background."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from nlbench.errors import RequestError
from nlbench.introspection.random_state import rng_state
from nlbench.introspection.threads import overlap_pays, torch_threads
from nlbench.subjects.data import Items, read_items

T = TypeVar("T")
_END = object()


def batches(
    items: Items, order: Tensor, batch_size: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of images, of shape (b, *shape), and labels, of shape (b,), on the CPU.

    The items are read in the given order, each batch while `device` processes the previous one.

    Examples
    --------
    >>> from nlbench.models.datasets.digits import digits
    >>> cpu = torch.device("cpu")
    >>> [len(labels) for _, labels in batches(digits().test, torch.arange(300), 128, cpu)]
    [128, 128, 44]
    """
    starts = range(0, len(order), batch_size)
    indices = (order[start : start + batch_size].tolist() for start in starts)
    return prefetch((_stack(items, batch) for batch in indices), device)


def _stack(items: Items, indices: list[int]) -> tuple[Tensor, Tensor]:
    images, labels = zip(*read_items(items, indices), strict=True)
    return torch.stack(images), torch.tensor([int(label) for label in labels])


def prefetch(values: Iterator[T], device: torch.device) -> Iterator[T]:
    """Yield an iterator's values in order, computing each while the caller uses the previous one.

    If computing the first value draws from a global random generator, as a dataset with its own
    augmentation does, all are computed in the caller's thread. Otherwise the results of a network
    with dropout, which draws from the same generator, would depend on timing.

    Examples
    --------
    >>> list(prefetch(iter("abc"), torch.device("cpu")))
    ['a', 'b', 'c']
    """
    before = rng_state(device)
    first = next(values, _END)
    if first is _END:
        return
    if not overlap_pays(device) or rng_state(device) != before:
        yield first  # type: ignore[misc]
        yield from values
        return
    with torch_threads(), ThreadPoolExecutor(1, thread_name_prefix="reader") as reader:
        # Two PyTorch thread pools would compete for the same cores.
        reader.submit(torch.set_num_threads, 1).result()
        value: T | object = first
        while value is not _END:
            following = reader.submit(next, values, _END)
            yield value  # type: ignore[misc]
            value = following.result()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the CPU to a device, without synchronising with a GPU."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def augment(images: Tensor, shift: int, flip: bool, generator: torch.Generator) -> Tensor:
    """Shift and flip each image of (n, channels, height, width) independently.

    All integers from -shift to shift are equally likely along either axis, and a flip is horizontal
    with probability 0.5. Pixels shifted in from outside are 0, black before the normalisation.

    References
    ----------
    M. Gamba et al. Are All Linear Regions Created Equal? AISTATS, 2022, appendix A.

    Examples
    --------
    >>> image = torch.zeros(1, 1, 5, 5)
    >>> image[0, 0, 2, 2] = 1
    >>> shifted = augment(image, 2, True, torch.Generator().manual_seed(0))
    >>> shifted.shape, shifted.sum().item()
    (torch.Size([1, 1, 5, 5]), 1.0)
    """
    if images.ndim != 4:
        raise RequestError(
            f"augmentation requires images of shape (n, channels, height, width), "
            f"got {tuple(images.shape)}"
        )
    n, _, height, width = images.shape
    if shift:
        shifts = torch.randint(0, 2 * shift + 1, (2, n, 1), generator=generator)
        rows, columns = (shifts + torch.arange(size) for size in (height, width))
        padded = functional.pad(images, (shift,) * 4)
        image = torch.arange(n)[:, None, None]
        images = padded[image, :, rows[0, :, :, None], columns[1, :, None, :]].permute(0, 3, 1, 2)
    if flip:
        is_flipped = torch.rand(n, generator=generator) < 0.5
        images = torch.where(is_flipped[:, None, None, None], images.flip(3), images)
    return images.contiguous()
