"""The folder for a training run: manifest, log, checkpoints and the state for resuming."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nlbench.errors import NotFinite, RequestError
from nlbench.execution.machine import describe_machine
from nlbench.serialization.fields import extra_fields, from_plain
from nlbench.serialization.hashing import file_hash
from nlbench.store.locked_folder import LockedFolder
from nlbench.store.manifest import RunCall, make_manifest, now
from nlbench.subjects.weights import save_weights
from nlbench.subjects.weights_choice import choose_weights, training_folder

from .loop import Epoch, TrainingResult
from .recipes import Recipe
from .training_request import TrainingRequest
from .training_state import difference_text

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class TrainingSummary:
    """Summary of a finished training run, as its manifest records it.

    Parameters
    ----------
    scores : mapping of str to float
        Further scores at the end of training.
    is_reached : bool
        True if the recipe's thresholds were reached.
    file, file_hash : str
        Name and hash of the checkpoint.
    """

    train_accuracy: float
    test_accuracy: float
    scores: Mapping[str, float]
    is_reached: bool
    epochs: int
    file: str
    file_hash: str


@dataclass(frozen=True)
class _RecordedTraining:
    """The fields of a manifest that a later call reads."""

    request: Mapping[str, Any] = field(default_factory=dict)
    start: str | None = None
    created: str | None = None
    calls: Sequence[RunCall] = ()
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    result: TrainingSummary | None = None
    others: Mapping[str, Any] = extra_fields()


class TrainingFolder(LockedFolder):
    """The folder for a training run, next to its checkpoint `out`."""

    def __init__(self, out: Path, request: TrainingRequest, recipe: Recipe, command: str) -> None:
        super().__init__(training_folder(out))
        self.out = out
        self.state = self.path / "state"
        self.request = request
        self.recipe = recipe
        self.manifest: dict[str, Any] = {}
        self.command = command
        self.epochs: list[Epoch] = []
        self.started = time.perf_counter()
        self.checkpoint_hashes: dict[str, str] = {}

    def finished(self) -> TrainingSummary | None:
        """Return the run's summary; None if it is not finished.

        It is an error if another run wrote the checkpoint, or if it has changed since.
        """
        recorded = self._recorded_manifest()
        if recorded.get("result") is None or not self.out.is_file():
            return None
        summary = TrainingSummary(**recorded["result"])
        if difference := self._difference(recorded):
            raise RequestError(
                f"{self.out} was trained differently ({difference}); choose another --out"
            )
        if file_hash(self.out) != summary.file_hash:
            raise RequestError(
                f"{self.out} was changed after its training; remove it to train again, or choose "
                "another --out"
            )
        self.state.unlink(missing_ok=True)
        return summary

    def check(self, *, resume: bool) -> None:
        """Raise if training would overwrite a checkpoint, or a run that isn't the one to resume."""
        if self.state.exists() and not resume:
            raise RequestError(
                f"{self.path} contains an interrupted training run; resume it with --resume, or "
                f"remove {self.state} to start again"
            )
        recorded = self._recorded_manifest()
        if self.out.exists() and not (resume and recorded):
            raise RequestError(f"{self.out} already exists; remove it or choose another --out")
        if self.state.exists() and recorded and (difference := self._difference(recorded)):
            raise RequestError(
                f"{self.path} contains another interrupted training run ({difference}); choose "
                f"another --out, or remove {self.state}"
            )

    @contextmanager
    def opened(self, device: torch.device) -> Iterator[None]:
        """Create or reopen the folder, and lock it against other writers.

        Training that ends before its first epoch leaves no folder behind.
        """
        with self.locked():
            self._begin(device)
            try:
                yield
            except NotFinite as error:
                self.manifest["failed"] = str(error)
                self._write_manifest()
                raise
            except BaseException:
                if [entry.name for entry in self.path.iterdir()] == [self.manifest_file.name]:
                    self.manifest_file.unlink()
                    self.path.rmdir()
                raise

    def _begin(self, device: torch.device) -> None:
        self.remove_parts()
        recorded = self._recorded_manifest() if self.state.exists() else {}
        calls = [*recorded.get("calls", []), {"started": now(), "command": self.command}]
        self.manifest = {
            **make_manifest(
                asdict(self.request),
                describe_machine(device),
                command=self.command,
                created=recorded.get("created"),
            ),
            "threads": torch.get_num_threads(),
            "recipe": asdict(self.recipe),
            "start": _initial_weights(self.request),
            "seeds": [self.request.seed],
            "calls": calls,
        }
        self.checkpoint_hashes = dict(recorded.get("checkpoints", {}))
        self._write_manifest()

    def write_checkpoint(self, epoch: Epoch, model: nn.Module, metadata: Mapping[str, str]) -> None:
        """Write the checkpoint for an epoch."""
        file = self.path / f"epoch{epoch.number:04d}.safetensors"
        save_weights(file, model, {**self._header(epoch), **metadata})
        self.checkpoint_hashes[file.name] = file_hash(file)
        self._write_manifest()

    def add(self, epoch: Epoch) -> None:
        """Add a row to the log."""
        self.epochs.append(epoch)
        self.write(self.path / "epochs.csv", _log_table(self.epochs))
        self._write_manifest()

    def finish(self, result: TrainingResult) -> TrainingSummary:
        """Write the checkpoint and the final manifest, and remove the state.

        The order ensures that a run killed in between can be resumed.
        """
        last = result.history[-1]
        scores = {name: f"{value:.6g}" for name, value in result.scores.items()}
        save_weights(self.out, result.model, {**self._header(last), **scores, **result.metadata})
        summary = TrainingSummary(
            result.train_accuracy,
            result.test_accuracy,
            dict(result.scores),
            result.thresholds_reached,
            last.number,
            self.out.name,
            file_hash(self.out),
        )
        self.manifest["result"] = asdict(summary)
        self._write_manifest()
        self.state.unlink(missing_ok=True)
        return summary

    def _header(self, epoch: Epoch) -> dict[str, str]:
        names = ("train_accuracy", "test_accuracy", "running_accuracy")
        accuracies = {name: getattr(epoch, name) for name in names}
        return {
            "nlbench": self.manifest["nlbench"],
            "model": self.request.model,
            "data": self.request.data,
            "recipe": self.request.recipe,
            "epochs": str(epoch.number),
            "seed": str(self.request.seed),
            "label_noise": str(float(self.recipe.label_noise)),
            **{name: f"{value:.4f}" for name, value in accuracies.items() if value is not None},
            "command": self.command,
        }

    def _difference(self, recorded: Mapping[str, Any]) -> str:
        """Describe how a recorded run differs, ignoring its device; return ``""`` if it doesn't."""
        ours = _as_json(asdict(self.request))
        # A later version may have more fields.
        theirs = {**ours, **recorded.get("request", {})}
        theirs = {name: theirs[name] for name in ours}
        ignored = ["device"]
        # A file may have several paths, and the content at a path may change.
        before, current = recorded.get("start"), _initial_weights(self.request)
        if theirs["weights"] != ours["weights"]:
            ignored += ["weights"] if before == current is not None else []
        elif None not in (before, current) and before != current:
            return f"the content of {self.request.weights} has changed"
        if difference := difference_text(theirs, ours, *ignored):
            return difference
        if recorded.get("recipe") != _as_json(asdict(self.recipe)):
            return f"recipe {self.recipe.name} has changed"
        return ""

    def _recorded_manifest(self) -> dict[str, Any]:
        """Read the manifest; return an empty one if there is none."""
        if not self.manifest_file.is_file():
            return {}
        manifest = self.read_manifest()
        try:
            from_plain(_RecordedTraining, manifest, "the manifest")
        except ValueError as error:
            raise RequestError(f"{self.manifest_file} is damaged: {error}") from error
        return manifest

    def _write_manifest(self) -> None:
        calls = self.manifest["calls"]
        calls[-1]["seconds"] = round(time.perf_counter() - self.started, 3)
        self.manifest["seconds"] = round(sum(call.get("seconds", 0.0) for call in calls), 3)
        self.write_manifest({**self.manifest, "checkpoints": self.checkpoint_hashes})


def record_failure(out: Path, request: TrainingRequest, reason: str) -> None:
    """Record a failure for a training run that could not start."""
    folder = LockedFolder(training_folder(out))
    with folder.locked():
        folder.write_manifest({"request": asdict(request), "failed": reason})


def _initial_weights(request: TrainingRequest) -> str | None:
    """Return the identity of the initial weights; None if they are unavailable."""
    try:
        return choose_weights(request.subject).identity
    except RequestError:
        return None


def _as_json(content: Any) -> Any:
    """Return the content after a round trip through JSON."""
    return json.loads(json.dumps(content, default=str))


def _log_table(epochs: Sequence[Epoch]) -> str:
    import pandas as pd

    columns = ("learning_rate", "loss", "running_accuracy", "train_accuracy", "test_accuracy")
    rows = [
        {"epoch": epoch.number, **{name: getattr(epoch, name) for name in columns}, **epoch.scores}
        for epoch in epochs
    ]
    return pd.DataFrame(rows).to_csv(index=False)
