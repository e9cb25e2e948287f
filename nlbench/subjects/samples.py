"""A subject's samples: held in memory, or read anew for each pass where they are too many."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from nlbench.errors import RequestError
from nlbench.probes.model_state import evaluation_mode

from .data import Data, Dataset, Sample
from .load import Subject, tensor_hash

__all__ = [
    "HELD",
    "Batches",
    "Drawn",
    "StreamedSubject",
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
    """Begin the hash of `nlbench.subjects.load.tensor_hash`, before all samples are there."""
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

    def batches(self, most: int) -> Iterable[Tensor]:
        """Give all samples in their order, in batches of nearly equal size."""
        if self.stream is None:
            return super().batches(most)
        return rebatched(self.stream, most, self.stream.known_length)

    def shuffled(self, most: int) -> Iterable[Tensor]:
        """Give them in a random order; of a loader that is gone through once, the first."""
        if isinstance(self.stream, DrawnBatches):
            # Its samples were drawn in a random order.
            return self.batches(most)
        return super().shuffled(most)


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


@dataclass(frozen=True)
class Drawn:
    """The samples of a subject, and what they decide of it.

    Parameters
    ----------
    sample : Sample
        All of them; of a stream, the first.
    stream : Batches or None
        All inputs, where they aren't held; it can be gone through again and again.
    samples : int
        How many there are.
    sample_hash : str
        `nlbench.subjects.load.tensor_hash` of all inputs.
    accuracy : float or None
        Share of them classified right.
    """

    sample: Sample
    stream: Batches | None
    samples: int
    sample_hash: str
    accuracy: float | None


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
        self.sample_hash = ""

    @property
    def known_length(self) -> int:
        """Number of samples."""
        return self.samples

    def __iter__(self) -> Iterator[Tensor]:
        """Give all batches."""
        floats = (p.dtype for p in self._model.parameters() if p.is_floating_point())
        dtype = next(floats, torch.float32)
        for part in self.parts():
            yield part.inputs.to(dtype)

    def parts(self) -> Iterator[Sample]:
        """Give all samples with their images and labels."""
        count, split, seed = self._which
        digest = hashlib.sha256()
        for index, part in enumerate(
            self._dataset.stream(count, split=split, seed=seed, batch=BATCH)
        ):
            if index == 0:
                shape = (self.samples, *part.inputs.shape[1:])
                digest.update(f"{shape} {part.inputs.dtype}".encode())
            digest.update(part.inputs.contiguous().flatten().view(torch.uint8).numpy().tobytes())
            yield part
        found = digest.hexdigest()
        if self.sample_hash not in ("", found):
            raise RequestError(
                f"{self._dataset.name}: reading the samples again gave others; its files may have "
                "changed, or it draws at random"
            )
        self.sample_hash = found


def draw(
    dataset: Data,
    count: int | None,
    *,
    split: str,
    seed: int,
    model: nn.Module,
    device: torch.device,
    held: int = HELD,
) -> Drawn:
    """Draw a subject's samples.

    Parameters
    ----------
    dataset : Data
        Only a `Dataset` can be read batch by batch.
    count, split, seed
        See `Data.sample`.
    model : torch.nn.Module
        In evaluation mode on `device`; classifies them.
    device : torch.device
    held : int
        Bytes up to which all of them are held.

    Raises
    ------
    nlbench.RequestError
        If they can't be read.
    """
    if not isinstance(dataset, Dataset) or dataset.bytes_of(count, split) <= held:
        sample = dataset.sample(count, split=split, seed=seed)
        right = _Right(model, dataset.classes, device)
        if sample.labels is not None:
            parts = (torch.split(t, BATCH) for t in (sample.inputs, sample.labels))
            for inputs, labels in zip(*parts, strict=True):
                right.add(inputs, labels)
        return Drawn(sample, None, len(sample.inputs), tensor_hash(sample.inputs), right.share())
    stream = DrawnBatches(dataset, count, split, seed, model)
    right = _Right(model, dataset.classes, device)
    first: list[Sample] = []
    for index, part in enumerate(stream.parts()):
        right.add(part.inputs, part.labels)
        if index * BATCH < HEAD:
            first.append(part)
    labels = [part.labels for part in first if part.labels is not None]
    head = Sample(
        torch.cat([part.images for part in first]),
        torch.cat([part.inputs for part in first]),
        torch.cat(labels) if labels else None,
    )
    return Drawn(head, stream, stream.samples, stream.sample_hash, right.share())


class _Right:
    """Counts what a model classifies right, by which a reader sees what weights these are.

    There is no such share without labels, and for a model that doesn't give one finite
    logit a class.
    """

    def __init__(self, model: nn.Module, classes: int, device: torch.device) -> None:
        self._model, self._classes, self._device = model, classes, device
        self._right = self._seen = 0
        self._classifies = True

    def add(self, inputs: Tensor, labels: Tensor | None) -> None:
        if labels is None or not self._classifies:
            self._classifies = False
            return
        with evaluation_mode(self._model):
            logits = self._model(inputs.to(self._device, copy=True))
        shape = (len(labels), self._classes)
        self._classifies = (
            isinstance(logits, Tensor)
            and logits.shape == shape
            and bool(torch.isfinite(logits).all())
        )
        if self._classifies:
            self._right += int((logits.argmax(1).cpu() == labels).sum())
            self._seen += len(labels)

    def share(self) -> float | None:
        return self._right / self._seen if self._classifies and self._seen else None
