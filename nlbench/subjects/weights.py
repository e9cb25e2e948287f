"""Weights on disk: read with suspicion, written atomically, named by a hash.

A file that doesn't fit the model is refused in one line before a single weight has
been copied. PyTorch is imported only when weights are touched, so that planning a run
can hash files without it.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlbench.errors import RequestError, one_line, system_text
from nlbench.serialization.files import check_is_file, parse_json, read_text, write_atomically

if TYPE_CHECKING:
    import torch

__all__ = [
    "calibrate",
    "load_weights",
    "save_weights",
    "statistics_of",
    "training_failure",
    "training_folder",
]


HEADER_LENGTH = struct.Struct("<Q")
BATCHES_TRACKED = "num_batches_tracked"

COMPILED = "_orig_mod."
"""What `torch.compile` puts before the names of the module that it compiled."""

PARALLEL = "module."
"""What `torch.nn.DataParallel` puts before them."""


def load_weights(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    rename: Callable[[str], str | None] | None = None,
) -> dict[str, str]:
    """Load a checkpoint into a model, all of it or nothing.

    The file's content, not its suffix, decides how it is read: safetensors, or a file
    of `torch.save`, of which only tensors are ever unpickled. The state dict may lie
    under ``state_dict``, ``model_state_dict`` or ``model``; its names may carry the ``module.``
    of `torch.nn.DataParallel`, the ``_orig_mod.`` of `torch.compile`, or the name that a
    trainer's module gives the network. What else a Lightning checkpoint holds, as a loss's
    weights, isn't taken. Values are converted to the model's precision. The counter
    ``num_batches_tracked`` of a batch norm may be missing, as it is in old checkpoints;
    the model then keeps its own.

    Parameters
    ----------
    model : torch.nn.Module
        Already built; keeps its device and dtype.
    path : path
        The checkpoint.
    rename : callable, optional
        From a name in the file to the model's; None for a tensor that isn't needed.

    Returns
    -------
    dict of str to str
        The metadata of a safetensors header; empty for other files.

    Raises
    ------
    nlbench.RequestError
        If the file can't be read, could run code, isn't a state dict, doesn't fit the
        model in names, shapes or kinds of number, or holds NaN or infinities. The model
        is then as it was.

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
    content, metadata = _read(path)
    own = model.state_dict()
    state, is_whole = _state_dict(content, path)
    found = _named(state, own, rename or (lambda name: name), path, is_whole=is_whole)
    _check_names(found, own, path)
    with torch.no_grad():
        ready = {name: _converted(found[name], own[name], name, path) for name in found}
        # Into the model's own dict, whose metadata some modules ask for on loading.
        own.update(ready)
        model.load_state_dict(own)
    return metadata


def save_weights(
    path: str | os.PathLike[str], model: torch.nn.Module, metadata: Mapping[str, str]
) -> None:
    """Write a model's state as safetensors, whole or not at all.

    The bytes depend on nothing but the state and the metadata. A file of that name is
    replaced only once the new one is complete and on disk.

    Parameters
    ----------
    path : path
        In a folder that exists.
    model : torch.nn.Module
        On any device; parameters and persistent buffers are written.
    metadata : mapping of str to str
        Goes into the file's header.

    Raises
    ------
    nlbench.RequestError
        If the file can't be written.
    """
    from safetensors.torch import save

    # Copies, since safetensors refuses tensors that share memory, as tied weights do.
    state = {k: v.detach().cpu().contiguous().clone() for k, v in model.state_dict().items()}
    write_atomically(Path(path), _with_sorted_header(save(state, metadata=dict(metadata))))


def training_folder(path: Path) -> Path:
    """Where a training keeps its manifest and its state, beside its checkpoint."""
    return path.with_name(f"{path.stem}.training")


def training_failure(path: Path) -> str:
    """Say why there is no checkpoint: the training that was to write it failed; else nothing."""
    if path.exists():
        return ""
    try:
        file = training_folder(path) / "manifest.json"
        content = parse_json(read_text(file), str(file), finite=False)
    except (RequestError, ValueError):
        return ""
    return str(content.get("failed", "")) if isinstance(content, dict) else ""


def _read(path: Path) -> tuple[Any, dict[str, str]]:
    """What is in the file, and the metadata of its header."""
    check_is_file(path)
    try:
        with path.open("rb") as file:
            head = file.read(HEADER_LENGTH.size + 1)
    except OSError as error:
        raise RequestError(f"can't read {path}: {_reason(error)}") from error
    if not head:
        raise RequestError(f"{path} is empty, expected a checkpoint")
    # Safetensors first: the low bytes of its header's length could be anything.
    if head[HEADER_LENGTH.size :] == b"{":
        return _read_safetensors(path)
    if head.startswith((b"PK\x03\x04", b"\x80")):
        return _read_torch(path), {}
    raise RequestError(
        f"{path} is neither a safetensors nor a PyTorch checkpoint, or it is cut short"
    )


def _read_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            # A header may name a dtype that PyTorch lacks, hence the broad net below.
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError, TypeError, ValueError, RuntimeError) as error:
        raise RequestError(
            f"{path} is a truncated or damaged safetensors file: {_reason(error)}"
        ) from error


def _read_torch(path: Path) -> Any:
    import torch

    try:
        # Given an open file, since a path's suffix would have a say in how it is read. The
        # warnings are about how the file was made; the messages below say what matters.
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        culprit = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise RequestError(
            f"{path} is refused: it holds more than tensors and could run code on loading"
            + (f" ({culprit[1]})" if culprit else "")
        ) from error
    except Exception as error:
        # A damaged pickle or archive can raise almost anything from within its reader.
        if "TorchScript" in str(error):
            raise RequestError(
                f"{path} is refused: it is a TorchScript program, expected a state dict"
            ) from error
        raise RequestError(
            f"{path} is a truncated or damaged PyTorch file, or none: {_reason(error)}"
        ) from error


def _state_dict(content: Any, path: Path) -> tuple[dict[str, torch.Tensor], bool]:
    """Names to tensors, from where they lie in what was read, and whether others lie there too."""
    import torch

    is_whole = False
    if isinstance(content, Mapping):
        for key in ("state_dict", "model_state_dict", "model"):
            if isinstance(content.get(key), Mapping):
                # A Lightning module's state has that of its losses and metrics in it.
                is_whole = key == "state_dict" and "pytorch-lightning_version" in content
                content = content[key]
                break
    if not isinstance(content, Mapping):
        raise RequestError(f"{path} holds a {type(content).__name__}, expected a state dict")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise RequestError(
                f"{path} is not a state dict: expected names with tensors, "
                f"found {name!r} with a {type(value).__name__}"
            )
    return dict(content), is_whole


def _named(
    found: dict[str, torch.Tensor],
    own: Mapping[str, torch.Tensor],
    rename: Callable[[str], str | None],
    path: Path,
    *,
    is_whole: bool,
) -> dict[str, torch.Tensor]:
    """The tensors by the model's names, without what wrappers put before them.

    Wrappers are `torch.nn.DataParallel`, `torch.compile` and modules of a trainer that hold the
    network as one of their attributes.
    """
    if not any(COMPILED in name for name in own):
        plain = {name.replace(COMPILED, ""): tensor for name, tensor in found.items()}
        if len(plain) == len(found):
            found = plain

    def within(prefix: str) -> dict[str, torch.Tensor]:
        inside = {n.removeprefix(prefix): t for n, t in found.items() if n.startswith(prefix)}
        return {new: t for name, t in inside.items() if (new := rename(name)) is not None}

    asked = {name for name in own if name.rpartition(".")[2] != BATCHES_TRACKED}
    plain = within("")
    if asked <= plain.keys():
        return plain
    # Outside of a trainer's checkpoint all names have to begin with it.
    heads = found if is_whole else list(found)[:1]
    prefixes = {
        name[: dot + 1] for name in heads for dot, letter in enumerate(name) if letter == "."
    }
    fitting = {prefix: within(prefix) for prefix in sorted(prefixes)}
    fitting = {
        prefix: tensors
        for prefix, tensors in fitting.items()
        if asked <= tensors.keys() <= own.keys()
        and (is_whole or all(name.startswith(prefix) for name in found))
    }
    if len(fitting) > 1:
        first, second = list(fitting)[:2]
        raise RequestError(
            f"{path} holds several networks that fit the model, '{first}*' and '{second}*'; "
            "save one of them alone"
        )
    if fitting:
        return fitting.popitem()[1]
    # It doesn't fit; what is said of it leaves out what every name begins with.
    is_parallel = all(name.startswith(PARALLEL) for name in found)
    return within(PARALLEL) if is_parallel and found else plain


def _check_names(
    found: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], path: Path
) -> None:
    missing = [n for n in own if n not in found and n.rpartition(".")[2] != BATCHES_TRACKED]
    unexpected = [n for n in found if n not in own]
    problems = [
        f"{what} {_first(names)}"
        for what, names in (("it lacks", missing), ("it has the unexpected", unexpected))
        if names
    ]
    if problems:
        raise RequestError(f"{path} doesn't fit the model: {'; '.join(problems)}")


def _first(names: list[str]) -> str:
    return f"'{names[0]}'" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _converted(given: torch.Tensor, own: torch.Tensor, name: str, path: Path) -> torch.Tensor:
    """The tensor in the model's dtype, once it is known to fit."""
    import torch

    if given.layout != torch.strided or given.is_meta or given.is_quantized:
        raise RequestError(f"{path}: '{name}' is not a dense tensor of plain numbers")
    if given.shape != own.shape:
        raise RequestError(
            f"{path} doesn't fit the model: '{name}' has shape {tuple(given.shape)}, "
            f"expected {tuple(own.shape)}"
        )
    if _kind(given) != _kind(own):
        raise RequestError(
            f"{path} doesn't fit the model: '{name}' holds {given.dtype}, expected {own.dtype}"
        )
    # Converted first: a number that fits the file's dtype may overflow the model's.
    converted = given.to(own.dtype)
    if not bool(torch.isfinite(converted).all()):
        raise RequestError(f"{path}: '{name}' holds NaN or infinities, expected finite weights")
    return converted


def _kind(tensor: torch.Tensor) -> str:
    import torch

    if tensor.dtype == torch.bool:
        return "truth values"
    if tensor.is_complex():
        return "complex numbers"
    return "real numbers" if tensor.is_floating_point() else "whole numbers"


def _with_sorted_header(content: bytes) -> bytes:
    """The same safetensors bytes with the header's entries in order.

    The library writes metadata in an order that changes from run to run.
    """
    start = HEADER_LENGTH.size
    end = start + HEADER_LENGTH.unpack(content[:start])[0]
    header = json.dumps(json.loads(content[start:end]), sort_keys=True, separators=(",", ":"))
    # The format wants tensors aligned to 8 bytes, and spaces to fill up.
    padded = header.encode() + b" " * (-len(header.encode()) % 8)
    return HEADER_LENGTH.pack(len(padded)) + padded + content[end:]


def _reason(error: Exception) -> str:
    return one_line(system_text(error), 200)


def statistics_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """List the layers of batch norm that keep statistics."""
    from torch.nn.modules.batchnorm import _BatchNorm

    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]


def calibrate(model: torch.nn.Module, batches: Iterable[torch.Tensor]) -> None:
    """Set batch norm's statistics to those of samples: their mean over batches.

    Only the layers of batch norm work as in training meanwhile; dropout, for one, doesn't.

    Parameters
    ----------
    model : torch.nn.Module
        In evaluation mode.
    batches : iterable of tensor
        On its device.

    Raises
    ------
    nlbench.RequestError
        If a batch is too small, or the model can't be run.

    Examples
    --------
    >>> import torch
    >>> layer = torch.nn.BatchNorm1d(2).eval()
    >>> calibrate(layer, [torch.tensor([[0.0, 1.0], [2.0, 1.0]])])
    >>> layer.running_mean.tolist(), layer.running_var.tolist()
    ([1.0, 1.0], [2.0, 0.0])
    """
    import torch

    layers: list[Any] = statistics_of(model)
    momenta = [layer.momentum for layer in layers]
    try:
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # The mean over all batches.
            layer.train()
        with torch.no_grad():
            for batch in batches:
                model(batch.clone())
    except (RuntimeError, ValueError, TypeError) as error:
        what = "batch norm can't be calibrated on the samples"
        raise RequestError(f"{what}: {_reason(error)}") from error
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
            layer.eval()
