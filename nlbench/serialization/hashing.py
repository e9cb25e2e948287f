"""Hashes of requests, files, weights and samples.

Importing this module doesn't import PyTorch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlbench.errors import RequestError, system_text

from .files import check_is_file

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def content_key(content: Mapping[str, Any]) -> str:
    """Compute a hash of JSON content that doesn't depend on the order of its keys.

    Examples
    --------
    >>> content_key({"a": 1, "b": 2}) == content_key({"b": 2, "a": 1})
    True
    """
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def file_hash(path: str | os.PathLike[str]) -> str:
    """Compute the SHA-256 of a file, in hexadecimal.

    Raises
    ------
    nlbench.RequestError
        If the file can't be read.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as empty:
    ...     file_hash(empty.name)[:16]
    'e3b0c44298fc1c14'
    """
    path = Path(path)
    check_is_file(path)
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RequestError(f"can't read {path}: {system_text(error)}") from error


def state_hash(model: torch.nn.Module) -> str:
    """Compute the SHA-256 of a model's parameters and buffers, in hexadecimal.

    Names, dtypes, shapes and bytes are hashed in alphabetical order of the names, regardless of
    device, memory layout and order of registration. Non-persistent buffers are included, since
    they affect the output.

    Examples
    --------
    >>> import torch
    >>> first, second = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    >>> _ = second.load_state_dict(first.state_dict())
    >>> state_hash(first) == state_hash(second)
    True
    """
    tensors: dict[str, Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def tensor_hash(tensor: Tensor) -> str:
    """Compute the SHA-256 of a tensor's shape, dtype and bytes, in hexadecimal.

    Examples
    --------
    >>> import torch
    >>> tensor_hash(torch.zeros(2)) == tensor_hash(torch.zeros(2, 1))
    False
    """
    digest = _new_digest(tuple(tensor.shape), tensor)
    digest.update(_bytes_of(tensor))
    return str(digest.hexdigest())


class SampleHash:
    """Incremental `tensor_hash` of samples in batches.

    If the total number of samples is None, the hash differs from that of a single tensor.

    Examples
    --------
    >>> import torch
    >>> samples = torch.arange(6.0).reshape(3, 2)
    >>> digest = SampleHash(3)
    >>> for batch in (samples[:2], samples[2:]):
    ...     digest.update(batch)
    >>> digest.hexdigest() == tensor_hash(samples)
    True
    """

    def __init__(self, samples: int | None) -> None:
        self._samples: int | str = "?" if samples is None else samples
        self._digest: Any = None

    def update(self, batch: Tensor) -> None:
        """Add a batch (n, ...)."""
        if self._digest is None:
            self._digest = _new_digest((self._samples, *batch.shape[1:]), batch)
        self._digest.update(_bytes_of(batch))

    def hexdigest(self) -> str:
        """Return the hash of all batches; empty if there was none."""
        return "" if self._digest is None else str(self._digest.hexdigest())


def _new_digest(shape: tuple[int | str, ...], tensor: Tensor) -> Any:
    return hashlib.sha256(f"{shape} {tensor.dtype}".encode())


def _bytes_of(tensor: Tensor) -> Any:
    import torch

    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()
