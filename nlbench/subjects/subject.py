"""A subject, loaded: a model with its weights on a device, and the samples it is looked at with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from nlbench.errors import Undefined

from .facts import SubjectFacts
from .samples import Batches, DrawnBatches, batch_sizes, rebatched

__all__ = ["Subject"]


@dataclass(frozen=True)
class Subject:
    """A model with its weights on a device, and the samples it is looked at with.

    Parameters
    ----------
    model : torch.nn.Module
    inputs : tensor of shape (n, ...)
        What the model is given; of a stream the first samples.
    labels : tensor of shape (n,) or None
    facts : SubjectFacts
    images : tensor or None
        The inputs before normalisation, where they are images.
    normalize : callable
        From such images to inputs.
    stream : Batches or None
        All samples, where they aren't held.

    Examples
    --------
    >>> facts = SubjectFacts(model="relu", weights="none", data="zeros", seed=0)
    >>> subject = Subject(nn.ReLU(), torch.zeros(5, 3), None, facts)
    >>> [len(batch) for batch in subject.batches(2)]
    [2, 2, 1]
    """

    model: nn.Module
    inputs: Tensor
    labels: Tensor | None
    facts: SubjectFacts
    images: Tensor | None = None
    normalize: Callable[[Tensor], Tensor] = field(default=lambda images: images)
    stream: Batches | None = None

    def batches(self, most: int) -> Iterable[Tensor]:
        """Give all samples in their order, in as few batches of nearly equal size as possible."""
        if self.stream is not None:
            return rebatched(self.stream, most, self.stream.known_length)
        return torch.split(self.inputs, list(batch_sizes(len(self.inputs), most)))

    def labelled(self, most: int) -> Iterable[tuple[Tensor, Tensor]]:
        """Give all samples in their order with their labels.

        Raises
        ------
        nlbench.Undefined
            If they have none, or a loader gave them that is gone through once.
        """
        if self.labels is None:
            raise Undefined("the samples have no labels")
        if self.stream is None:
            sizes = list(batch_sizes(len(self.labels), most))
            parts = torch.split(self.inputs, sizes), torch.split(self.labels, sizes)
            return zip(*parts, strict=True)
        if not isinstance(self.stream, DrawnBatches):
            raise Undefined("the labels of a loader are not kept; give samples with labels=")
        return self.stream.labelled(most)

    def shuffled(self, most: int) -> Iterable[Tensor]:
        """Give them in a random order, the same at each call.

        Inputs that come sorted, by class say, would make batches unlike the whole. Of a loader
        that is gone through once they are the first samples; what a dataset's stream gives was
        drawn in a random order.
        """
        if isinstance(self.stream, DrawnBatches):
            yield from self.batches(most)
            return
        order = torch.randperm(len(self.inputs), generator=torch.Generator().manual_seed(0))
        for part in torch.split(order, list(batch_sizes(len(order), most))):
            yield self.inputs[part.to(self.inputs.device)]
