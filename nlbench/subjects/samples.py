"""A subject's samples: held in memory, or read anew for each pass where they are too many."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from nlbench.errors import RequestError
from nlbench.serialization.hashing import SampleHash, tensor_hash

from .data import Data, Dataset, Sample
from .inputs import Arguments, BatchReader

__all__ = [
    "HELD",
    "Batches",
    "DrawnBatches",
    "batch_sizes",
    "draw",
    "rebatched",
    "sample_facts",
]


class Batches:
    """A loader's batches, gone through once.

    Parameters
    ----------
    loader : iterable
        It may be one that can be iterated only once.
    reader : BatchReader, optional
        Takes apart what it yields; by default for a model of one argument.

    Examples
    --------
    >>> stream = Batches([torch.zeros(3, 2), torch.ones(2, 2)])
    >>> stream.head(4).shape, stream.known_length
    (torch.Size([4, 2]), 5)
    >>> sum(len(batch) for batch in stream), stream.samples
    (5, 5)
    """

    def __init__(self, loader: Iterable[Any], reader: BatchReader | None = None) -> None:
        self._loader = loader
        self._reader = reader or BatchReader(nn.Identity(), None)
        self._batches = iter(loader)
        self._kept: list[Tensor] = []
        self._labels: list[Tensor | None] = []
        self._hash: SampleHash | None = None
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
            return sum(len(self._reader.read(batch)[0]) for batch in self._loader)
        return None

    @property
    def arguments(self) -> Arguments:
        """How the model is called with a batch; known once the head was read."""
        assert self._reader.arguments is not None
        return self._reader.arguments

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

    def head_labels(self, count: int) -> Tensor | None:
        """Give the labels of the samples that `head` gives; None where one batch has none."""
        given = [labels for labels in self._labels if labels is not None]
        whole = len(given) == len(self._labels) and given
        return torch.cat(given)[: max(count, 1)] if whole else None

    def __iter__(self) -> Iterator[Tensor]:
        """Give all batches once; hash and count them on the way."""
        self._labels.clear()
        while True:
            batch = self._kept.pop(0) if self._kept else self._next()
            if batch is None:
                return
            if self._hash is None:
                self._hash = SampleHash(self.known_length)
            self.samples += len(batch)
            self._hash.update(batch)
            yield batch

    def hexdigest(self) -> str:
        """Give the hash of the samples that were read."""
        return self._hash.hexdigest() if self._hash else ""

    def _next(self) -> Tensor | None:
        try:
            batch, labels = self._reader.read(next(self._batches))
        except StopIteration:
            return None
        except RequestError as error:
            self.error = error
            raise
        if self._hash is None:
            self._labels.append(labels)
        # A copy: some loaders fill one tensor again and again.
        return batch.clone()


def sample_facts(samples: Tensor, stream: Batches | None = None) -> dict[str, Any]:
    """Give the number and the hash of samples; of a stream that isn't read yet, of the first.

    The hash is that of the samples as one tensor where a stream's loader says how many they are
    before it is gone through.

    Examples
    --------
    >>> sorted(sample_facts(torch.zeros(3, 2)))
    ['sample_hash', 'samples']
    """
    if stream is not None and stream.samples:
        return {"samples": stream.samples, "sample_hash": stream.hexdigest()}
    return {"samples": len(samples), "sample_hash": tensor_hash(samples)}


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


HELD = 2**30
"""Bytes up to which a sample is held in memory."""

HEAD = 1024
"""How many samples of a larger one are held, for what isn't fed batch by batch."""

BATCH = 128


class DrawnBatches(Batches):
    """A dataset's sample, read anew, batch by batch, each time it is gone through.

    Parameters
    ----------
    dataset : Dataset
    count, split, seed
        See `Dataset.sample`.
    model : torch.nn.Module
        Its precision is that of the batches.

    Raises
    ------
    nlbench.RequestError
        At the end of going through it, if it gave other samples than the first time.
    """

    def __init__(
        self, dataset: Dataset, count: int | None, split: str, seed: int, model: nn.Module
    ) -> None:
        super().__init__(())
        self._dataset = dataset
        self._which = count, split, seed
        self._model = model
        self.samples = dataset.count(count, split)

    @property
    def known_length(self) -> int:
        """Number of samples."""
        return self.samples

    @property
    def _dtype(self) -> torch.dtype:
        floats = (p.dtype for p in self._model.parameters() if p.is_floating_point())
        return next(floats, torch.float32)

    def __iter__(self) -> Iterator[Tensor]:
        """Give all batches."""
        for part in self.parts():
            yield part.inputs.to(self._dtype)

    def labelled(self, most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Give all batches with their labels, at most so many samples each."""
        for part in self.parts():
            assert part.labels is not None
            inputs = part.inputs.to(self._dtype)
            yield from zip(torch.split(inputs, most), torch.split(part.labels, most), strict=True)

    def parts(self) -> Iterator[Sample]:
        """Give all samples with their images and labels."""
        count, split, seed = self._which
        digest = SampleHash(self.samples)
        for part in self._dataset.stream(count, split=split, seed=seed, batch=BATCH):
            digest.update(part.inputs)
            yield part
        if self._hash is not None and self.hexdigest() != digest.hexdigest():
            raise RequestError(
                f"{self._dataset.name}: reading the samples again gave others; its files may have "
                "changed, or it draws at random"
            )
        self._hash = digest


def draw(
    dataset: Data,
    count: int | None,
    *,
    split: str,
    seed: int,
    model: nn.Module,
    held: int = HELD,
) -> tuple[Sample, DrawnBatches | None]:
    """Draw a subject's samples; the model isn't run.

    Parameters
    ----------
    dataset : Data
        Only a `Dataset` can be read batch by batch.
    count, split, seed
        See `Data.sample`.
    model : torch.nn.Module
        Its precision is that of a stream's batches.
    held : int
        Bytes up to which all of them are held.

    Returns
    -------
    sample : Sample
        All of them; of a stream, the first.
    stream : DrawnBatches or None
        All inputs, where they aren't held; it can be gone through again and again.

    Raises
    ------
    nlbench.RequestError
        If they can't be read.
    """
    if not isinstance(dataset, Dataset) or dataset.bytes_of(count, split) <= held:
        return dataset.sample(count, split=split, seed=seed), None
    stream = DrawnBatches(dataset, count, split, seed, model)
    first: list[Sample] = []
    for index, part in enumerate(stream.parts()):
        if index * BATCH < HEAD:
            first.append(part)
    labels = [part.labels for part in first if part.labels is not None]
    head = Sample(
        torch.cat([part.images for part in first]),
        torch.cat([part.inputs for part in first]),
        torch.cat(labels) if labels else None,
    )
    return head, stream
