"""Know what comes of a network's input, also where no PyTorch function is seen to make it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["Descent", "storage_of"]


class Descent(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches, while a network runs, which memory is computed from the input.

    Below the functions that a network calls lie the operations that PyTorch dispatches. Those
    show what a compiled or vectorised function makes, and what is written into a constant
    through a view of it.

    Parameters
    ----------
    inputs : iterable of tensor

    Examples
    --------
    >>> import torch
    >>> x, constant = torch.ones(2), torch.zeros(2)
    >>> with Descent([x]) as descent:
    ...     _ = constant[:1].copy_(x[:1])
    >>> descent.reaches(constant), descent.reaches(torch.zeros(2))
    (True, False)
    """

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By storage, since views share it; the tensors are kept so that none is used again.
        self._reached: dict[int, Tensor] = {storage_of(tensor): tensor for tensor in inputs}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and shielding from the compiler would import it.
        return False

    def reaches(self, tensor: Tensor) -> bool:
        """Tell whether a tensor's memory holds anything that comes of the input."""
        return storage_of(tensor) in self._reached

    def forget(self, tensor: Tensor) -> None:
        """Take a tensor as a constant, of which only the shape comes of the input."""
        self._reached.pop(storage_of(tensor), None)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        given = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
        if any(self.reaches(tensor) for tensor in given):
            for value in (*tree_iter(output), *_written(func, args, kwargs)):
                if isinstance(value, Tensor):
                    self._reached[storage_of(value)] = value
        return output


def storage_of(tensor: Tensor) -> int:
    """Identify a tensor's memory; the tensor itself where it has none of its own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return -id(tensor)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterable[Any]:
    """List what a call changes in place."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tree_iter(args[place] if place < len(args) else kwargs.get(argument.name))
