"""What is recorded of a linearised network: accuracy, linear units, and one more measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlbench.environment import Machine
from nlbench.evaluation import evaluate
from nlbench.linearising_grid import Grid, Item
from nlbench.manifest import measure_facts, now
from nlbench.measure import Measure, Reading, Value
from nlbench.options import OptionValue
from nlbench.records import Record
from nlbench.subject import load_dataset, load_subject
from nlbench.training import Trained, recipe_of

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Recorder"]

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
        failed = Reading.missing("failed", reason)
        return [
            self._record(item, facts, about, failed, machine)
            for about in (ACCURACY, LINEAR_UNITS, measure_facts(self.measure, {}))
        ]

    def _record(
        self,
        item: Item,
        facts: Mapping[str, Any],
        about: Mapping[str, Any],
        reading: Reading,
        machine: Mapping[str, Any],
    ) -> Record:
        return Record(
            key=self.keys(item)[str(about["name"])],
            subject=facts,
            measure=about,
            probe={"name": "", "options": {}},
            machine=machine,
            reading=reading,
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


def _accuracy(accuracy: float | None, trained: Trained | None) -> Reading:
    if accuracy is None:
        return Reading.missing("undefined", "the network doesn't give one logit a class")
    summary = {"value": accuracy}
    if trained is not None:
        summary["train"] = trained.train_accuracy
        summary |= {k: v for k, v in trained.scores.items() if ":" not in k and k != "linear_share"}
    return Reading(summary)


def _shape(trained: Trained | None) -> dict[str, tuple[int, int]]:
    """Nonlinear units and all units of each layer, in order."""
    scores = trained.scores if trained is not None else {}
    prefix = "nonlinear_units:"
    layers = [name.removeprefix(prefix) for name in scores if name.startswith(prefix)]
    return {
        layer: (int(scores[f"{prefix}{layer}"]), int(scores[f"units:{layer}"])) for layer in layers
    }


def _linear(shape: Mapping[str, tuple[int, int]]) -> Reading:
    if not shape:
        return Reading({"value": 0.0}, notes={"network": "as it was trained, all units nonlinear"})
    units = sum(total for _, total in shape.values())
    nonlinear = sum(active for active, _ in shape.values())
    values = tuple(
        Value(layer, {"value": 1 - active / total, "nonlinear": active, "units": total})
        for layer, (active, total) in shape.items()
    )
    summary = {"value": 1 - nonlinear / units, "nonlinear": nonlinear, "units": units}
    return Reading(summary, values)
