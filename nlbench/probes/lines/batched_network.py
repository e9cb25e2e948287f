"""A network that runs in batches if its samples are independent, otherwise one at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nlbench.errors import NotFinite, RequestError, Undefined, first_line
from nlbench.introspection.memory import bytes_per_sample, halve_on_oom, is_out_of_memory

from .recording.agreement import is_same, run_alone
from .recording.point_memory import PointMemory, share_out

MAX_BATCH_SIZE = 64
MAX_CHECKED_BATCH = 5
"""Maximum size of the batch used to check whether a network mixes samples."""


@dataclass
class BatchedNetwork:
    """A network that is run in batches.

    Parameters
    ----------
    network : torch.nn.Module
    size : int
        Batch size, halved each time memory runs out.
    """

    network: nn.Module
    size: int

    @classmethod
    def of(cls, network: nn.Module, examples: Tensor, memory: int | None = None) -> BatchedNetwork:
        """Determine the batch size: 1 for a network that mixes the samples in a batch.

        Parameters
        ----------
        network : torch.nn.Module
            In eval mode.
        examples : tensor of shape (m, *input)
            At least two inputs, such as those that will be run together.
        memory : int, optional
            Memory limit in bytes; by default half of the free memory.

        Raises
        ------
        nlbench.RequestError, nlbench.NotFinite
            If the network can't be run on the examples, or a single one does not fit in memory.
        nlbench.Undefined
            If its output for one input changes from call to call.

        Examples
        --------
        >>> BatchedNetwork.of(torch.nn.Tanh(), torch.zeros(2, 3)).size
        64
        """
        alone = run_alone(network, examples)
        with torch.inference_mode():
            sample_bytes = bytes_per_sample(network, examples[:1])
        needs = PointMemory(sample_bytes, sample_bytes, 0, 0)
        _, size = share_out(needs, examples.device, memory, MAX_BATCH_SIZE)
        alone = alone.reshape(len(alone), -1)
        if not is_same(cls(network, 1)(examples), alone, torch.float64):
            raise Undefined(
                "the network's output for one input changes from call to call: it is not a "
                "function of the input"
            )
        # On two samples, some networks that mix samples still compute each output correctly.
        checked = min(max(size, 2), MAX_CHECKED_BATCH)
        batched = cls(network, checked)
        pair = [0, *[1] * (checked - 1)]
        if not batched._reproduces(examples[pair], alone[pair]):
            return cls(network, 1)
        # If memory ran out, larger batches have not been checked.
        batched.size = size if batched.size == checked else batched.size
        # A network may decide for a batch as a whole, so the examples are run as one batch.
        return batched if batched._reproduces(examples, alone) else cls(network, 1)

    def _reproduces(self, inputs: Tensor, expected: Tensor) -> bool:
        try:
            return is_same(self(inputs), expected, torch.float64)
        except RequestError:
            return False

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the outputs (m, k) for inputs (m, *input).

        Raises
        ------
        nlbench.RequestError
            If the network can't be run.
        nlbench.NotFinite
            If an output is not finite.
        """
        result, self.size = halve_on_oom(
            lambda size: self._outputs(inputs, size), self.size, inputs.device
        )
        if not torch.isfinite(result).all():
            raise NotFinite("the network's output is not finite on the segment")
        return result

    def _outputs(self, inputs: Tensor, size: int) -> Tensor:
        outputs = []
        for batch in torch.split(inputs, size):
            try:
                with torch.inference_mode():
                    # The network may modify its input in place.
                    output = self.network(batch.clone())
                    outputs.append(output.reshape(len(batch), -1))
            except (RuntimeError, TypeError, IndexError, ValueError) as error:
                if is_out_of_memory(error):
                    raise
                reason = first_line(error)
                shape = tuple(batch.shape)
                raise RequestError(
                    f"the network can't be run on inputs of shape {shape}: {reason}"
                ) from error
        return torch.cat(outputs)
