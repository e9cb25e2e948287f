"""A subject's samples: held in memory, or read anew for each pass where they are too many."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nlbench.batches import Batches
from nlbench.data import Data, Dataset, Sample
from nlbench.errors import RequestError
from nlbench.probes.sites import evaluation_mode
from nlbench.subject import tensor_hash

__all__ = ["HELD", "Drawn", "draw"]

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
        `nlbench.subject.tensor_hash` of all inputs.
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
