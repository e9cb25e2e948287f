"""A grid of linearisations as a run: accuracy, linear units and one measure for each ω and seed.

In the run's folder lie the checkpoints too, under ``checkpoints/``; each can be a subject of
any other measure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nlbench import registry
from nlbench.errors import NotFinite, RequestError
from nlbench.evaluation import evaluate
from nlbench.execution.numerics import Machine, resolve_device
from nlbench.measure import Measure, Result, Value
from nlbench.options import OptionValue
from nlbench.plan import content_key, load_measures, make_bench
from nlbench.progress import Monitor, Progress
from nlbench.store.files import is_unused, make_folder
from nlbench.store.manifest import make_manifest, measure_facts, now
from nlbench.store.record import Record
from nlbench.store.run_folder import Run, load_run
from nlbench.subjects.load import SubjectSpec, choose_weights, load_dataset, load_subject

from .train import Trained, TrainingRequest, recipe_of, run_training, starting_point

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Grid", "Item", "LinearisingRequest", "Recorder", "linearise"]


Kind = Literal["reference", "linearised", "random"]


@dataclass(frozen=True)
class LinearisingRequest:
    """What is to be linearised, and how.

    Parameters
    ----------
    model, data : str
        Registered names.
    mode : str
        The registered recipe that is followed. It has the fields ``omega``, ``layerwise``,
        ``random_share`` and ``starts_trained``. If it has a method ``check(model, dataset)``,
        that refuses a network before the first training, or gives a remark.
    base_recipe : str
        The registered recipe of networks that have to be trained first.
    measure : str
        The registered measure that is taken of each network beside accuracy and linear units.
    omegas : tuple of float
        Weights of the penalty.
    seeds : tuple of int
    weights : str
        Of a recipe that starts from trained weights: ``trained``, a checkpoint's path, or
        ``auto``: trained where weights ship, else trained first, once a seed.
    control : bool
        Beside each network one of which as many units, drawn at random, are linear.
    layerwise : bool
        One slope a layer in place of one a channel.
    changes : mapping of str to value
        Fields of the recipe that are to be otherwise.
    options : tuple of (str, value)
        Of the dataset.
    device : str

    Raises
    ------
    nlbench.RequestError
        If it can't be carried out.
    """

    model: str
    data: str
    mode: str
    base_recipe: str
    measure: str
    omegas: tuple[float, ...]
    seeds: tuple[int, ...] = (0,)
    weights: str = "auto"
    control: bool = False
    layerwise: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[tuple[str, OptionValue | str], ...] = ()
    device: str = "auto"

    def __post_init__(self) -> None:
        for omega in self.omegas:
            if not (math.isfinite(omega) and omega >= 0):
                raise RequestError(f"omega is {omega}, expected a number of at least 0")
        if self.control and self.layerwise:
            raise RequestError("the random control needs a slope a channel, not one a layer")
        if self.control and not self.starts_trained:
            raise RequestError("the random control goes with --post-training")
        if self.weights == "init":
            raise RequestError("--weights init: initial weights are linearised by --from-start")
        if self.weights != "auto" and not self.starts_trained:
            raise RequestError(
                f"--weights {self.weights}: --from-start begins with initial weights"
            )

    @property
    def starts_trained(self) -> bool:
        """Whether the recipe starts from trained weights."""
        return bool(getattr(registry.load("recipes", self.mode), "starts_trained", False))

    @property
    def trains_first(self) -> bool:
        """Whether networks have to be trained before they are linearised."""
        if not self.starts_trained or self.weights != "auto":
            return False
        return choose_weights(self.spec("auto")).file is None

    @property
    def start(self) -> str:
        """Weights that all seeds start from, where they are not trained first."""
        if not self.starts_trained:
            return "init"
        return "trained" if self.weights == "auto" else self.weights

    @property
    def deciding(self) -> dict[str, Any]:
        """What all networks of a folder have in common."""
        shared = asdict(self)
        for name in ("omegas", "seeds", "control", "device"):
            del shared[name]
        return shared

    def spec(self, weights: str, seed: int = 0) -> SubjectSpec:
        """One of the networks as a subject."""
        return SubjectSpec(self.model, weights, self.data, seed, options=self.options)


@dataclass(frozen=True)
class Item:
    """One network of the grid.

    Parameters
    ----------
    kind : {"reference", "linearised", "random"}
    omega : float or None
        None of a reference.
    seed : int
    """

    kind: Kind
    omega: float | None
    seed: int


@dataclass(frozen=True)
class Grid:
    """The networks of a request, and where each comes from.

    Parameters
    ----------
    request : LinearisingRequest
    folder : Path
        The run's.
    """

    request: LinearisingRequest
    folder: Path

    def __iter__(self) -> Iterator[Item]:
        """Give the networks, each after those that it depends on."""
        request = self.request
        if request.starts_trained:
            yield from (Item("reference", None, seed) for seed in request.seeds)
        for omega in request.omegas:
            for seed in request.seeds:
                yield Item("linearised", omega, seed)
                if request.control:
                    yield Item("random", omega, seed)

    def label(self, item: Item) -> str:
        """What a network's weights are called."""
        if item.omega is None:
            return f"reference-seed{item.seed}"
        start = "" if self.request.starts_trained else "start-"
        prefix = "random-" if item.kind == "random" else start
        # All its digits: two values of ω never share a name.
        return f"{prefix}omega{str(item.omega).removesuffix('.0')}-seed{item.seed}"

    def facts(self, item: Item) -> dict[str, Any]:
        """What tells a network of the grid from the others."""
        mode = self.request.mode if item.kind == "linearised" else item.kind
        return {"weights": self.label(item), "mode": mode, "omega": item.omega}

    def key(self, item: Item, measure: str, settings: Mapping[str, OptionValue | str]) -> str:
        """Hash of all that decides a number, but for the machine."""
        content = {
            "request": self.request.deciding,
            "start": self._start,
            "item": asdict(item),
            "recipe": asdict(recipe_of(self.training(item))) if self.own_file(item) else "",
            "measure": measure,
            "settings": dict(settings),
        }
        return content_key(json.loads(json.dumps(content, default=str)))

    @cached_property
    def _start(self) -> str:
        """Identity of the weights that all seeds start from."""
        if self.request.trains_first:
            return ""
        return choose_weights(self.request.spec(self.request.start)).identity

    def own_file(self, item: Item) -> Path | None:
        """Checkpoint that is made for a network; None for weights that were given."""
        if item.omega is None and not self.request.trains_first:
            return None
        return self.folder / "checkpoints" / f"{self.label(item)}.safetensors"

    def file(self, item: Item) -> Path:
        """Checkpoint of a network."""
        own = self.own_file(item)
        if own is not None:
            return own
        choice = choose_weights(self.request.spec(self.request.start))
        assert choice.file is not None
        return choice.file

    def training(self, item: Item, share: float | None = None) -> TrainingRequest:
        """How a network is trained; of a control with the share of units that are linear."""
        request = self.request
        if item.omega is None:
            return self._request(request.base_recipe, item.seed, "init", {})
        changes = {**request.changes, "omega": item.omega, "layerwise": request.layerwise}
        if share is not None:
            changes["random_share"] = share
        weights = request.start
        if request.trains_first:
            weights = str(self.file(Item("reference", None, item.seed)))
        return self._request(request.mode, item.seed, weights, changes)

    def epochs(self, item: Item) -> int:
        """Epochs that its training takes at most."""
        return 0 if self.own_file(item) is None else int(recipe_of(self.training(item)).epochs)

    def _request(
        self, recipe: str, seed: int, weights: str, changes: Mapping[str, Any]
    ) -> TrainingRequest:
        request = self.request
        return TrainingRequest(
            request.model,
            request.data,
            recipe,
            seed,
            weights,
            changes=changes,
            options=request.options,
            device=request.device,
        )


ACCURACY: dict[str, Any] = {
    "name": "accuracy",
    "description": "Share of the test split that the network predicts right.",
    "probe": "",
    "bounds": [0.0, 1.0],
    "more_means": "neither",
    "version": "1",
    "options": {},
    "source": {"citation": "", "equation": "", "bibtex": ""},
}
LINEAR_UNITS: dict[str, Any] = {
    **ACCURACY,
    "name": "linear_units",
    "description": "Share of units, channels of ReLU calls, that are linear; by layer.",
    "more_means": "less nonlinear",
}


class Recorder:
    """Measures the networks of a grid.

    Parameters
    ----------
    grid : Grid
    measure : Measure class
        What is taken beside accuracy and linear units.
    settings : mapping
        Its options.
    machine : Machine
    """

    def __init__(
        self,
        grid: Grid,
        measure: type[Measure],
        settings: Mapping[str, OptionValue | str],
        machine: Machine,
    ) -> None:
        self.grid, self.measure, self.settings, self.machine = grid, measure, settings, machine

    def keys(self, item: Item) -> dict[str, str]:
        """Keys of a network's records, by measure."""
        settings: dict[str, dict[str, OptionValue | str]]
        settings = {str(ACCURACY["name"]): {}, str(LINEAR_UNITS["name"]): {}}
        settings[self.measure.name] = dict(self.settings)
        return {name: self.grid.key(item, name, own) for name, own in settings.items()}

    def linear_units(self, item: Item) -> str:
        """Key of the record of a network's linear units."""
        return self.keys(item)[str(LINEAR_UNITS["name"])]

    def records(self, item: Item, trained: Trained | None) -> list[Record]:
        """Measure a network, which may have been trained for it."""
        request, file = self.grid.request, self.grid.file(item)
        spec = request.spec(str(file), item.seed)
        subject = load_subject(spec, self.machine.device)
        facts = {**subject.facts, **self.grid.facts(item), "checkpoint": self._name(file)}
        if trained is not None:
            facts["accuracy"] = trained.test_accuracy
        else:
            # Of the whole split, as that of the networks trained here.
            whole = load_subject(replace(spec, samples=None), self.machine.device)
            facts["accuracy"] = whole.facts["accuracy"]
        if facts["accuracy"] is None:
            facts["accuracy"] = self._accuracy_of_task(subject.model)
        linear = _linear(_shape(trained))
        facts["linear_share"] = linear.summary.get("value", 0.0)
        measured = evaluate(
            subject.model,
            subject.inputs,
            [self.measure],
            settings=dict(self.settings),
            name=request.model,
        ).records[0]
        known = _accuracy(facts["accuracy"], trained)
        return [
            self._record(item, facts, ACCURACY, known, measured.machine),
            self._record(item, facts, LINEAR_UNITS, linear, measured.machine),
            replace(measured, key=self.keys(item)[self.measure.name], subject=facts),
        ]

    def failures(self, item: Item, reason: str) -> list[Record]:
        """Say of each measure why it has no number."""
        request = self.grid.request
        facts = {
            "model": request.model,
            "data": request.data,
            "seed": item.seed,
            **self.grid.facts(item),
        }
        machine = {
            "device": str(self.machine.device),
            "dtype": "",
            "environment": dict(self.machine.environment),
        }
        failed = Result.missing("failed", reason)
        return [
            self._record(item, facts, about, failed, machine)
            for about in (ACCURACY, LINEAR_UNITS, measure_facts(self.measure, {}))
        ]

    def _record(
        self,
        item: Item,
        facts: Mapping[str, Any],
        about: Mapping[str, Any],
        result: Result,
        machine: Mapping[str, Any],
    ) -> Record:
        return Record(
            key=self.keys(item)[str(about["name"])],
            subject=facts,
            measure=about,
            probe={"name": "", "options": {}},
            machine=machine,
            result=result,
            finished=now(),
        )

    def _accuracy_of_task(self, model: nn.Module) -> float | None:
        """Accuracy in test by the dataset's own task, where it is no classification."""
        request = self.grid.request
        dataset = load_dataset(request.data, dict(request.options))
        make_task = getattr(dataset, "task", None)
        if make_task is None:
            return None
        recipe = recipe_of(self.grid.training(Item("linearised", 0.0, 0)))
        return float(make_task(recipe, 0.0, 0).accuracy(model, "test", self.machine.device))

    def _name(self, file: Path) -> str:
        folder = self.grid.folder
        return str(file.relative_to(folder)) if file.is_relative_to(folder) else file.name


def _accuracy(accuracy: float | None, trained: Trained | None) -> Result:
    if accuracy is None:
        return Result.missing("undefined", "the network doesn't give one logit a class")
    summary = {"value": accuracy}
    if trained is not None:
        summary["train"] = trained.train_accuracy
        summary |= {k: v for k, v in trained.scores.items() if ":" not in k and k != "linear_share"}
    return Result(summary)


def _shape(trained: Trained | None) -> dict[str, tuple[int, int]]:
    """Nonlinear units and all units of each layer, in order."""
    scores = trained.scores if trained is not None else {}
    prefix = "nonlinear_units:"
    layers = [name.removeprefix(prefix) for name in scores if name.startswith(prefix)]
    return {
        layer: (int(scores[f"{prefix}{layer}"]), int(scores[f"units:{layer}"])) for layer in layers
    }


def _linear(shape: Mapping[str, tuple[int, int]]) -> Result:
    if not shape:
        return Result({"value": 0.0}, notes={"network": "as it was trained, all units nonlinear"})
    units = sum(total for _, total in shape.values())
    nonlinear = sum(active for active, _ in shape.values())
    values = tuple(
        Value(layer, {"value": 1 - active / total, "nonlinear": active, "units": total})
        for layer, (active, total) in shape.items()
    )
    summary = {"value": 1 - nonlinear / units, "nonlinear": nonlinear, "units": units}
    return Result(summary, values)


def linearise(
    request: LinearisingRequest,
    out: str | Path,
    *,
    settings: Mapping[str, OptionValue | str] | None = None,
    progress: Progress | None = None,
    command: str = "",
) -> Run:
    """Linearise a network for each ω and seed, and measure what comes of it.

    What the folder already holds is not done again; an interrupted training goes on.

    Parameters
    ----------
    request : LinearisingRequest
    out : path
        The run's folder; it is made, or extended if it is one already.
    settings : mapping of str to value, optional
        Options of the request's measure.
    progress : Progress, optional
    command : str
        The command line, for the manifest.

    Returns
    -------
    Run
        Measures ``accuracy``, ``linear_units`` and the request's; each subject's facts have
        ``mode``, ``omega``, ``accuracy`` and ``linear_share``.

    Raises
    ------
    nlbench.RequestError
        If the request can't be carried out, or the folder holds something else.
    """
    grid = Grid(request, Path(out))
    work = _Work(grid, dict(settings or {}), progress or Monitor(), command)
    try:
        for item in grid:
            work.do(item)
    finally:
        work.write()
    return work.run


class _Work:
    """A run that grows by one network after the other."""

    def __init__(
        self,
        grid: Grid,
        settings: dict[str, OptionValue | str],
        progress: Progress,
        command: str,
    ) -> None:
        self.grid = grid
        self.progress = progress
        self.command = command
        self.machine = Machine.at(resolve_device(grid.request.device))
        measures = load_measures([grid.request.measure], progress.warn)
        # Settings that don't fit are told before the first training, not after it.
        make_bench(measures, settings)
        self.recorder = Recorder(grid, measures[0], settings, self.machine)
        if not (grid.folder / "manifest.json").is_file():
            self._check_network()
        self.run = self._open()
        self.calls = [*self.run.manifest.get("calls", [])]
        self.calls.append({"started": now(), "command": command, "request": asdict(grid.request)})
        self.done = {record.key: record for record in self.run.records}
        progress.begin(sum(grid.epochs(item) for item in grid if not self._is_done(item)))
        self.write()

    def do(self, item: Item) -> None:
        """Train one network and record what it is, if that isn't done."""
        if self._is_done(item):
            return
        try:
            records = self.recorder.records(item, self._train(item))
        except NotFinite as error:
            records = self.recorder.failures(item, str(error))
        for record in records:
            self.done[record.key] = record
            self.run.write_record(record)
        self.write()

    def write(self) -> None:
        """Write manifest and table of what is there."""
        self.run.records = list(self.done.values())
        made = make_manifest(
            asdict(self.grid.request),
            self.machine,
            command=self.command,
            created=self.run.manifest.get("created"),
        )
        self.run.manifest = replace(made, calls=tuple(self.calls)).of_records(self.run.records)
        self.run.write_tables()

    def _check_network(self) -> None:
        """Tell before the first training whether the recipe can be followed."""
        training = self.grid.training(Item("linearised", self.grid.request.omegas[0], 0))
        check = getattr(recipe_of(training), "check", None)
        if check is None:
            return
        dataset, build = starting_point(replace(training, weights="init"))
        if remark := check(build(), dataset):
            self.progress.warn(f"{training.model}: {remark}")

    def _open(self) -> Run:
        folder, request = self.grid.folder, self.grid.request
        is_run = (folder / "manifest.json").is_file()
        run = load_run(folder) if is_run else Run({}, [], folder)
        if not is_run and folder.exists() and not is_unused(folder):
            raise RequestError(f"{folder} exists and is not a run; choose another --out")
        keys = {
            (self.grid.label(item), measure): key
            for item in self.grid
            for measure, key in self.recorder.keys(item).items()
        }
        for record in run.records:
            subject, measure = record.subject, str(record.measure["name"])
            if "mode" not in subject:
                raise RequestError(f"{folder} is a run of another kind; choose another --out")
            key = keys.get((str(subject["weights"]), measure), record.key)
            same = (subject["model"], subject["data"]) == (request.model, request.data)
            if not same or key != record.key:
                raise RequestError(
                    f"{folder} already holds {subject['weights']} of {subject['model']}, made in "
                    f"another way{self._what_differs(run)}; choose another --out"
                )
        make_folder(folder / "cells")
        make_folder(folder / "checkpoints")
        return run

    def _what_differs(self, run: Run) -> str:
        """What the last call in the same mode asked for otherwise, in words."""
        asked = json.loads(json.dumps(self.grid.request.deciding, default=str))
        calls = [call["request"] for call in run.manifest.get("calls", [])]
        before = next((old for old in reversed(calls) if old["mode"] == asked["mode"]), asked)
        changed = [
            f"{name} was {before.get(name)} and is {value}"
            for name, value in asked.items()
            if before.get(name) != value
        ]
        return f" ({', '.join(changed)})" if changed else ""

    def _is_done(self, item: Item) -> bool:
        found = [self.done.get(key) for key in self.recorder.keys(item).values()]
        return all(record is not None and record.is_done for record in found) and (
            self.grid.own_file(item) is None or self.grid.file(item).is_file()
        )

    def _train(self, item: Item) -> Trained | None:
        file = self.grid.own_file(item)
        if file is None:
            return None
        share = None
        if item.kind == "random":
            pattern = replace(item, kind="linearised")
            found = self.done[self.recorder.linear_units(pattern)]
            if not found.is_done:
                raise NotFinite(
                    f"there is no network that it could be a control of: {found.result.reason}"
                )
            share = found.result.summary["value"]
        label = self.grid.label(item)

        def step(epoch: Any) -> None:
            self.progress.step(f"{label}: test accuracy {epoch.test_accuracy:.1%}")

        return run_training(
            self.grid.training(item, share), file, resume=True, progress=step, command=self.command
        )
