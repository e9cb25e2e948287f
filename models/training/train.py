"""Train one network, with its checkpoint, log and manifest on disk."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nlbench.errors import NotFinite, RequestError
from nlbench.execution.machine import describe_machine
from nlbench.introspection.precision import exact_arithmetic, resolve_device
from nlbench.serialization.fields import extra_fields, from_plain, to_plain
from nlbench.serialization.hashing import file_hash
from nlbench.store.locked_folder import LockedFolder
from nlbench.store.manifest import RunCall, make_manifest, now
from nlbench.subjects.load import model_source
from nlbench.subjects.weights import save_weights
from nlbench.subjects.weights_choice import choose_weights, training_folder

from .loop import Epoch, TrainingResult, difference_text, draw_example, train
from .training_request import TrainingRequest, load_recipe


@dataclass(frozen=True)
class TrainingSummary:
    """Summary of a finished training run and its checkpoint, as its manifest records it."""

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
    recipe: Mapping[str, Any] = field(default_factory=dict)
    start: str | None = None
    created: str | None = None
    calls: Sequence[RunCall] = ()
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    result: TrainingSummary | None = None
    others: Mapping[str, Any] = extra_fields()


class TrainingFolder(LockedFolder):
    """The folder for a training run, next to its checkpoint `out`."""

    def __init__(self, out: Path, request: TrainingRequest, command: str = "") -> None:
        super().__init__(training_folder(out))
        self.out = out
        self.state = self.path / "state"
        self.request = request
        self.recipe = load_recipe(request)
        self.manifest: dict[str, Any] = {}
        self.command = command
        self.epochs: list[Epoch] = []
        self.started = time.perf_counter()

    def finished(self) -> TrainingSummary | None:
        """Return the run's summary. None if it is not finished.

        It is an error if another run wrote the checkpoint, or if it has changed since.
        """
        recorded = self._recorded()
        if recorded.result is None or not self.out.is_file():
            return None
        if difference := self._difference(recorded):
            raise RequestError(
                f"{self.out} was trained differently ({difference}); choose another --out"
            )
        if file_hash(self.out) != recorded.result.file_hash:
            raise RequestError(
                f"{self.out} was changed after its training; remove it to train again, or choose "
                "another --out"
            )
        self.state.unlink(missing_ok=True)
        return recorded.result

    def check(self, *, resume: bool) -> None:
        """Raise if training would overwrite a checkpoint, or a run that isn't the one to resume."""
        if self.state.exists() and not resume:
            raise RequestError(
                f"{self.path} contains an interrupted training run; resume it with --resume, or "
                f"remove {self.state} to start again"
            )
        recorded = self._recorded()
        if self.out.exists() and not (resume and recorded.request and self.out.is_file()):
            raise RequestError(f"{self.out} already exists; remove it or choose another --out")
        is_known = self.state.exists() and recorded.request
        if is_known and (difference := self._difference(recorded)):
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
        recorded = self._recorded() if self.state.exists() else _RecordedTraining()
        calls = [*recorded.calls, RunCall(started=now(), command=self.command)]
        self.manifest = {
            **make_manifest(
                asdict(self.request),
                describe_machine(device),
                command=self.command,
                created=recorded.created,
            ),
            "threads": torch.get_num_threads(),
            "recipe": asdict(self.recipe),
            "start": _initial_weights(self.request),
            "seeds": [self.request.seed],
            "calls": to_plain(calls),
            "checkpoints": dict(recorded.checkpoints),
        }
        self._write_manifest()

    def write_checkpoint(self, epoch: Epoch, model: nn.Module, metadata: Mapping[str, str]) -> None:
        """Write the checkpoint for an epoch."""
        file = self.path / f"epoch{epoch.number:04d}.safetensors"
        save_weights(file, model, {**self._header(epoch), **metadata})
        self.manifest["checkpoints"][file.name] = file_hash(file)
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

    def _difference(self, recorded: _RecordedTraining) -> str:
        """Describe how a recorded run differs, ignoring its device. Return ``""`` if it doesn't."""
        ours = _as_json(asdict(self.request))
        # A later version may have more fields.
        theirs = {name: recorded.request.get(name, value) for name, value in ours.items()}
        ignored = ["device"]
        # A file may have several paths, and the content at a path may change.
        before = recorded.start
        current = _initial_weights(self.request)
        if theirs["weights"] != ours["weights"]:
            ignored += ["weights"] if before == current is not None else []
        elif None not in (before, current) and before != current:
            return f"the content of {self.request.weights} has changed"
        if difference := difference_text(theirs, ours, *ignored):
            return difference
        is_same_recipe = recorded.recipe == _as_json(asdict(self.recipe))
        return "" if is_same_recipe else f"recipe {self.recipe.name} has changed"

    def _recorded(self) -> _RecordedTraining:
        """Read the manifest. Return an empty one if there is none."""
        if not self.manifest_file.is_file():
            return _RecordedTraining()
        try:
            return from_plain(_RecordedTraining, self.read_manifest(), "the manifest")
        except ValueError as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(f"{self.manifest_file} is damaged: {error}") from error

    def _write_manifest(self) -> None:
        calls = self.manifest["calls"]
        calls[-1]["seconds"] = round(time.perf_counter() - self.started, 3)
        self.manifest["seconds"] = round(sum(call.get("seconds", 0.0) for call in calls), 3)
        self.write_manifest(self.manifest)


def record_failure(out: Path, request: TrainingRequest, reason: str) -> None:
    """Record a failure for a training run that could not start."""
    folder = LockedFolder(training_folder(out))
    with folder.locked():
        folder.write_manifest({"request": asdict(request), "failed": reason})


def _initial_weights(request: TrainingRequest) -> str | None:
    """Return the identity of the initial weights. None if they are unavailable."""
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
    rows = []
    for epoch in epochs:
        values = {name: getattr(epoch, name) for name in columns}
        rows.append({"epoch": epoch.number, **values, **epoch.scores})
    return pd.DataFrame(rows).to_csv(index=False)


def run_training(
    request: TrainingRequest,
    out: Path,
    *,
    resume: bool = False,
    keep_epochs: Collection[int] = (),
    keep_every: int = 0,
    progress: Callable[[Epoch], object] | None = None,
    command: str = "",
) -> TrainingSummary:
    """Train a network and write its checkpoint, log and manifest.

    Parameters
    ----------
    out : Path
        The checkpoint, ``NAME.safetensors``; the folder ``NAME.training`` is created next to it.
    resume : bool
        Resume an interrupted training run. A finished one is not repeated.
    keep_epochs, keep_every
        Epochs after which a checkpoint is written, and the number of epochs between others (0:
        none).
    """
    if out.suffix != ".safetensors":
        raise RequestError(f"--out: expected a name ending in .safetensors, got '{out}'")
    device = resolve_device(request.device)
    folder = TrainingFolder(out, request, command)
    recipe = folder.recipe
    if resume and (summary := folder.finished()) is not None:
        return summary
    folder.check(resume=resume)
    source = model_source(request.subject)
    if request.weights == "calibrated":
        raise RequestError("--weights calibrated: training sets the statistics; use --weights init")
    if getattr(recipe, "starts_trained", False) and request.weights == "init":
        raise RequestError(
            f"recipe '{request.recipe}' starts from trained weights; use --weights trained or a "
            "checkpoint's path"
        )

    def on_checkpoint(epoch: Epoch, model: nn.Module, metadata: Mapping[str, str]) -> None:
        if epoch.number in keep_epochs or (keep_every and epoch.number % keep_every == 0):
            folder.write_checkpoint(epoch, model, metadata)

    def log(epoch: Epoch) -> None:
        folder.add(epoch)
        if progress is not None:
            progress(epoch)

    with exact_arithmetic(), folder.opened(device):
        result = train(
            lambda: source.build()[0],
            source.dataset,
            recipe,
            seed=request.seed,
            device=device,
            progress=log,
            state=folder.state,
            on_checkpoint=on_checkpoint,
        )
        return folder.finish(result)


def check_training(request: TrainingRequest) -> str:
    """Check that a recipe applies to its network. Return a warning or an empty string."""
    source = model_source(replace(request, weights="init").subject)
    return load_recipe(request).check(source.fresh(), draw_example(source.dataset))
