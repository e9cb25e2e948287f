"""Samples that come one batch after another, of which only a few are kept."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from nlbench.errors import RequestError
from nlbench.subject import Subject

__all__ = ["Batches", "StreamedSubject", "batch_sizes", "rebatched", "sample_facts"]


class Batches:
    """A loader's batches, gone through once.

    Parameters
    ----------
    loader : iterable
        Yields tensors (n, ...), alone or as the first of a tuple or list. It may be one that
        can be iterated only once.

    Examples
    --------
    >>> stream = Batches([torch.zeros(3, 2), torch.ones(2, 2)])
    >>> stream.head(4).shape, stream.known_length
    (torch.Size([4, 2]), 5)
    >>> sum(len(batch) for batch in stream), stream.samples
    (5, 5)
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._batches = iter(loader)
        self._kept: list[Tensor] = []
        self._shape: torch.Size | None = None
        self._hash: Any = None
        self.samples = 0
        self.error: RequestError | None = None

    @property
    def known_length(self) -> int | None:
        """Number of samples, where the loader says it before it is gone through."""
        if isinstance(self._loader, DataLoader):
            has_samples = self._loader.batch_size is not None and not self._loader.drop_last
            try:
                return len(self._loader.sampler) if has_samples else None  # type: ignore[arg-type]
            except TypeError:
                return None
        if isinstance(self._loader, list | tuple):
            return sum(len(_samples_of(batch)) for batch in self._loader)
        return None

    def head(self, count: int) -> Tensor:
        """Give the first samples, up to so many; they come again when the stream is read.

        Raises
        ------
        nlbench.RequestError
            If what the loader yields can't be used.
        """
        while sum(map(len, self._kept)) < count and (batch := self._next()) is not None:
            self._kept.append(batch)
        if not self._kept:
            raise RequestError("inputs: the loader yields nothing, expected batches of tensors")
        return torch.cat(self._kept)[: max(count, 1)].clone()

    def __iter__(self) -> Iterator[Tensor]:
        """Give all batches once; hash and count them on the way."""
        while True:
            batch = self._kept.pop(0) if self._kept else self._next()
            if batch is None:
                return
            if self._hash is None:
                self._hash = _begun_hash(batch, self.known_length)
            self.samples += len(batch)
            self._hash.update(_bytes_of(batch))
            yield batch

    def facts(self) -> dict[str, Any]:
        """Give the number and the hash of the samples that were read.

        The hash is that of the samples as one tensor where the loader says how many they are
        before it is gone through.
        """
        return {"samples": self.samples, "sample_hash": self._hash.hexdigest()}

    def _next(self) -> Tensor | None:
        try:
            # A copy: some loaders fill one tensor again and again.
            batch = _samples_of(next(self._batches)).clone()
            if self._shape is None:
                self._shape = batch.shape[1:]
            if batch.shape[1:] != self._shape:
                shapes = sorted({tuple(batch.shape[1:]), tuple(self._shape)})
                raise RequestError(f"inputs: the loader yields samples of shapes {shapes}")
            return batch
        except StopIteration:
            return None
        except RequestError as error:
            self.error = error
            raise


def sample_facts(samples: Tensor) -> dict[str, Any]:
    """Give the number and the hash of samples that are all there.

    Examples
    --------
    >>> sorted(sample_facts(torch.zeros(3, 2)))
    ['sample_hash', 'samples']
    """
    digest = _begun_hash(samples, len(samples))
    digest.update(_bytes_of(samples))
    return {"samples": len(samples), "sample_hash": digest.hexdigest()}


def _begun_hash(first: Tensor, length: int | None) -> Any:
    """Begin the hash of `nlbench.subject.tensor_hash`, before all samples are there."""
    shape = ("?" if length is None else length, *first.shape[1:])
    return hashlib.sha256(f"{shape} {first.dtype}".encode())


def _bytes_of(samples: Tensor) -> Any:
    return samples.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def _samples_of(batch: object) -> Tensor:
    if isinstance(batch, tuple | list) and batch:
        batch = batch[0]
    if not isinstance(batch, Tensor):
        kind = type(batch).__name__
        raise RequestError(f"inputs: the loader yields a {kind}, expected batches of tensors")
    if batch.ndim < 2:
        raise RequestError(
            f"inputs: the loader yields a batch of shape {tuple(batch.shape)}, expected (n, ...)"
        )
    return batch


@dataclass(frozen=True)
class StreamedSubject(Subject):
    """A subject whose samples come as a stream; `inputs` are the first of them.

    Parameters
    ----------
    stream : Batches or None
    """

    stream: Batches | None = None


def batch_sizes(samples: int, most: int) -> Sequence[int]:
    """Split a known number of samples into as few batches as possible, of nearly equal size.

    A last batch of a few samples would weigh as much as a full one.

    Examples
    --------
    >>> batch_sizes(258, 128)
    [86, 86, 86]
    """
    parts = -(-samples // most)
    return [samples // parts + (part < samples % parts) for part in range(parts)]


def rebatched(batches: Iterable[Tensor], most: int, known_length: int | None) -> Iterator[Tensor]:
    """Bring a loader's batches to the size that scores are made for.

    Parameters
    ----------
    batches : iterable of tensor
        Of any sizes.
    most : int
        Samples a batch.
    known_length : int or None
        If given the batches are those of `batch_sizes`. Otherwise each has `most` samples, but
        for the end: what is left there and the batch before are split into two.

    Examples
    --------
    >>> [len(batch) for batch in rebatched([torch.zeros(100, 1)] * 3, 128, None)]
    [128, 86, 86]
    """
    sizes = iter(batch_sizes(known_length, most)) if known_length else itertools.repeat(most)
    # With an unknown length a batch is only given away when another full one has come.
    ahead = 0 if known_length else most
    waiting: list[Tensor] = []
    count, size = 0, next(sizes, most)
    for batch in batches:
        waiting.append(batch)
        count += len(batch)
        while count >= size + ahead:
            whole = torch.cat(waiting) if len(waiting) > 1 else waiting[0]
            yield whole[:size]
            waiting = [whole[size:]] if len(whole) > size else []
            count -= size
            size = next(sizes, most)
    if count:
        yield from torch.split(torch.cat(waiting), list(batch_sizes(count, most)))
