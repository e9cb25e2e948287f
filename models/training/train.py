"""A training by a registered recipe: what it is asked for, and how it is carried out."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from nlbench import registry
from nlbench.errors import NlbenchError, RequestError, nearest
from nlbench.execution.numerics import Machine, exact_arithmetic, resolve_device
from nlbench.files import make_folder, remove_parts, write_atomically
from nlbench.hashing import file_hash
from nlbench.options import OptionValue
from nlbench.store.manifest import make_manifest, now
from nlbench.subjects.load import (
    SubjectSpec,
    adapted,
    build_model,
    choose_weights,
    header_of,
    load_dataset,
    transformed,
)
from nlbench.subjects.model import model_info
from nlbench.subjects.weights import load_weights, save_weights

if TYPE_CHECKING:
    from torch import nn

    from nlbench.subjects.data import Data

__all__ = [
    "EpochLike",
    "Trained",
    "TrainingLog",
    "TrainingRequest",
    "recipe_of",
    "run_training",
    "starting_point",
    "suited_recipe",
]


FORMAT = 1


@dataclass(frozen=True)
class Trained:
    """A finished training.

    Parameters
    ----------
    file : Path
        The checkpoint.
    train_accuracy, test_accuracy : float
    scores : mapping of str to float
        What else was measured at the end.
    is_reached : bool
        Whether the recipe's thresholds were reached.
    epochs : int
    """

    file: Path
    train_accuracy: float
    test_accuracy: float
    scores: Mapping[str, float]
    is_reached: bool
    epochs: int


class EpochLike(Protocol):
    """What a recipe's ``train`` tells of an epoch.

    ``train_accuracy`` is None where it wasn't measured. Another attribute, ``running_accuracy``,
    is optional.
    """

    number: int
    learning_rate: float
    loss: float
    train_accuracy: float | None
    test_accuracy: float
    scores: Mapping[str, float]


class TrainingLog:
    """What a training leaves on disk.

    Parameters
    ----------
    out : Path
        The checkpoint.
    request : dataclass
        What was asked for, with at least ``model``, ``data``, ``recipe`` and ``seed``.
    recipe : dataclass
        What it was made of.
    command : str
        The command line, for the manifest.
    """

    def __init__(self, out: Path, request: Any, recipe: Any, command: str) -> None:
        self.out = out
        self.folder = out.with_suffix(".training")
        self.state = self.folder / "state"
        self.request = request
        self.recipe = recipe
        self.manifest: dict[str, Any] = {}
        self.command = command
        self.rows: list[EpochLike] = []
        self.kept: dict[str, str] = {}

    def finished(self) -> Trained | None:
        """What an earlier call finished, if it was the same training.

        Raises
        ------
        nlbench.RequestError
            If it was another one, or its checkpoint was changed since.
        """
        old = self._read()
        result = old.get("result")
        if result is None or not self.out.is_file():
            return None
        if not self._is_same(old) or old.get("recipe") != _plain(asdict(self.recipe)):
            raise RequestError(f"{self.out} was trained in another way; choose another --out")
        if file_hash(self.out) != result["file_hash"]:
            raise RequestError(f"{self.out} is not what its training wrote; choose another --out")
        self.state.unlink(missing_ok=True)
        return Trained(
            self.out,
            result["train_accuracy"],
            result["test_accuracy"],
            result["scores"],
            result["is_reached"],
            result["epochs"],
        )

    def check(self, *, resume: bool) -> None:
        """Refuse to overwrite what isn't taken up.

        Raises
        ------
        nlbench.RequestError
            If there is a checkpoint or an interrupted training that is not to be resumed, or
            is another one.
        """
        if self.state.exists() and not resume:
            raise RequestError(
                f"{self.folder} holds an interrupted training; --resume goes on with it, and "
                f"removing {self.state} lets it begin anew"
            )
        old = self._read()
        if self.out.exists() and not (resume and old):
            raise RequestError(f"{self.out} exists; remove it or choose another --out")
        if self.state.exists() and old and not self._is_same(old):
            raise RequestError(
                f"{self.folder} holds an interrupted training of another kind; choose another "
                f"--out, or remove {self.state}"
            )

    def open(self, device: torch.device) -> None:
        """Make the folder, or take up an old one."""
        make_folder(self.folder)
        remove_parts(self.folder)
        old = self._read() if self.state.exists() else {}
        calls = [*old.get("calls", []), {"started": now(), "command": self.command}]
        self.manifest = {
            **make_manifest(
                asdict(self.request),
                Machine.at(device),
                command=self.command,
                created=old.get("created"),
            ),
            "threads": torch.get_num_threads(),
            "recipe": asdict(self.recipe),
            "seeds": [self.request.seed],
            "calls": calls,
        }
        self.kept = dict(old.get("checkpoints", {}))
        self._write()

    def abandon(self) -> None:
        """Remove the folder of a training that was refused before its first epoch."""
        manifest = self.folder / "manifest.json"
        if [entry.name for entry in self.folder.iterdir()] == [manifest.name]:
            manifest.unlink()
            self.folder.rmdir()

    def keep(self, epoch: EpochLike, model: nn.Module, metadata: Mapping[str, str]) -> None:
        """Keep a checkpoint of an epoch."""
        file = self.folder / f"epoch{epoch.number:04d}.safetensors"
        save_weights(file, model, {**self._header(epoch), **metadata})
        self.kept[file.name] = file_hash(file)
        self._write()

    def note(self, epoch: EpochLike) -> None:
        """Write a line of the log."""
        self.rows.append(epoch)
        write_atomically(self.folder / "epochs.csv", _table(self.rows))

    def close(self, result: Any) -> Trained:
        """Write the checkpoint, the manifest that says it is finished, and forget the state.

        In this order a process that is killed in between leaves what can be resumed.
        """
        last = result.history[-1]
        header = {**self._header(last), **dict(getattr(result, "metadata", {}))}
        save_weights(self.out, result.model, header)
        trained = Trained(
            self.out,
            result.train_accuracy,
            result.test_accuracy,
            dict(getattr(result, "scores", {})),
            bool(getattr(result, "is_reached", True)),
            last.number,
        )
        self.manifest["result"] = {
            **_plain({k: v for k, v in asdict(trained).items() if k != "file"}),
            "file": self.out.name,
            "file_hash": file_hash(self.out),
        }
        self._write()
        self.state.unlink(missing_ok=True)
        return trained

    def _header(self, epoch: EpochLike) -> dict[str, str]:
        noise = getattr(self.recipe, "label_noise", 0.0)
        names = ("train_accuracy", "test_accuracy", "running_accuracy")
        shares = {name: getattr(epoch, name, None) for name in names}
        return {
            "nlbench": self.manifest["nlbench"],
            "model": self.request.model,
            "data": self.request.data,
            "recipe": self.request.recipe,
            "epochs": str(epoch.number),
            "seed": str(self.request.seed),
            "label_noise": str(float(noise)),
            **{name: f"{share:.4f}" for name, share in shares.items() if share is not None},
            "command": self.command,
        }

    def _is_same(self, old: Mapping[str, Any]) -> bool:
        """Whether an earlier call asked for the same, on whatever device."""
        mine, theirs = ({**_plain(r)} for r in (asdict(self.request), old.get("request", {})))
        return {**mine, "device": ""} == {**theirs, "device": ""}

    def _read(self) -> dict[str, Any]:
        file = self.folder / "manifest.json"
        if not file.is_file():
            return {}
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RequestError(f"can't read {file}: {error}") from error
        return content if isinstance(content, dict) else {}

    def _write(self) -> None:
        content = {"format": FORMAT, **self.manifest, "checkpoints": self.kept}
        text = json.dumps(_plain(content), indent=1)
        write_atomically(self.folder / "manifest.json", text + "\n")


def _plain(content: Any) -> Any:
    """The same after a round trip through JSON."""
    return json.loads(json.dumps(content, default=str))


def _table(epochs: Sequence[EpochLike]) -> str:
    columns = ("learning_rate", "loss", "running_accuracy", "train_accuracy", "test_accuracy")
    extra = list(dict.fromkeys(name for epoch in epochs for name in epoch.scores))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["epoch", *columns, *extra])
    for epoch in epochs:
        numbers = [getattr(epoch, name, None) for name in columns]
        writer.writerow([epoch.number, *numbers, *(epoch.scores.get(name, "") for name in extra)])
    return buffer.getvalue()


LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True)
class TrainingRequest:
    """What a training is asked for.

    Parameters
    ----------
    model, data, recipe : str
        Registered names.
    seed : int
        From 0 to 2³² - 1; decides the initialisation, the order of the samples and the noise.
    weights : str
        Where training starts: ``init``, ``trained`` or a checkpoint's path.
    label_noise : float or None
        Share of training labels to corrupt; None: the recipe's.
    changes : mapping of str to value
        Fields of the recipe that are to be otherwise.
    options : tuple of (str, value)
        Of the dataset.
    device : str
        ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.

    Raises
    ------
    nlbench.RequestError
        If the seed is out of bounds.
    """

    model: str
    data: str
    recipe: str
    seed: int = 0
    weights: str = "init"
    label_noise: float | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[tuple[str, OptionValue | str], ...] = ()
    device: str = "auto"

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= LARGEST_SEED:
            raise RequestError(f"the seed is {self.seed}, expected 0 to {LARGEST_SEED}")


def suited_recipe(model: str, recipe: str = "auto") -> str:
    """Name the recipe that is followed: the one asked for, or for ``auto`` the model's own.

    Examples
    --------
    >>> suited_recipe("vgg8"), suited_recipe("resnet18-w8"), suited_recipe("vgg8", "augmented")
    ('vanilla', 'adam', 'augmented')
    """
    return model_info(registry.load("models", model)).recipe if recipe == "auto" else recipe


def recipe_of(request: TrainingRequest) -> Any:
    """Load the recipe, with what is to be otherwise.

    Raises
    ------
    nlbench.RequestError
        If there is no such recipe, or it has no such setting.
    """
    recipe = registry.load("recipes", request.recipe)
    changes = dict(request.changes)
    if request.label_noise is not None:
        changes["label_noise"] = request.label_noise
    if changes:
        names = {entry.name for entry in fields(recipe)}
        for name in changes:
            if name not in names:
                raise RequestError(
                    f"recipe '{request.recipe}' has no setting '{name}'{nearest(name, names)}"
                )
        recipe = replace(recipe, **changes)
    return recipe


def run_training(
    request: TrainingRequest,
    out: Path,
    *,
    resume: bool = False,
    keep_epochs: Collection[int] = (),
    keep_every: int = 0,
    progress: Callable[[EpochLike], object] | None = None,
    command: str = "",
) -> Trained:
    """Train a network and write its checkpoint, log and manifest.

    Parameters
    ----------
    request : TrainingRequest
    out : Path
        The checkpoint, ``NAME.safetensors``; the folder ``NAME.training`` is made beside it.
    resume : bool
        Go on where an earlier call was interrupted; a finished training is not repeated.
    keep_epochs : collection of int
        After which epochs a checkpoint is kept.
    keep_every : int
        Keep one after every so many epochs; 0: none.
    progress : callable, optional
        Called after each epoch.
    command : str
        The command line, for the manifest.

    Raises
    ------
    nlbench.RequestError
        If the request can't be carried out; or a checkpoint or an interrupted training lies
        there that is not to be resumed, or is another one.
    """
    if out.suffix != ".safetensors":
        raise RequestError(f"--out: expected a name that ends in .safetensors, got '{out}'")
    recipe = recipe_of(request)
    device = resolve_device(request.device)
    log = TrainingLog(out, request, recipe, command)
    if resume and (done := log.finished()) is not None:
        return done
    log.check(resume=resume)
    dataset, build = starting_point(request)
    if getattr(recipe, "starts_trained", False) and request.weights == "init":
        raise RequestError(
            f"recipe '{request.recipe}' starts from trained weights; give --weights trained or a "
            "checkpoint's path"
        )
    log.open(device)

    def keep(epoch: EpochLike, model: nn.Module, metadata: Mapping[str, str]) -> None:
        if epoch.number in keep_epochs or (keep_every and epoch.number % keep_every == 0):
            log.keep(epoch, model, metadata)

    def note(epoch: EpochLike) -> None:
        log.note(epoch)
        if progress is not None:
            progress(epoch)

    try:
        with exact_arithmetic():
            result = recipe.train(
                build,
                dataset,
                seed=request.seed,
                device=device,
                progress=note,
                state=log.state,
                keep=keep,
            )
    except NlbenchError:
        log.abandon()
        raise
    return log.close(result)


def starting_point(request: TrainingRequest) -> tuple[Data, Callable[[], nn.Module]]:
    """Give the dataset, and what builds the network that training starts from."""
    spec = SubjectSpec(
        request.model, request.weights, request.data, request.seed, options=request.options
    )
    choice = choose_weights(spec)
    info = model_info(registry.load("models", request.model))
    dataset = adapted(load_dataset(request.data, dict(request.options)), info, choice)

    def build() -> nn.Module:
        model = build_model(request.model, dataset, request.seed)
        if choice.file is None:
            return model
        example = dataset.sample(2, split="train", seed=0)
        model = transformed(model, header_of(choice.file), lambda: example.inputs)
        load_weights(model, choice.file, rename=info.rename)
        return model

    return dataset, build
