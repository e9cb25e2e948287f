"""The state file of an interrupted training run."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nlbench.errors import RequestError
from nlbench.serialization.files import write_atomically

FORMAT = 1


def write_state(path: Path, identity: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Write the state of a training run atomically.

    Parameters
    ----------
    path : Path
        In an existing folder.
    identity : mapping
        Everything that determines the result of training; `read_state` compares it.
    state : mapping
        Tensors, numbers, strings, and lists and dicts of them.

    Raises
    ------
    nlbench.RequestError
        If the file can't be written.
    """
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
    state: dict[str, Any]
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Unpickling damaged bytes can raise any exception.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RequestError(
            f"{path} is not a training state, or is damaged ({reason[:80]}); remove it to train "
            "again"
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise RequestError(f"{path} is not a training state; remove it to train again")
    recorded = state["identity"]
    names = {**recorded, **identity}
    changed = [name for name in names if recorded.get(name) != identity.get(name)]
    if changed:
        difference = ", ".join(
            f"{name} was {recorded.get(name)} and is {identity.get(name)}" for name in changed[:3]
        )
        raise RequestError(
            f"{path} belongs to another training run: {difference}; remove it to train again"
        )
    return state
