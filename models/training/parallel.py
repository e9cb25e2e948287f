"""Train several networks, in this process or in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from nlbench.errors import NlbenchError, NotFinite, PluginError, RequestError, error_text
from nlbench.execution.processes import call_in_processes
from nlbench.introspection.threads import torch_threads
from nlbench.progress import Progress, ProgressMonitor
from nlbench.serialization.fields import from_plain, to_plain
from nlbench.subjects.weights_choice import training_failure

from .loop import Epoch
from .train import TrainingFolder, record_failure, run_training
from .training_request import TrainingRequest, load_recipe

Message = dict[str, Any]
MessageCallback = Callable[[Message], object]

THREADS_PER_NETWORK = 1
"""Threads per network; more threads help little and change the last bits of the weights."""


class _StartFailed(RequestError):
    """Error for a network whose initial weights come from a failed training run."""


_ERROR_CLASSES: Mapping[str, type[NlbenchError]] = {
    **{kind.__name__: kind for kind in (NotFinite, PluginError, RequestError)},
    _StartFailed.__name__: RequestError,
}


def train_networks(
    requests: Mapping[Path, TrainingRequest],
    *,
    workers: int = 1,
    threads: int = THREADS_PER_NETWORK,
    progress: Progress | None = None,
    command: str = "",
) -> None:
    """Train networks, each after the one whose checkpoint it starts from.

    Finished training runs are skipped and interrupted ones resumed. A failure does not stop the
    other runs.

    Parameters
    ----------
    requests : mapping of Path to TrainingRequest
        Keyed by checkpoint; each request comes after those that it depends on.
    workers : int
        Number of worker processes; 1 trains in this process. The checkpoints are byte-identical
        regardless of the number.

    Raises
    ------
    nlbench.NlbenchError
        The first failure, with the network's name, once all others have finished. Later failures
        are reported as warnings, unless they are caused by an earlier one.
    """
    pending = {
        file: request
        for file, request in requests.items()
        if TrainingFolder(file, request).finished() is None
    }
    if not pending:
        return
    for file in pending:
        file.parent.mkdir(parents=True, exist_ok=True)
    monitor = ProgressMonitor(progress)
    monitor.begin(sum(load_recipe(request).epochs for request in pending.values()))
    errors: list[NlbenchError] = []
    skipped: list[str] = []

    def receive(file: Path, message: Message) -> None:
        if "step" in message:
            monitor.step(message["step"])
        elif message.get("kind") == _StartFailed.__name__ and calls[file]["waits"]:
            skipped.append(file.stem)
        elif text := message.get("failed") or message.get("done"):
            error_class = _ERROR_CLASSES.get(message.get("kind", ""), NlbenchError)
            errors.append(error_class(f"training {file.stem}: {text}"))
            if len(errors) > 1:
                monitor.warn(str(errors[-1]))

    files = set(map(str, pending))
    calls = {}
    for file, request in pending.items():
        calls[file] = {
            "request": to_plain(request),
            "file": str(file),
            "command": command,
            "waits": request.weights in files,
        }
    if min(workers, len(pending)) > 1:
        with closing(
            call_in_processes(
                f"{__name__}:train_in_worker",
                {str(file): call for file, call in calls.items()},
                after={str(file): request.weights for file, request in pending.items()},
                workers=workers,
                threads=threads,
            )
        ) as messages:
            for name, message in messages:
                receive(Path(name), message)
    else:
        with torch_threads(threads):
            for file, call in calls.items():
                try:
                    _train(call, partial(receive, file))
                except NlbenchError as error:
                    receive(file, _failure(error))
    if errors and skipped:
        names = ", ".join(skipped)
        raise type(errors[0])(f"{errors[0]}; skipped because they start from failed ones: {names}")
    if errors:
        raise errors[0]


def train_in_worker(call: Mapping[str, Any], send: MessageCallback) -> None:
    """Train a network in a worker process and report its progress, or its failure."""
    try:
        _train(call, send)
    except Exception as error:
        # An exception in a model plugin must not stop the training of the other networks.
        send(_failure(error))


def _failure(error: Exception) -> Message:
    return {"failed": error_text(error), "kind": type(error).__name__}


def _train(call: Mapping[str, Any], send: MessageCallback) -> None:
    request = from_plain(TrainingRequest, call["request"], "the request")
    file = Path(call["file"])
    start = Path(request.weights)

    def step(epoch: Epoch) -> None:
        send({"step": f"training {file.stem}: loss {epoch.loss:.3f}"})

    if failure := training_failure(start):
        reason = f"it needs {start.stem}, whose training failed: {failure}"
        record_failure(file, request, reason)
        raise _StartFailed(reason)
    if call["waits"] and not start.exists():
        raise _StartFailed(f"it needs {start.stem}, whose training failed")
    run_training(request, file, resume=True, progress=step, command=call["command"])
