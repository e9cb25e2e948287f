"""Detection of memory that depends on a network's input."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from nlbench.introspection.dispatch import DispatchMode, written_in
from nlbench.introspection.function_calls import tensors_in
from nlbench.introspection.write_log import memory_of


class DependentMemory(DispatchMode):
    """Dispatch mode that tracks memory computed from the input of a network.

    The operations that PyTorch dispatches, below the functions that a network calls, reveal tensors
    created by compiled or vectorised functions, and writes to a constant through a view of it.

    Examples
    --------
    >>> import torch
    >>> x, constant = torch.ones(2), torch.zeros(2)
    >>> with DependentMemory([x]) as memory:
    ...     _ = constant[:1].copy_(x[:1])
    >>> memory.reaches(constant), memory.reaches(torch.zeros(2))
    (True, False)
    """

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        super().__init__()
        # The tensors are kept alive so that their memory isn't reused.
        self._reached: dict[Hashable, Tensor] = {memory_of(tensor): tensor for tensor in inputs}

    def reaches(self, tensor: Tensor) -> bool:
        """Return True if a tensor's memory depends on the input."""
        return memory_of(tensor) in self._reached

    def forget(self, tensor: Tensor) -> None:
        """Treat a tensor as independent of the input."""
        self._reached.pop(memory_of(tensor), None)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if any(map(self.reaches, tensors_in((args, kwargs)))):
            for tensor in (*tensors_in((output,)), *written_in(func, args, kwargs)):
                self._reached[memory_of(tensor)] = tensor
        return output
