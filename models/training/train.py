"""Trainings by registered recipes: what is asked for, and how one or several are carried out."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nlbench import registry
from nlbench.errors import (
    NlbenchError,
    NotFinite,
    PluginError,
    RequestError,
    error_text,
    nearest,
)
from nlbench.execution.executors import called
from nlbench.execution.numerics import Machine, resolve_device, some_threads
from nlbench.introspection.precision import exact_arithmetic
from nlbench.options import OptionValue
from nlbench.progress import Monitor, Progress
from nlbench.serialization.files import (
    locked,
    make_folder,
    parse_json,
    read_text,
    remove_parts,
    write_atomically,
)
from nlbench.serialization.hashing import file_hash
from nlbench.store.manifest import make_manifest, now
from nlbench.subjects.load import SubjectSpec, choose_weights, model_source
from nlbench.subjects.model import model_info
from nlbench.subjects.weights import save_weights, training_failure, training_folder

from .loop import Epoch, TrainingResult, example_of, train
from .recipes import Recipe
from .tasks import LARGEST_SEED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

__all__ = [
    "Trained",
    "TrainingLog",
    "TrainingRequest",
    "check_training",
    "finished_training",
    "give_up",
    "recipe_of",
    "run_training",
    "run_trainings",
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


class TrainingLog:
    """What a training leaves on disk.

    Parameters
    ----------
    out : Path
        The checkpoint.
    request : TrainingRequest
    recipe : Recipe
    command : str
        The command line, for the manifest.
    """

    def __init__(self, out: Path, request: TrainingRequest, recipe: Recipe, command: str) -> None:
        self.out = out
        self.folder = training_folder(out)
        self.state = self.folder / "state"
        self.request = request
        self.recipe = recipe
        self.manifest: dict[str, Any] = {}
        self.command = command
        self.rows: list[Epoch] = []
        self.began = time.perf_counter()
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
        if what := self._difference(old):
            raise RequestError(
                f"{self.out} was trained in another way ({what}); choose another --out"
            )
        if file_hash(self.out) != result["file_hash"]:
            raise RequestError(f"{self.out} is not what its training wrote; choose another --out")
        self.state.unlink(missing_ok=True)
        told = {entry.name: result[entry.name] for entry in fields(Trained)[1:]}
        return Trained(self.out, **told)

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
        if self.state.exists() and old and (what := self._difference(old)):
            raise RequestError(
                f"{self.folder} holds an interrupted training of another kind ({what}); choose "
                f"another --out, or remove {self.state}"
            )

    @contextmanager
    def opened(self, device: torch.device) -> Iterator[None]:
        """Make the folder, or take up an old one, and keep other writers out meanwhile.

        A training that is refused before its first epoch leaves no folder.

        Raises
        ------
        nlbench.RequestError
            If it can't be written, or is being written by another process.
        """
        make_folder(self.folder)
        with locked(self.folder):
            self._open(device)
            try:
                yield
            except NotFinite as error:
                self.fail(str(error))
                raise
            except NlbenchError:
                self._abandon()
                raise

    def _open(self, device: torch.device) -> None:
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
            "start": _start(self.request),
            "seeds": [self.request.seed],
            "calls": calls,
        }
        self.kept = dict(old.get("checkpoints", {}))
        self._write()

    def _abandon(self) -> None:
        manifest = self.folder / "manifest.json"
        if [entry.name for entry in self.folder.iterdir()] == [manifest.name]:
            manifest.unlink()
            self.folder.rmdir()

    def keep(self, epoch: Epoch, model: nn.Module, metadata: Mapping[str, str]) -> None:
        """Keep a checkpoint of an epoch."""
        file = self.folder / f"epoch{epoch.number:04d}.safetensors"
        save_weights(file, model, {**self._header(epoch), **metadata})
        self.kept[file.name] = file_hash(file)
        self._write()

    def note(self, epoch: Epoch) -> None:
        """Write a line of the log."""
        self.rows.append(epoch)
        write_atomically(self.folder / "epochs.csv", _table(self.rows))
        self._write()

    def fail(self, reason: str) -> None:
        """Note why there will be no checkpoint, for whoever asks for it."""
        self.manifest["failed"] = reason
        self._write()

    def close(self, result: TrainingResult) -> Trained:
        """Write the checkpoint, the manifest that says it is finished, and forget the state.

        In this order a process that is killed in between leaves what can be resumed.
        """
        last = result.history[-1]
        scores = {name: f"{value:.6g}" for name, value in result.scores.items()}
        save_weights(self.out, result.model, {**self._header(last), **scores, **result.metadata})
        trained = Trained(
            self.out,
            result.train_accuracy,
            result.test_accuracy,
            dict(result.scores),
            result.is_reached,
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

    def _header(self, epoch: Epoch) -> dict[str, str]:
        names = ("train_accuracy", "test_accuracy", "running_accuracy")
        shares = {name: getattr(epoch, name) for name in names}
        return {
            "nlbench": self.manifest["nlbench"],
            "model": self.request.model,
            "data": self.request.data,
            "recipe": self.request.recipe,
            "epochs": str(epoch.number),
            "seed": str(self.request.seed),
            "label_noise": str(float(self.recipe.label_noise)),
            **{name: f"{share:.4f}" for name, share in shares.items() if share is not None},
            "command": self.command,
        }

    def _difference(self, old: Mapping[str, Any]) -> str:
        """What an earlier call asked for otherwise, on whatever device; empty if nothing."""
        mine, theirs = _plain(asdict(self.request)), dict(old.get("request", {}))
        changed = [name for name in mine if name != "device" and theirs.get(name) != mine[name]]
        # From another folder the same file has another path; and a path may hold another file.
        before, now = old.get("start"), _start(self.request)
        if "weights" in changed and before == now is not None:
            changed.remove("weights")
        elif "weights" not in changed and None not in (before, now) and before != now:
            return f"what {self.request.weights} holds has changed since"
        said = [f"{name} was {theirs.get(name)} and is {mine[name]}" for name in changed[:3]]
        if not said and old.get("recipe") != _plain(asdict(self.recipe)):
            said = [f"recipe {self.recipe.name} has changed since"]
        return ", ".join(said)

    def _read(self) -> dict[str, Any]:
        file = self.folder / "manifest.json"
        if not file.is_file():
            return {}
        content = parse_json(read_text(file), str(file), finite=False)
        return content if isinstance(content, dict) else {}

    def _write(self) -> None:
        calls = self.manifest["calls"]
        calls[-1]["seconds"] = round(time.perf_counter() - self.began, 3)
        self.manifest["seconds"] = round(sum(call.get("seconds", 0.0) for call in calls), 3)
        _write_manifest(self.folder, {**self.manifest, "checkpoints": self.kept})


def _write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(_plain({"format": FORMAT, **content}), indent=1)
    write_atomically(folder / "manifest.json", text + "\n")


def _plain(content: Any) -> Any:
    """The same after a round trip through JSON."""
    return json.loads(json.dumps(content, default=str))


def _table(epochs: Sequence[Epoch]) -> str:
    columns = ("learning_rate", "loss", "running_accuracy", "train_accuracy", "test_accuracy")
    extra = list(dict.fromkeys(name for epoch in epochs for name in epoch.scores))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["epoch", *columns, *extra])
    for epoch in epochs:
        numbers = [getattr(epoch, name) for name in columns]
        writer.writerow([epoch.number, *numbers, *(epoch.scores.get(name, "") for name in extra)])
    return buffer.getvalue()


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

    @property
    def subject(self) -> SubjectSpec:
        """The network that training starts from, with the samples that it is trained on."""
        return SubjectSpec(
            self.model, self.weights, self.data, self.seed, split="train", options=self.options
        )


def suited_recipe(model: str, recipe: str = "auto") -> str:
    """Name the recipe that is followed: the one asked for, or for ``auto`` the model's own.

    Examples
    --------
    >>> suited_recipe("vgg8"), suited_recipe("resnet18-w8"), suited_recipe("vgg8", "augmented")
    ('vanilla', 'adam', 'augmented')
    """
    return model_info(registry.load("models", model)).recipe if recipe == "auto" else recipe


def recipe_of(request: TrainingRequest) -> Recipe:
    """Load the recipe, with what is to be otherwise.

    Raises
    ------
    nlbench.RequestError
        If there is no such recipe, or it has no such setting.
    nlbench.PluginError
        If what is registered is none.
    """
    recipe = registry.load("recipes", request.recipe)
    if not isinstance(recipe, Recipe):
        raise PluginError(
            f"recipe '{request.recipe}' is a {type(recipe).__name__}, expected "
            "nlbench.models.training.recipes.Recipe or a subclass"
        )
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
    progress: Callable[[Epoch], object] | None = None,
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
    nlbench.NotFinite
        If the loss or a logit ceases to be a finite number; the manifest says so.
    """
    if out.suffix != ".safetensors":
        raise RequestError(f"--out: expected a name that ends in .safetensors, got '{out}'")
    recipe = recipe_of(request)
    device = resolve_device(request.device)
    log = TrainingLog(out, request, recipe, command)
    if resume and (done := log.finished()) is not None:
        return done
    log.check(resume=resume)
    source = model_source(request.subject)
    if request.weights == "calibrated":
        raise RequestError(
            "--weights calibrated: training sets the statistics; give --weights init"
        )
    if getattr(recipe, "starts_trained", False) and request.weights == "init":
        raise RequestError(
            f"recipe '{request.recipe}' starts from trained weights; give --weights trained or a "
            "checkpoint's path"
        )

    def keep(epoch: Epoch, model: nn.Module, metadata: Mapping[str, str]) -> None:
        if epoch.number in keep_epochs or (keep_every and epoch.number % keep_every == 0):
            log.keep(epoch, model, metadata)

    def note(epoch: Epoch) -> None:
        log.note(epoch)
        if progress is not None:
            progress(epoch)

    with exact_arithmetic(), log.opened(device):
        result = train(
            lambda: source.build()[0],
            source.dataset,
            recipe,
            seed=request.seed,
            device=device,
            progress=note,
            state=log.state,
            keep=keep,
        )
        return log.close(result)


def finished_training(request: TrainingRequest, out: Path) -> Trained | None:
    """What an earlier call made of the same request; None if it is still to be trained.

    Raises
    ------
    nlbench.RequestError
        If the checkpoint is another training's, or was changed since.
    """
    return TrainingLog(out, request, recipe_of(request), "").finished()


def give_up(out: Path, request: TrainingRequest, reason: str) -> None:
    """Note why a training isn't begun, where it would have noted why it failed."""
    folder = training_folder(out)
    make_folder(folder)
    _write_manifest(folder, {"request": asdict(request), "failed": reason})


def check_training(request: TrainingRequest) -> str:
    """Refuse a network that a recipe isn't for before it is trained; give a remark if it is.

    Raises
    ------
    nlbench.RequestError
    """
    source = model_source(replace(request, weights="init").subject)
    return recipe_of(request).check(source.fresh(), example_of(source.dataset))


def _start(request: TrainingRequest) -> str | None:
    """What decides the weights that training starts from; None where they can't be had."""
    try:
        return choose_weights(request.subject).identity
    except RequestError:
        return None


THREADS = 1
"""PyTorch's of a training: small networks gain little by more, and their weights' last bits depend
on them."""


def run_trainings(
    requests: Mapping[Path, TrainingRequest],
    *,
    workers: int = 1,
    threads: int = THREADS,
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
    threads : int
        PyTorch's of each.
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
                {str(file): _told(request, file, command, todo) for file, request in todo.items()},
                after={str(file): request.weights for file, request in todo.items()},
                workers=workers,
                threads=threads,
            )
        ) as messages:
            for name, message in messages:
                heard(Path(name), message)
    else:
        with some_threads(threads):
            for file, request in todo.items():
                try:
                    _train_one(_told(request, file, command, todo), partial(heard, file))
                except NlbenchError as error:
                    heard(file, _failure(error))
    if errors:
        raise errors[0]


_KINDS = {kind.__name__: kind for kind in (NotFinite, PluginError, RequestError)}


def _told(
    request: TrainingRequest, file: Path, command: str, others: Iterable[Path]
) -> dict[str, Any]:
    is_next = request.weights in map(str, others)
    told = {"request": asdict(request), "file": str(file), "command": command}
    return {**told, "is_next": is_next}


def _failure(error: Exception) -> dict[str, Any]:
    return {"failed": error_text(error), "kind": type(error).__name__}


def train_as_told(given: Mapping[str, Any], send: Callable[[dict[str, Any]], object]) -> None:
    """Train a network in a process of its own, and send what comes of it, epoch by epoch.

    Parameters
    ----------
    given : mapping
        ``request``, ``file``, ``command``, and ``is_next``, whether it starts from a checkpoint
        that was to be trained before it, as JSON has them.
    send : callable
        Takes ``{"step": text}``, and ``{"failed": text, "kind": name of the error}``.
    """
    try:
        _train_one(given, send)
    except Exception as error:
        # Whatever a model's plugin raises concerns this network only.
        send(_failure(error))


def _train_one(given: Mapping[str, Any], send: Callable[[dict[str, Any]], object]) -> None:
    options = tuple((name, value) for name, value in given["request"]["options"])
    request = TrainingRequest(**{**given["request"], "options": options})
    file, start = Path(given["file"]), Path(request.weights)

    def step(epoch: Any) -> None:
        send({"step": f"training {file.stem}: loss {epoch.loss:.3f}"})

    if failure := training_failure(start):
        reason = f"it needs {start.stem}, whose training failed: {failure}"
        give_up(file, request, reason)
        raise RequestError(reason)
    if given["is_next"] and not start.exists():
        raise RequestError(f"it needs {start.stem}, whose training failed")
    run_training(request, file, resume=True, progress=step, command=given["command"])
