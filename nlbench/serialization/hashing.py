"""Hashes of requests, files, weights and samples.

Importing this module doesn't import PyTorch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
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
    """Compute the SHA-256 of a model's parameters, buffers and other tensors, in hexadecimal.

    Names, dtypes, shapes and bytes are hashed in alphabetical order of the names, regardless of
    device, memory layout and order of registration. Everything that affects the output is included:
    non-persistent buffers, tensors in attributes, and what modules save besides, such as the packed
    weights of quantised layers. State that can't be read has another hash each time, so that it is
    never taken for that of another model.

    Examples
    --------
    >>> import torch
    >>> first, second = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    >>> _ = second.load_state_dict(first.state_dict())
    >>> state_hash(first) == state_hash(second)
    True
    """
    tensors: dict[str, Any] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    for name, value in _unregistered_state(model):
        tensors.setdefault(name, value)
    digest = hashlib.sha256()
    for name in sorted(tensors):
        _update_with_state(digest, name, tensors[name])
    return digest.hexdigest()


def _unregistered_state(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what modules save in addition to parameters and buffers, and tensors in attributes."""
    from torch import Tensor, nn

    tables = vars(nn.Module())
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        kind = type(module)
        saves = kind._save_to_state_dict is not nn.Module._save_to_state_dict
        if saves or kind.get_extra_state is not nn.Module.get_extra_state:
            state: dict[str, Any] = {}
            module._save_to_state_dict(state, prefix, keep_vars=True)
            yield from state.items()
        for name, value in vars(module).items():
            if name in tables:
                continue
            for key, item in _flattened(f"{prefix}{name}", value):
                if isinstance(item, Tensor):
                    yield key, item


def _flattened(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values in nested mappings, lists and tuples, with names."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flattened(f"{name}.{key}", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _flattened(f"{name}.{index}", item)
    else:
        yield name, value


def _update_with_state(digest: Any, name: str, value: Any) -> None:
    import torch

    content: list[tuple[Any, tuple[int, ...], Any]]
    for key, item in _flattened(name, value):
        if isinstance(item, torch.Tensor):
            try:
                parts = _dense_parts(item)
                content = [(part.dtype, tuple(part.shape), _view_bytes(part)) for part in parts]
            except (RuntimeError, NotImplementedError, TypeError):
                content = [(item.dtype, tuple(item.shape), os.urandom(16))]
        elif isinstance(item, _PLAIN) or type(item).__module__ == "torch":
            content = [(type(item).__name__, (), repr(item).encode())]
        else:
            content = [(type(item).__name__, (), os.urandom(16))]
        for kind, shape, data in content:
            digest.update(f"{key}\0{kind}\0{shape}\0".encode())
            digest.update(data)


_PLAIN = (str, bytes, bool, int, float, complex, type(None))


def _dense_parts(tensor: Tensor) -> list[Tensor]:
    """Return dense tensors that determine a tensor of any layout: itself, if it is dense."""
    import torch

    if tensor.is_quantized:
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            scale = torch.tensor([tensor.q_scale(), tensor.q_zero_point()], dtype=torch.float64)
            return [tensor.int_repr(), scale]
        return [
            tensor.int_repr(),
            tensor.q_per_channel_scales(),
            tensor.q_per_channel_zero_points(),
        ]
    if tensor.is_nested:
        return [part for item in tensor.unbind() for part in _dense_parts(item)]
    if tensor.layout == torch.sparse_coo:
        whole = tensor.coalesce()
        return [torch.tensor(whole.shape), whole.indices(), whole.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        shape = torch.tensor(tensor.shape)
        return [shape, tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        shape = torch.tensor(tensor.shape)
        return [shape, tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.layout != torch.strided:
        return [tensor.to_dense()]
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        names, context = flatten()
        inner = [part for name in names for part in _dense_parts(getattr(tensor, name))]
        return [*inner, torch.tensor(list(repr(context).encode()), dtype=torch.uint8)]
    return [tensor]


def tensor_hash(tensor: Tensor) -> str:
    """Compute the SHA-256 of a tensor's shape, dtype and bytes, in hexadecimal.

    Examples
    --------
    >>> import torch
    >>> tensor_hash(torch.zeros(2)) == tensor_hash(torch.zeros(2, 1))
    False
    """
    digest = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    digest.update(_view_bytes(tensor))
    return digest.hexdigest()


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
            shape = self._samples, *batch.shape[1:]
            self._digest = hashlib.sha256(f"{shape} {batch.dtype}".encode())
        self._digest.update(_view_bytes(batch))

    def hexdigest(self) -> str:
        """Return the hash of all batches, or "" if there was none."""
        return "" if self._digest is None else str(self._digest.hexdigest())


def _view_bytes(tensor: Tensor) -> Any:
    import torch

    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()
