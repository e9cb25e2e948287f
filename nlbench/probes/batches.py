"""Run a network on many inputs, as many at once as memory allows and the network bears."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nlbench.errors import NotFinite, RequestError, Undefined

from .program import run_alone

__all__ = ["Batches"]

MEMORY = 2**30
"""Bytes, if nothing is said."""
MOST = 64
_ALIVE = 4
"""Tensors of the largest layer's size that are alive at once, about."""
_AGREEMENT = 1e-9


@dataclass(frozen=True)
class Batches:
    """A network that is run in batches.

    Parameters
    ----------
    network : torch.nn.Module
    size : int
        Inputs at once.
    """

    network: nn.Module
    size: int

    @classmethod
    def of(cls, network: nn.Module, examples: Tensor, memory: int | None = None) -> Batches:
        """Find the size of a batch.

        It is 1 for a network that gives an input another output when it comes with others.

        Parameters
        ----------
        network : torch.nn.Module
            In eval mode.
        examples : tensor of shape (m, *input)
            Two at least.
        memory : int, optional
            Bytes; 1 GiB if not given.

        Raises
        ------
        nlbench.RequestError, nlbench.NotFinite
            If the network can't be run on them.
        nlbench.Undefined
            If its output for one input changes from call to call.

        Examples
        --------
        >>> Batches.of(torch.nn.Tanh(), torch.zeros(2, 3)).size
        64
        """
        alone = run_alone(network, examples)
        bytes_each = _ALIVE * _largest_output(network, examples[:1])
        size = max(1, min(MOST, (MEMORY if memory is None else memory) // max(1, bytes_each)))
        try:
            together = cls(network, 2)(examples[:2])
        except RequestError:
            together = None
        alone = alone[:2].reshape(2, -1)
        if together is not None and _agree(together, alone):
            return cls(network, size)
        if not _agree(cls(network, 1)(examples[:2]), alone):
            raise Undefined(
                "the network's output for one input changes from call to call: it is no function "
                "of the input"
            )
        return cls(network, 1)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Give the outputs, (m, *input) to (m, k).

        Raises
        ------
        nlbench.RequestError
            If the network can't be run.
        nlbench.NotFinite
            If an output is not finite.
        """
        outputs = []
        for batch in torch.split(inputs, self.size):
            try:
                with torch.inference_mode():
                    # A copy: the network may write into its input.
                    output = self.network(batch.clone())
                    outputs.append(output.reshape(len(batch), -1))
            except (RuntimeError, TypeError, IndexError, ValueError) as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                shape = tuple(batch.shape)
                raise RequestError(
                    f"the network can't be run on inputs of shape {shape}: {reason}"
                ) from error
        result = torch.cat(outputs)
        if not torch.isfinite(result).all():
            raise NotFinite("the network's output is not finite on the segment")
        return result


def _agree(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    scale = other.abs().amax() if other.numel() else 1.0
    return bool(((one - other).abs() <= _AGREEMENT * scale).all())


def _largest_output(network: nn.Module, example: Tensor) -> int:
    """Bytes of the largest output of a module, for one input."""
    largest = example.numel() * example.element_size()

    def measure(module: nn.Module, inputs: object, output: object) -> None:
        nonlocal largest
        if isinstance(output, Tensor):
            largest = max(largest, output.numel() * output.element_size())

    hooks = [module.register_forward_hook(measure) for module in network.modules()]
    try:
        run_alone(network, example)
    finally:
        for hook in hooks:
            hook.remove()
    return largest
