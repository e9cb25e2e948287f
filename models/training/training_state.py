"""The state file of an interrupted training run."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nlbench.errors import RequestError, first_line
from nlbench.serialization.files import write_atomically

FORMAT = 1


def write_state(path: Path, identity: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Write the state of a training run, and all that determines its result, atomically."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "identity": dict(identity), **state}, buffer)
    write_atomically(path, buffer.getvalue())


def read_state(path: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Read the state of a training run, unpickling only tensors and plain values.

    Raises
    ------
    nlbench.RequestError
        If the file is damaged or was written by another training run.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "state"
    >>> write_state(path, {"seed": 0}, {"epoch": 3})
    >>> read_state(path, {"seed": 0})["epoch"]
    3
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Unpickling damaged bytes can raise any exception.
        reason = first_line(error)[:80]
        raise RequestError(
            f"{path} is not a training state, or is damaged ({reason}); remove it to train again"
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise RequestError(f"{path} is not a training state; remove it to train again")
    if difference := difference_text(state["identity"], identity):
        raise RequestError(
            f"{path} belongs to another training run: {difference}; remove it to train again"
        )
    return state


def difference_text(before: Mapping[str, Any], now: Mapping[str, Any], *ignored: str) -> str:
    """Describe the first three entries that differ.

    Empty if none does.

    Examples
    --------
    >>> difference_text({"seed": 0, "device": "cpu"}, {"seed": 1, "device": "cuda"}, "device")
    'seed was 0 and is 1'
    """
    names = [n for n in {**before, **now} if before.get(n) != now.get(n) and n not in ignored]
    return ", ".join(f"{n} was {before.get(n)} and is {now.get(n)}" for n in names[:3])
