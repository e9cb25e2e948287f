"""Result the training data beside training: the next batch while a step is computed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from nlbench.probes.background import overlap_pays, rng_state
from nlbench.subjects.data import Items, read_items

__all__ = ["ahead", "batches"]


T = TypeVar("T")


def batches(
    items: Items, order: Tensor, batch_size: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Images of shape (b, *shape) and labels of shape (b,), in that order, on the CPU.

    Each batch is read while `device` is busy with the one before.

    Examples
    --------
    >>> from nlbench.models.datasets.digits import digits
    >>> cpu = torch.device("cpu")
    >>> [len(labels) for _, labels in batches(digits().test, torch.arange(300), 128, cpu)]
    [128, 128, 44]
    """
    starts = range(0, len(order), batch_size)
    chosen = (order[start : start + batch_size].tolist() for start in starts)
    return ahead((_stacked(items, indices) for indices in chosen), device)


def _stacked(items: Items, indices: list[int]) -> tuple[Tensor, Tensor]:
    images, labels = zip(*read_items(items, indices), strict=True)
    return torch.stack(images), torch.tensor([int(label) for label in labels])


def ahead(made: Iterator[T], device: torch.device) -> Iterator[T]:
    """Give what an iterator gives, in its order; make each while the caller uses the one before.

    One that draws from a global random generator for the first, as a dataset with augmentation
    of its own does, is left to the caller's thread: beside a network with dropout, which draws
    from it too, the numbers would otherwise depend on timing.

    Examples
    --------
    >>> list(ahead(iter("abc"), torch.device("cpu")))
    ['a', 'b', 'c']
    """
    before = rng_state(device)
    end = object()
    first = next(made, end)
    if first is end:
        return
    if not overlap_pays(device) or rng_state(device) != before:
        yield first  # type: ignore[misc]
        yield from made
        return
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="reader") as reader:
            # Two sets of PyTorch's threads would wait for each other.
            reader.submit(torch.set_num_threads, 1).result()
            found: T | object = first
            while found is not end:
                following = reader.submit(next, made, end)
                yield found  # type: ignore[misc]
                found = following.result()
    finally:
        # What the reader set is also the default of threads to come.
        torch.set_num_threads(threads)
