"""In-place writes into memory that several tensors may share."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, MutableMapping
from typing import Generic, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from .function_calls import get_storage_ref

Content = TypeVar("Content")


def get_memory_key(tensor: Tensor) -> Hashable:
    """Return a key for a tensor's storage, or for the tensor if it has none."""
    return get_storage_ref(tensor) or -id(tensor)


class WriteLog(Generic[Content]):
    """Log of writes into the memory of tensors.

    A tensor is bound when its content is known. After the next write into its memory, through any
    tensor, it is outdated until it is bound again. References are weak: the log keeps no memory
    alive, and a storage's key is not reused while it is in the log.

    Examples
    --------
    >>> import torch
    >>> log, whole = WriteLog(), torch.zeros(4)
    >>> part = whole[:2]
    >>> log.bind(whole)
    >>> log.write(part, "zeros")
    >>> log.is_outdated(whole), [content for _, content in log.pending(whole)]
    (True, ['zeros'])
    """

    def __init__(self) -> None:
        self._writes: dict[Hashable, list[tuple[int, Content]]] = {}
        self._bound_at: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
        self._time = 0

    def bind(self, tensor: Tensor, time: int | None = None) -> None:
        """Mark a tensor's content as known, now or at the time of a write."""
        self._bound_at[tensor] = self._time if time is None else time

    def write(self, tensor: Tensor, content: Content) -> None:
        """Log a write into a tensor's memory."""
        self._time += 1
        self._writes = {
            memory: writes
            for memory, writes in self._writes.items()
            if not (isinstance(memory, StorageWeakRef) and memory.expired())  # type: ignore[no-untyped-call]
        }
        self._writes.setdefault(get_memory_key(tensor), []).append((self._time, content))

    def has_writes(self, tensor: Tensor) -> bool:
        """Return True if anything was written into a tensor's memory."""
        return bool(self._writes) and get_memory_key(tensor) in self._writes

    def is_outdated(self, tensor: Tensor) -> bool:
        """Return True if a tensor's memory was written to since it was bound."""
        return any(True for _ in self.pending(tensor))

    def pending(self, tensor: Tensor) -> Iterator[tuple[int, Content]]:
        """Yield the time and content of each write since a tensor was bound, in order."""
        for time, content in self._writes.get(get_memory_key(tensor), ()) if self._writes else ():
            if time > self._bound_at.get(tensor, 0):
                yield time, content
