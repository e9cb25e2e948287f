"""A loaded subject."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from nlbench.errors import Undefined

from .facts import LABELS_LEFT_OUT, SubjectFacts
from .samples import Batches, DrawnBatches, batch_sizes, rebatched


@dataclass(frozen=True)
class Subject:
    """A model with its weights on a device, and the samples on which it is observed.

    Examples
    --------
    >>> facts = SubjectFacts(model="relu", weights="none", data="zeros", seed=0)
    >>> subject = Subject(nn.ReLU(), torch.zeros(5, 3), None, facts)
    >>> [len(batch) for batch in subject.batches(2)]
    [2, 2, 1]
    """

    model: nn.Module
    inputs: Tensor  # (n, ...): inputs to the model; if there is a stream, its first samples
    labels: Tensor | None  # (n,) or None
    facts: SubjectFacts
    images: Tensor | None = None  # images before normalisation
    normalize: Callable[[Tensor], Tensor] = field(default=lambda images: images)
    stream: Batches | None = None  # all samples, if they don't fit in memory
    # True if the model has to run on all samples at once, in their order.
    is_indivisible: bool = False

    def drawn(self, count: int) -> tuple[Tensor, Tensor | None]:
        """Return `count` of the samples in memory, and their images."""
        return self.inputs[:count], None if self.images is None else self.images[:count]

    def batches(self, limit: int) -> Iterable[Tensor]:
        """Return all samples in order, in the fewest possible batches of nearly equal size."""
        if self.stream is not None:
            return rebatched(self.stream, limit, self.stream.known_length)
        return torch.split(self.inputs, self._sizes(limit))

    def _sizes(self, limit: int) -> list[int]:
        """Return the sizes of batches of the samples in memory."""
        count = len(self.inputs)
        return list(batch_sizes(count, count if self.is_indivisible else limit))

    def labelled(self, limit: int) -> Iterable[tuple[Tensor, Any]]:
        """Return the samples as in `repeatable`, with their labels."""
        if self.labels is None:
            is_left_out = LABELS_LEFT_OUT in (self.facts.preprocessing or "")
            raise Undefined(LABELS_LEFT_OUT if is_left_out else "the samples have no labels")
        return self.repeatable(limit)

    def repeatable(self, limit: int) -> Iterable[tuple[Tensor, Tensor | None]]:
        """Return the samples that can be read repeatedly, in order, with their labels if any.

        For a loader that is read only once, these are the first samples.
        """
        if isinstance(self.stream, DrawnBatches):
            if self.labels is not None:
                return self.stream.labelled(limit)
            return ((inputs, None) for inputs in self.batches(limit))
        sizes = self._sizes(limit)
        inputs = torch.split(self.inputs, sizes)
        if self.labels is None:
            return zip(inputs, itertools.repeat(None))
        return zip(inputs, torch.split(self.labels, sizes), strict=True)

    def shuffled(self, limit: int) -> Iterable[Tensor]:
        """Yield the samples in a fixed random order, in batches.

        If inputs are sorted, for example by class, batches in that order are not representative.
        For a loader that is read only once, only the first samples are returned. A dataset's
        stream is already in random order.
        """
        if isinstance(self.stream, DrawnBatches) or self.is_indivisible:
            yield from self.batches(limit)
            return
        order = torch.randperm(len(self.inputs), generator=torch.Generator().manual_seed(0))
        for part in torch.split(order, list(batch_sizes(len(order), limit))):
            yield self.inputs[part.to(self.inputs.device)]

    def converted(self, model: nn.Module, convert: Callable[[Tensor], Tensor]) -> Subject:
        """Return a copy of the subject with another model and converted tensors."""
        tensors = {name: getattr(self, name) for name in ("inputs", "labels", "images")}
        changed: dict[str, Any] = {
            name: None if tensor is None else convert(tensor) for name, tensor in tensors.items()
        }
        return replace(self, model=model, **changed)
