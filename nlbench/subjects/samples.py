"""A subject's samples: in memory or, if they don't fit, read again for each pass."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import Dataset as TorchDataset

from nlbench.errors import RequestError
from nlbench.introspection.distinct_rows import DistinctRows
from nlbench.serialization.hashing import SampleHash, tensor_hash

from .data import Data, Dataset, Sample
from .inputs import BatchReader

MAX_SAMPLE_BYTES = 2**30
"""Size in bytes above which a sample is read batch by batch."""

HEAD_SAMPLES = 1024
"""Number of samples from a stream kept in memory, for probes that don't read in batches."""

READ_BATCH = 128

ReadBatch: TypeAlias = tuple[Tensor, Tensor | None]
"""The inputs of a batch, and its labels if there are any."""


class InMemoryItems(TorchDataset[tuple[Tensor, int]]):
    """Rows of a tensor with their labels, which are 0 if there are none."""

    def __init__(self, rows: Tensor, labels: Any = None) -> None:
        self.rows = rows
        no_labels = torch.zeros(len(rows), dtype=torch.int64)
        self.labels = no_labels if labels is None else torch.as_tensor(labels)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.rows[index], int(self.labels[index])

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Return several rows."""
        chosen = torch.as_tensor(indices)
        return list(zip(self.rows[chosen], self.labels[chosen].tolist(), strict=True))

    def read_labels(self) -> list[int]:
        """Return all labels."""
        return [int(label) for label in self.labels]


def joined(parts: Iterable[ReadBatch]) -> ReadBatch:
    """Join batches. They have labels if all of them do."""
    inputs, labels = zip(*parts, strict=True)
    has_labels = all(each is not None for each in labels)
    return torch.cat(inputs), torch.cat(labels) if has_labels else None


class Batches:
    """The batches of a loader, which is read only once.

    By default, they are for a model with one argument. `read` returns the inputs and the labels of
    a batch. `is_drawn` is True if the loader yields its samples in random order.

    Examples
    --------
    >>> stream = Batches([torch.zeros(3, 2), torch.ones(2, 2)])
    >>> stream.head(4).shape, stream.known_length
    (torch.Size([4, 2]), 5)
    >>> sum(len(batch) for batch in stream), stream.samples
    (5, 5)
    """

    def __init__(
        self,
        loader: Iterable[Any],
        read: Callable[[Any], ReadBatch] | None = None,
        is_drawn: bool = False,
    ) -> None:
        self._loader = loader
        self._read = read or BatchReader(nn.Identity(), None).read
        self._batches = iter(loader)
        self.is_drawn = is_drawn
        self._buffered: list[Tensor] = []
        self._labels: list[Tensor | None] = []
        self._hash: SampleHash | None = None
        self.samples = 0
        self.error: RequestError | None = None

    @property
    def known_length(self) -> int | None:
        """Number of samples, if known before the loader is read."""
        loader = self._loader
        if isinstance(loader, list | tuple):
            return sum(len(self._read(batch)[0]) for batch in loader)
        if not isinstance(loader, DataLoader):
            return None
        if self.is_drawn:
            return sum(map(len, loader.batch_sampler))  # type: ignore[arg-type]
        if loader.batch_size is None or loader.drop_last:
            return None
        with contextlib.suppress(TypeError):
            return len(loader.sampler)  # type: ignore[arg-type]
        return None

    def head(self, count: int) -> Tensor:
        """Return the first samples, at most `count`, and buffer them for the iteration."""
        while sum(map(len, self._buffered)) < count and (batch := self._next()) is not None:
            self._buffered.append(batch)
        if not self._buffered:
            raise RequestError("inputs: the loader yields nothing; expected batches of tensors")
        return torch.cat(self._buffered)[: max(count, 1)].clone()

    def exceeds(self, count: int) -> bool:
        """Return False if the stream is known to have no more than `count` samples."""
        known = self.samples or self.known_length
        return known is None or known > count

    def head_labels(self, count: int) -> Tensor | None:
        """Return the labels of the samples returned by `head`. Return None if a batch has none."""
        if not self._labels or any(labels is None for labels in self._labels):
            return None
        return torch.cat(self._labels)[: max(count, 1)]  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Tensor]:
        """Yield all batches, counting and hashing them."""
        self._labels.clear()
        while True:
            batch = self._buffered.pop(0) if self._buffered else self._next()
            if batch is None:
                return
            if self._hash is None:
                self._hash = SampleHash(self.known_length)
            self.samples += len(batch)
            self._hash.update(batch)
            yield batch

    def hexdigest(self) -> str:
        """Return the hash of the samples read so far."""
        return self._hash.hexdigest() if self._hash else ""

    def _next(self) -> Tensor | None:
        try:
            batch, labels = self._read(next(self._batches))
        except StopIteration:
            return None
        except RequestError as error:
            self.error = error
            raise
        if self._hash is None:
            self._labels.append(labels)
        # Some loaders reuse the same tensor for all batches.
        return batch.clone()


def random_order(count: int, seed: int) -> Tensor:
    """Return a permutation of `count` samples."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def sample_order(samples: Tensor, seed: int) -> Tensor:
    """Return a random order of samples, in which copies of earlier samples come last.

    Copies don't change the order of the others.

    Examples
    --------
    >>> sample_order(torch.tensor([[1.0], [2.0], [1.0]]), seed=1).tolist()[-1]
    2
    """
    is_copy = DistinctRows().add(samples).is_copy
    parts = [torch.nonzero(mask)[:, 0] for mask in (~is_copy, is_copy)]
    return torch.cat([part[random_order(len(part), seed)] for part in parts])


def drawn_batches(
    loader: Iterable[Any],
    read: Callable[[Any], ReadBatch],
    seed: int,
    max_bytes: int = MAX_SAMPLE_BYTES,
) -> Batches:
    """Read the samples of a finite loader in random order, and those of a stream in its own.

    A DataLoader with a sampler draws them itself. Batches of other loaders that have a length are
    drawn in memory, up to `max_bytes`.

    Examples
    --------
    >>> data = torch.utils.data.TensorDataset(torch.arange(6.0)[:, None])
    >>> for loader in (DataLoader(data, batch_size=4), [data[:4], data[4:]]):
    ...     batches = drawn_batches(loader, lambda batch: (batch[0], None), seed=0)
    ...     print(batches.is_drawn, torch.cat(list(batches)).flatten().long().tolist())
    True [2, 5, 3, 0, 1, 4]
    True [2, 5, 3, 0, 1, 4]
    """
    try:
        len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError, AttributeError):
        return Batches(loader, read)
    if isinstance(loader, DataLoader):
        has_indices = not isinstance(loader.dataset, IterableDataset)
        if has_indices and loader.batch_sampler is not None:
            return Batches(_shuffled(loader, seed), read, is_drawn=True)
    batches = iter(loader)
    parts: list[ReadBatch] = []
    size = 0
    for inputs, labels in map(read, batches):
        # Some loaders reuse the same tensor for all batches.
        parts.append((inputs.clone(), labels))
        size += inputs.nbytes
        if size > max_bytes:
            rest = map(read, batches)
            return Batches(itertools.chain(parts, rest), lambda part: part)
    if not parts:
        return Batches((), read)
    inputs, labels = joined(parts)
    chosen = torch.split(sample_order(inputs, seed), READ_BATCH)
    drawn = [(inputs[part], None if labels is None else labels[part]) for part in chosen]
    return Batches(drawn, lambda part: part, is_drawn=True)


def _shuffled(loader: DataLoader[Any], seed: int) -> DataLoader[Any]:
    """Return a loader of the same samples in random order."""
    indices = drawn_indices(loader)
    order = torch.split(random_order(len(indices), seed), loader.batch_size or READ_BATCH)
    batches = []
    for part in order:
        if len(part):
            batches.append([indices[index] for index in part])
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
    )


def drawn_indices(loader: DataLoader[Any]) -> list[Any]:
    """Return the indices of one pass of a loader's sampler, in its order.

    Examples
    --------
    >>> data = torch.utils.data.TensorDataset(torch.zeros(5, 1))
    >>> drawn_indices(DataLoader(data, batch_size=2, drop_last=True))
    [0, 1, 2, 3]
    """
    batches: Any = loader.batch_sampler
    with contextlib.suppress(TypeError, NotImplementedError):
        batches = itertools.islice(batches, len(batches))  # A sampler may be endless.
    return list(itertools.chain.from_iterable(batches))


def sample_facts(samples: Tensor, stream: Batches | None = None) -> dict[str, Any]:
    """Return the number and hash of samples, or of the first ones if the stream is unread.

    If a stream's length is known in advance, its hash equals that of its samples in one tensor.

    Examples
    --------
    >>> sorted(sample_facts(torch.zeros(3, 2)))
    ['sample_hash', 'samples']
    """
    if stream is not None and stream.samples:
        return {"samples": stream.samples, "sample_hash": stream.hexdigest()}
    return {"samples": len(samples), "sample_hash": tensor_hash(samples)}


def batch_sizes(samples: int, limit: int) -> Sequence[int]:
    """Split a number of samples into the fewest possible batches, of nearly equal size.

    In a mean over batches, a small last batch would have the same weight as a full one.

    Examples
    --------
    >>> batch_sizes(258, 128)
    [86, 86, 86]
    """
    parts = -(-samples // limit)
    return [samples // parts + (part < samples % parts) for part in range(parts)]


def rebatched(batches: Iterable[Tensor], limit: int, known_length: int | None) -> Iterator[Tensor]:
    """Yield batches of nearly equal size from batches of any size.

    If the length is known, the sizes are those returned by `batch_sizes`. Otherwise, each batch
    has `limit` samples, except for the last two, whose sizes are nearly equal.

    Examples
    --------
    >>> [len(batch) for batch in rebatched([torch.zeros(100, 1)] * 3, 128, None)]
    [128, 86, 86]
    """
    sizes = iter(batch_sizes(known_length, limit)) if known_length else itertools.repeat(limit)
    # If the length is unknown, a batch is yielded only after another full one has been read.
    lookahead = 0 if known_length else limit
    buffered: list[Tensor] = []
    count = 0
    size = next(sizes, limit)
    for batch in batches:
        buffered.append(batch)
        count += len(batch)
        while count >= size + lookahead:
            joined = torch.cat(buffered) if len(buffered) > 1 else buffered[0]
            yield joined[:size]
            buffered = [joined[size:]] if len(joined) > size else []
            count -= size
            size = next(sizes, limit)
    if count:
        yield from torch.split(torch.cat(buffered), list(batch_sizes(count, limit)))


def in_model_precision(model: nn.Module, inputs: Tensor) -> Tensor:
    """Convert floats to the type of a model's parameters. Integers, such as tokens, stay.

    Examples
    --------
    >>> in_model_precision(nn.Linear(1, 1).double(), torch.ones(1, 1)).dtype
    torch.float64
    """
    floats = (p.dtype for p in model.parameters() if p.is_floating_point())
    return inputs.to(next(floats, torch.float32)) if inputs.is_floating_point() else inputs


class DrawnBatches(Batches):
    """A sample from a dataset, read again in each iteration, in batches of the model's precision.

    An iteration raises at its end if the samples differ from those of the first one.
    """

    def __init__(
        self, dataset: Dataset, count: int | None, split: str, seed: int, model: nn.Module
    ) -> None:
        super().__init__(())
        self._dataset = dataset
        self._selection = count, split, seed
        self._model = model
        self.samples = dataset.count(count, split)

    @property
    def known_length(self) -> int:
        """Number of samples."""
        return self.samples

    def __iter__(self) -> Iterator[Tensor]:
        """Yield all batches."""
        for part in self.parts():
            yield in_model_precision(self._model, part.inputs)

    def labelled(self, limit: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all samples and their labels, in batches of at most `limit`."""
        for part in self.parts():
            assert part.labels is not None
            inputs = in_model_precision(self._model, part.inputs)
            yield from zip(torch.split(inputs, limit), torch.split(part.labels, limit), strict=True)

    def parts(self) -> Iterator[Sample]:
        """Yield all samples, including images and labels, in batches."""
        count, split, seed = self._selection
        digest = SampleHash(self.samples)
        for part in self._dataset.stream(count, split=split, seed=seed, batch=READ_BATCH):
            digest.update(part.inputs)
            yield part
        if self._hash is not None and self.hexdigest() != digest.hexdigest():
            raise RequestError(
                f"{self._dataset.name}: the samples changed between two passes; either the files "
                "changed or the items are random"
            )
        self._hash = digest


def draw(
    dataset: Data,
    count: int | None,
    *,
    split: str,
    seed: int,
    model: nn.Module,
    max_bytes: int = MAX_SAMPLE_BYTES,
) -> tuple[Sample, DrawnBatches | None]:
    """Draw a subject's samples, without running the model.

    If they exceed `max_bytes`, the sample has the first ones, and a stream has all. Only a
    `Dataset` can be read batch by batch, in the model's precision.
    """
    if not isinstance(dataset, Dataset) or dataset.bytes_of(count, split) <= max_bytes:
        return dataset.sample(count, split=split, seed=seed), None
    stream = DrawnBatches(dataset, count, split, seed, model)
    # All are read once, which records their hash.
    first = [part for i, part in enumerate(stream.parts()) if i * READ_BATCH < HEAD_SAMPLES]
    inputs, labels = joined((part.inputs, part.labels) for part in first)
    head = Sample(torch.cat([part.images for part in first]), inputs, labels)
    return head, stream
