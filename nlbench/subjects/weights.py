"""Read and write checkpoints.

PyTorch is imported only when weights are loaded, so that runs can be planned without it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from nlbench.errors import RequestError, nearest, one_line, shorten, system_text
from nlbench.serialization.files import check_is_file, write_atomically

if TYPE_CHECKING:
    import torch

HEADER_LENGTH = struct.Struct("<Q")
BATCH_COUNTER = "num_batches_tracked"

COMPILED_PREFIX = "_orig_mod."
"""Prefix of parameter names in a module compiled with `torch.compile`."""

PARALLEL_PREFIX = "module."
"""Prefix of parameter names in a `torch.nn.DataParallel`."""

EXTRA_STATE = "_extra_state"
"""Last part of the name of what a module's ``get_extra_state`` returns."""

AVERAGE_COUNTER = "n_averaged"
"""Counter in the state of a `torch.optim.swa_utils.AveragedModel`."""


def read_metadata(path: Path) -> dict[str, str]:
    """Read the metadata of a safetensors file. There are none if the file can't be read as one.

    Examples
    --------
    >>> read_metadata(Path("no-such-file"))
    {}
    """
    with contextlib.suppress(RequestError):  # `load_weights` reports damaged files.
        if path.is_file():
            with _open_safetensors(path) as file:
                return _sorted_metadata(file)
    return {}


def _sorted_metadata(file: Any) -> dict[str, str]:
    """Return the metadata of an open file, which safetensors reads in random order."""
    return dict(sorted((file.metadata() or {}).items()))


@contextlib.contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError, TypeError, ValueError, RuntimeError) as error:
        # Many error types are possible, for example if PyTorch lacks a dtype in the header.
        raise RequestError(
            f"{path} is a truncated or damaged safetensors file: {_reason(error)}"
        ) from error


def load_weights(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    rename: Callable[[str], str | None] | None = None,
    read: Callable[[Path], tuple[Any, dict[str, str]]] | None = None,
    key: str = "",
) -> dict[str, str]:
    """Load a checkpoint into a model, completely or not at all, and return its metadata.

    The format is detected from the file's content, not its suffix: safetensors, or a file written
    by `torch.save`, from which only tensors and plain data are unpickled. The state dict may be
    nested under any key, such as ``state_dict``, ``model`` or ``ema``; of several, only one may fit
    the model, unless `key` names one. Its names may be prefixed with ``module.``
    (`torch.nn.DataParallel`, or `torch.optim.swa_utils.AveragedModel`, whose ``n_averaged`` is
    ignored), ``_orig_mod.`` (`torch.compile`) or the name of the attribute in which a trainer's
    module stores the network. Other entries in a Lightning checkpoint, such as the weights of a
    loss, are ignored. Values are converted to the model's precision. If a batch norm's
    ``num_batches_tracked`` is missing, as in old checkpoints, the model keeps its own, and so with
    the extra state of modules, which may be any plain data. `rename` maps a name in the file to one
    in the model, or to None to skip the tensor.

    Examples
    --------
    >>> import tempfile, torch
    >>> path = Path(tempfile.mkdtemp()) / "linear.safetensors"
    >>> save_weights(path, torch.nn.Linear(2, 1), {"seed": "0"})
    >>> load_weights(torch.nn.Linear(2, 1), path)
    {'seed': '0'}
    """
    import torch

    path = Path(path)
    content, metadata = (read or read_checkpoint)(path)
    model_state = model.state_dict()
    tensors = _choose_network(content, model_state, rename or (lambda name: name), path, key)
    with torch.no_grad():
        converted = {
            name: value if _is_extra_state(name) else _convert(value, model_state[name], name, path)
            for name, value in tensors.items()
        }
        # The model's own dict has metadata that some modules require for loading.
        model_state.update(converted)
        model.load_state_dict(model_state)
    return metadata


def save_weights(
    path: str | os.PathLike[str], model: torch.nn.Module, metadata: Mapping[str, str]
) -> None:
    """Write a model's parameters and persistent buffers as safetensors, atomically.

    The bytes depend only on the state and on the metadata, which is stored in the file's header.
    The folder must exist.
    """
    from safetensors.torch import save

    for name, value in model.state_dict().items():
        if _is_extra_state(name) and not hasattr(value, "detach"):
            raise RequestError(f"{path}: safetensors can't hold '{name}', {type(value).__name__}")
    # Clone, since safetensors rejects tensors that share memory, such as tied weights.
    state = {k: v.detach().cpu().contiguous().clone() for k, v in model.state_dict().items()}
    write_atomically(Path(path), _sort_header(save(state, metadata=dict(metadata))))


def read_checkpoint(path: Path) -> tuple[Any, dict[str, str]]:
    """Read a checkpoint's content and the metadata in its header."""
    check_is_file(path)
    try:
        with path.open("rb") as opened:
            head = opened.read(HEADER_LENGTH.size + 1)
    except OSError as error:
        raise RequestError(f"can't read {path}: {_reason(error)}") from error
    if not head:
        raise RequestError(f"{path} is empty, expected a checkpoint")
    # Check for safetensors first: it starts with the header's length, which may match any format.
    if head[HEADER_LENGTH.size :] == b"{":
        with _open_safetensors(path) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, _sorted_metadata(file)
    if head.startswith((b"PK\x03\x04", b"\x80")):
        return _read_torch(path), {}
    raise RequestError(
        f"{path} is neither a safetensors nor a PyTorch checkpoint, or it is truncated"
    )


def _read_torch(path: Path) -> Any:
    import torch

    try:
        # Pass an open file, since torch.load would also interpret a path's suffix. Its warnings
        # are about how the file was written.
        with path.open("rb") as file, warnings.catch_warnings(), _plain_data_allowed():
            warnings.simplefilter("ignore")
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        culprit = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise RequestError(
            f"{path} is refused: it contains more than tensors and could run code on loading"
            + (f" ({culprit[1]})" if culprit else "")
        ) from error
    except Exception as error:
        # A damaged pickle or archive may raise almost any error.
        kind = "a TorchScript program" if "TorchScript" in str(error) else ""
        with contextlib.suppress(zipfile.BadZipFile, OSError), zipfile.ZipFile(path) as archive:
            if any(name.endswith("/archive_format") for name in archive.namelist()):
                kind = "an exported program"
        if kind:
            raise RequestError(f"{path} is refused: it is {kind}, expected a state dict") from error
        raise RequestError(
            f"{path} is not a PyTorch file, or truncated or damaged: {_reason(error)}"
        ) from error


class _NestedState(NamedTuple):
    """The state dict at a key of a file. A Lightning module's includes its losses and metrics."""

    key: str
    state: dict[str, torch.Tensor]
    is_lightning: bool = False


_PREFERRED_KEYS = (
    *("state_dict", "model_state_dict", "model", "ema", "net", "network", "params", "weights"),
    *("generator", "student"),
)
"""Entries whose names are reported if no entry fits the model, in this order."""


def _choose_network(
    content: Any,
    model_state: Mapping[str, torch.Tensor],
    rename: Callable[[str], str | None],
    path: Path,
    key: str,
) -> dict[str, torch.Tensor]:
    """Return the tensors of the only state dict in a file that fits the model, with its names."""
    if not isinstance(content, Mapping):
        raise RequestError(f"{path} contains a {type(content).__name__}, expected a state dict")
    networks = list(_nested_networks(content, "", "pytorch-lightning_version" in content))
    order = {name: rank for rank, name in enumerate(_PREFERRED_KEYS)}
    networks.sort(key=lambda network: order.get(network.key, len(order)))
    if key:
        networks = [_entry(networks, key, path)]
    if not networks:
        nested = (content[name] for name in _PREFERRED_KEYS if name in content)
        inner = next((value for value in nested if isinstance(value, Mapping)), content)
        name, value = next(_not_tensors(inner))
        raise RequestError(
            f"{path} is not a state dict: expected names with tensors, "
            f"found {name!r} with a {type(value).__name__}"
        )
    optional = (BATCH_COUNTER, EXTRA_STATE)
    required = {name for name in model_state if name.rpartition(".")[2] not in optional}
    fitting = _find_fitting(networks, model_state, required, rename)
    with_parts = [network._replace(is_lightning=True) for network in networks]
    parts = fitting or _find_fitting(with_parts, model_state, required, rename)
    if len(parts) > 1:
        first, second = list(parts)[:2]
        raise RequestError(
            f"{path} contains several networks that fit the model, '{first}' and '{second}'; "
            f"choose one, as in --weights '{path}#{first.rstrip('.*')}'"
        )
    if fitting:
        return next(iter(fitting.values()))
    for part in parts:
        raise RequestError(
            f"{path} contains more than the model: '{part}' fits it; choose this part, as in "
            f"--weights '{path}#{part.rstrip('.*')}'"
        )
    by_prefix = dict(_split_by_prefix(networks[0], model_state, rename))
    raise _misfit(by_prefix.get(PARALLEL_PREFIX, by_prefix[""]).keys(), required, model_state, path)


def _find_fitting(
    networks: Sequence[_NestedState],
    model_state: Mapping[str, torch.Tensor],
    required: Collection[str],
    rename: Callable[[str], str | None],
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of the state dicts that fit the model, by key or prefix.

    Of several, only those with the model's shapes, unless there are none.
    """
    fitting: dict[str, dict[str, torch.Tensor]] = {}
    for network in networks:
        for prefix, tensors in _split_by_prefix(network, model_state, rename):
            if set(required) <= tensors.keys() <= model_state.keys():
                has_prefix = prefix and network.is_lightning
                fitting.setdefault(f"{prefix}*" if has_prefix else network.key, tensors)
    # A smaller network may have the same names.
    same = {
        key: tensors
        for key, tensors in fitting.items()
        if all(_is_extra_state(n) or t.shape == model_state[n].shape for n, t in tensors.items())
    }
    return same or dict(list(fitting.items())[:1])


def _nested_networks(content: Any, key: str, is_lightning: bool) -> Iterator[_NestedState]:
    """Yield the state dicts in a mapping, at most three levels deep."""
    if next(_not_tensors(content), None) is None:
        if content or not key or key in _PREFERRED_KEYS:
            yield _NestedState(key, dict(content), is_lightning and key == "state_dict")
        return
    if key.count(".") > 1:
        return
    for name, value in content.items():
        if isinstance(value, Mapping) and isinstance(name, str):
            yield from _nested_networks(value, f"{key}.{name}" if key else name, is_lightning)


def _not_tensors(content: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the entries that a state dict can't have."""
    import torch

    for name, value in content.items():
        is_entry = isinstance(value, torch.Tensor) or _is_extra_state(str(name))
        if not isinstance(name, str) or not is_entry:
            yield name, value


def _is_extra_state(name: str) -> bool:
    return name.rpartition(".")[2] == EXTRA_STATE


def _entry(networks: Sequence[_NestedState], key: str, path: Path) -> _NestedState:
    """Return the state dict at a key, or the tensors whose names begin with it."""
    for network in networks:
        if network.key == key:
            return network
    for network in networks:
        if inside := _within(network.state, f"{key.rstrip('.')}."):
            return _NestedState(key, inside)
    keys = [network.key for network in networks if network.key]
    below = [network for network in networks if network.key.startswith(f"{key}.")]
    if key and len(below) == 1:
        return below[0]
    raise RequestError(f"{path} has no entry '{shorten(key)}'{nearest(key, keys)}")


def _within(state: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors whose names begin with a prefix, without it."""
    return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}


def _split_by_prefix(
    network: _NestedState,
    model_state: Mapping[str, torch.Tensor],
    rename: Callable[[str], str | None],
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield the tensors with the model's names, by the prefix that wrappers may have added.

    Wrappers are `torch.nn.DataParallel`, `torch.compile` and trainer modules that store the
    network in an attribute. All names have the prefix, except in a Lightning module.
    """
    state = network.state
    if not any(COMPILED_PREFIX in name for name in model_state):
        plain = {name.replace(COMPILED_PREFIX, ""): tensor for name, tensor in state.items()}
        state = plain if len(plain) == len(state) else state
    if AVERAGE_COUNTER not in model_state:
        state = {name: tensor for name, tensor in state.items() if name != AVERAGE_COUNTER}
    names = state if network.is_lightning else list(state)[:1]
    prefixes = {name[: dot.end()] for name in names for dot in re.finditer(r"\.", name)}
    for prefix in ("", *sorted(prefixes)):
        inside = _within(state, prefix)
        if network.is_lightning or len(inside) == len(state):
            named = ((rename(name), tensor) for name, tensor in inside.items())
            yield prefix, {name: tensor for name, tensor in named if name is not None}


def _misfit(
    names: Collection[str], required: Collection[str], model_names: Collection[str], path: Path
) -> RequestError:
    """Return the error for a state dict with other names than the model's."""
    missing = [name for name in model_names if name in required and name not in names]
    unexpected = [name for name in names if name not in model_names]
    problems = [
        f"{what} '{which[0]}'" + (f" and {len(which) - 1} more" if len(which) > 1 else "")
        for what, which in (("it lacks", missing), ("it has the unexpected", unexpected))
        if which
    ]
    if any(".lora_" in name for name in names):
        problems.append("it is an adapter, merge it into its base model first")
    return RequestError(f"{path} doesn't fit the model: {'; '.join(problems)}")


@contextlib.contextmanager
def _plain_data_allowed() -> Iterator[None]:
    """Let PyTorch read plain data that it refuses, none of which runs code.

    These are NumPy's numbers and arrays, `argparse.Namespace`, dates and paths.
    """
    import numpy as np
    import torch

    safe_globals = getattr(torch.serialization, "safe_globals", None)
    if safe_globals is None:
        yield  # PyTorch 2.4
        return
    scalar: Any = np.float64(0).__reduce__()[0]
    reconstruct: Any = np.zeros(1).__reduce__()[0]
    dtypes = {type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDUS"}
    names = [
        (f, f"numpy.{core}.multiarray.{f.__name__}")
        for core in ("core", "_core")
        for f in (scalar, reconstruct)
    ]
    # Paths are read on any system; Python 3.13 names another module.
    names += [
        (PurePath, f"{module}.{kind}")
        for module in ("pathlib", "pathlib._local")
        for kind in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    ]
    dates = [datetime.datetime, datetime.date, datetime.timedelta, datetime.timezone]
    allowed = [argparse.Namespace, np.dtype, np.ndarray, *dates, *dtypes, *names]
    with safe_globals(allowed):
        yield


def _convert(tensor: torch.Tensor, target: torch.Tensor, name: str, path: Path) -> torch.Tensor:
    """Return a tensor in the model's dtype. Raise if it doesn't fit."""
    import torch

    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise RequestError(f"{path}: '{name}' is not a dense tensor of unquantized numbers")
    if tensor.shape != target.shape:
        raise RequestError(
            f"{path} doesn't fit the model: '{name}' has shape {tuple(tensor.shape)}, "
            f"expected {tuple(target.shape)}"
        )
    if not torch.can_cast(tensor.dtype, target.dtype) or not torch.can_cast(
        target.dtype, tensor.dtype
    ):
        raise RequestError(
            f"{path} doesn't fit the model: '{name}' has dtype {tensor.dtype}, "
            f"expected {target.dtype}"
        )
    # Check after the conversion, which may overflow.
    converted = tensor.to(target.dtype)
    if not bool(torch.isfinite(converted).all()):
        raise RequestError(f"{path}: '{name}' contains NaN or infinities, expected finite weights")
    return converted


def _sort_header(content: bytes) -> bytes:
    """Sort the header in safetensors bytes, whose order differs from run to run."""
    start = HEADER_LENGTH.size
    end = start + HEADER_LENGTH.unpack(content[:start])[0]
    header = json.dumps(json.loads(content[start:end]), sort_keys=True, separators=(",", ":"))
    # The format requires the tensors to be aligned to 8 bytes, and padding with spaces.
    padded = header.encode() + b" " * (-len(header.encode()) % 8)
    return HEADER_LENGTH.pack(len(padded)) + padded + content[end:]


def _reason(error: Exception) -> str:
    return one_line(system_text(error), 200)
