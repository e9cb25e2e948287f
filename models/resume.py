"""The state of an interrupted training on disk."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nlbench.errors import RequestError
from nlbench.files import write_atomically

__all__ = ["read_state", "write_state"]

FORMAT = 1


def write_state(path: Path, identity: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Write a training's state, whole or not at all.

    Parameters
    ----------
    path : Path
        In a folder that exists.
    identity : mapping
        What decides the training; `read_state` compares it.
    content : mapping
        Tensors, numbers, texts, lists and dicts of them.

    Raises
    ------
    nlbench.RequestError
        If it can't be written.
    """
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "identity": dict(identity), **content}, buffer)
    write_atomically(path, buffer.getvalue())


def read_state(path: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Read a training's state; only tensors and plain values are ever unpickled.

    Raises
    ------
    nlbench.RequestError
        If the file is damaged, or another training wrote it; the message says what differs.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "state"
    >>> write_state(path, {"seed": 0}, {"epoch": 3})
    >>> read_state(path, {"seed": 0})["epoch"]
    3
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Damaged bytes make the unpickler fail in any way.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RequestError(
            f"{path} is no state of a training, or damaged ({reason[:80]}); remove it to train anew"
        ) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise RequestError(f"{path} is no state of a training; remove it to train anew")
    old = found["identity"]
    changed = [key for key in {**old, **identity} if old.get(key) != identity.get(key)]
    if changed:
        said = ", ".join(f"{k} was {old.get(k)} and is {identity.get(k)}" for k in changed[:3])
        raise RequestError(f"{path} is of another training: {said}; remove it to train anew")
    content: dict[str, Any] = found
    return content
