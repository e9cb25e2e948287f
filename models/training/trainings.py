"""Several trainings: side by side in processes, or one after the other, to the same checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from nlbench.errors import NlbenchError, NotFinite, PluginError, RequestError, error_text
from nlbench.execution.executors import called
from nlbench.execution.numerics import some_threads
from nlbench.progress import Monitor, Progress
from nlbench.subjects.weights import training_failure

from .train import (
    TrainingRequest,
    finished_training,
    give_up,
    recipe_of,
    run_training,
)

__all__ = ["run_trainings"]


THREADS = 1
"""PyTorch's of a training: small networks gain little by more, and their weights' last bits depend
on them."""


def run_trainings(
    requests: Mapping[Path, TrainingRequest],
    *,
    workers: int = 1,
    progress: Progress | None = None,
    command: str = "",
) -> None:
    """Train networks, each after the one whose checkpoint it starts from.

    What is finished is not repeated, and what was interrupted goes on. Where one fails, the others
    are trained all the same.

    Parameters
    ----------
    requests : mapping of Path to TrainingRequest
        By checkpoint, in an order in which they can be trained.
    workers : int
        How many train at a time, each in a process of its own; 1: in this one. Checkpoints are the
        same, byte by byte.
    progress : Progress, optional
        Told of each epoch.
    command : str
        The command line, for the manifests.

    Raises
    ------
    nlbench.NlbenchError
        If one fails: what the first of them says, with its name. Those after it are warned of.
    """
    todo = {
        file: request
        for file, request in requests.items()
        if finished_training(request, file) is None
    }
    if not todo:
        return
    for file in todo:
        file.parent.mkdir(parents=True, exist_ok=True)
    monitor = Monitor(progress)
    monitor.begin(sum(recipe_of(request).epochs for request in todo.values()))
    errors: list[NlbenchError] = []

    def heard(file: Path, message: Mapping[str, Any]) -> None:
        if "step" in message:
            monitor.step(message["step"])
        elif text := message.get("failed") or message.get("done"):
            kind = _KINDS.get(message.get("kind", ""), NlbenchError)
            errors.append(kind(f"training {file.stem}: {text}"))
            if len(errors) > 1:
                monitor.warn(str(errors[-1]))

    if min(workers, len(todo)) > 1:
        with closing(
            called(
                f"{__name__}:train_as_told",
                {str(file): _told(request, file, command) for file, request in todo.items()},
                after={str(file): request.weights for file, request in todo.items()},
                workers=workers,
                threads=THREADS,
            )
        ) as messages:
            for name, message in messages:
                heard(Path(name), message)
    else:
        with some_threads(THREADS):
            for file, request in todo.items():
                train_as_told(_told(request, file, command), partial(heard, file))
    if errors:
        raise errors[0]


_KINDS = {kind.__name__: kind for kind in (NotFinite, PluginError, RequestError)}


def _told(request: TrainingRequest, file: Path, command: str) -> dict[str, Any]:
    return {"request": asdict(request), "file": str(file), "command": command}


def train_as_told(given: Mapping[str, Any], send: Callable[[dict[str, Any]], object]) -> None:
    """Train a network, here or in another process, and send what comes of it, epoch by epoch.

    Parameters
    ----------
    given : mapping
        ``request``, ``file`` and ``command``, as JSON has them.
    send : callable
        Takes ``{"step": text}``, and ``{"failed": text, "kind": name of the error}``.
    """
    options = tuple((name, value) for name, value in given["request"]["options"])
    request = TrainingRequest(**{**given["request"], "options": options})
    file, start = Path(given["file"]), Path(request.weights)

    def step(epoch: Any) -> None:
        send({"step": f"training {file.stem}: loss {epoch.loss:.3f}"})

    try:
        if failure := training_failure(start):
            reason = f"it needs {start.stem}, whose training failed: {failure}"
            give_up(file, request, reason)
            raise RequestError(reason)
        run_training(request, file, resume=True, progress=step, command=given["command"])
    except Exception as error:
        # Whatever a model's plugin raises concerns this network only.
        send({"failed": error_text(error), "kind": type(error).__name__})
