"""Subjects leave nothing behind for the next one."""

from importlib import import_module

import pytest
import torch
from hostile import write_plugin
from workers import fork_workers

from nlbench.evaluation import evaluate
from nlbench.execution.unit_runner import UnitRunner
from nlbench.execution.work_units import Unit
from nlbench.plan import make_plan
from nlbench.progress import ProgressMonitor
from nlbench.request import ExecutionOptions, Request
from nlbench.runner import run

CODE = '''
import os
import sys

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import nlbench


class Network(nn.Module):
    def __init__(self, in_channels, num_classes, act=lambda self: None):
        super().__init__()
        self.conv, self.relu = nn.Conv2d(in_channels, 4, 3, stride=4), nn.ReLU()
        self.head, self.act = nn.Linear(4, num_classes), act

    def forward(self, x):
        self.act(self)
        return self.head(self.relu(self.conv(x)).mean((2, 3)))


def innocent(in_channels=3, num_classes=10):
    """A convolution, a ReLU, a linear layer."""
    return Network(in_channels, num_classes)


def switching(in_channels=3, num_classes=10):
    """Changes settings when it is run."""

    def act(self):
        torch.backends.mkldnn.enabled = False
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        os.chdir("/")

    return Network(in_channels, num_classes, act)


def patching(in_channels=3, num_classes=10):
    """Replaces a function when it is run."""

    def act(self):
        nn.ReLU.forward = lambda self, x: x.clamp(min=-0.5)

    return Network(in_channels, num_classes, act)


def built_patching(in_channels=3, num_classes=10):
    """Changes the process when it is built."""
    torch.set_default_dtype(torch.float64)
    nn.functional.relu = torch.tanh
    return Network(in_channels, num_classes)


def learning(in_channels=3, num_classes=10):
    """Changes its own weights when it is run."""

    def act(self):
        self.conv.weight.data.mul_(0.99)

    return Network(in_channels, num_classes, act)


class Own(BaseException):
    """No Exception."""


class Mute(Exception):
    """Its message can't be read."""

    def __str__(self):
        raise RuntimeError


class Functions(TorchFunctionMode):
    """Doubles each ReLU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is nn.functional.relu else result


class Failing(TorchFunctionMode):
    """Fails."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        raise Own("no")


class Dispatch(TorchDispatchMode):
    """Doubles each ReLU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.relu.default else result


LEAVINGS = {
    "reset": lambda: setattr(nn.Conv2d, "reset_parameters", lambda self: None),
    "init": lambda: setattr(nn.init, "kaiming_uniform_", lambda tensor, *a, **k: tensor),
    "functions": lambda: Functions().__enter__(),
    "dispatch": lambda: Dispatch().__enter__(),
    "failing": lambda: Failing().__enter__(),
    "path": lambda: sys.path.clear(),
    "relu": lambda: setattr(torch, "relu", torch.tanh),
    "linear": lambda: setattr(nn.Linear, "forward", lambda self, x: x[:, :10]),
    "add": lambda: setattr(torch.Tensor, "__add__", lambda self, other: self),
}

LIBRARY = torch.library.Library("aten", "IMPL")


def leave_changes():
    """Change the process in several ways, one of which can't be undone."""
    LIBRARY.impl("relu", lambda x: x.clamp(min=-0.5), "CPU", allow_override=True)
    for what in ("reset", "init", "dispatch"):
        LEAVINGS[what]()


def built_leaving(in_channels=3, num_classes=10):
    """Changes the process when it is built."""
    network = Network(in_channels, num_classes)
    leave_changes()
    return network


def leaving(in_channels=3, num_classes=10):
    """Changes the process when it is run."""
    once = [leave_changes, sys.path.clear]
    return Network(in_channels, num_classes, lambda self: once and once.pop()())


def run_leaving(what):
    def build(in_channels=3, num_classes=10):
        """Changes the process when it is run."""
        return Network(in_channels, num_classes, lambda self: LEAVINGS[what]())

    return build


for what in LEAVINGS:
    globals()[f"run_{what}"] = run_leaving(what)


def own_in_forward(in_channels=3, num_classes=10):
    """Raises a BaseException when it is run."""

    def act(self):
        raise Own("no")

    return Network(in_channels, num_classes, act)


def interrupting_builder(in_channels=3, num_classes=10):
    """Raises KeyboardInterrupt, without a signal, when it is built."""
    raise KeyboardInterrupt


def interrupting_forward(in_channels=3, num_classes=10):
    """Raises KeyboardInterrupt, without a signal, when it is run."""

    def act(self):
        raise KeyboardInterrupt

    return Network(in_channels, num_classes, act)


def own_in_builder(in_channels=3, num_classes=10):
    """Raises a BaseException when it is built."""
    raise GeneratorExit


def mute_in_builder(in_channels=3, num_classes=10):
    """Raises an exception without a readable message when it is built."""
    raise Mute


@nlbench.site_measure()
def plain(x, y):
    """Mean change."""
    return (y - x).abs().mean()


@nlbench.site_measure()
def mute(x, y):
    """Raises an exception without a readable message."""
    raise Mute


@nlbench.site_measure()
def interrupting(x, y):
    """Raises KeyboardInterrupt without a signal."""
    raise KeyboardInterrupt


@nlbench.site_measure()
def own(x, y):
    """Raises a BaseException."""
    raise Own("no")
'''

LEAVINGS = {
    "reset": "torch.nn.Conv2d.reset_parameters",
    "init": "torch.nn.init.kaiming_uniform_",
    "functions": "the active TorchFunctionModes",
    "dispatch": "the active TorchDispatchModes",
    "failing": "the active TorchFunctionModes",
    "path": "sys.path",
    "relu": "torch.relu",
    "linear": "torch.nn.Linear.forward",
    "add": "torch.Tensor.__add__",
}

MODELS = (
    "innocent", "switching", "patching", "built_patching", "learning", "own_in_forward",
    "own_in_builder", "mute_in_builder", "interrupting_builder", "interrupting_forward",
    "built_leaving", "leaving",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugin")
    write_plugin(folder, CODE, ("plain", "mute", "own", "interrupting"), MODELS, "leaving")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(folder))
        yield


def measured(folder, models, measures="plain,nlc", execution=None, **changes):
    request = Request(
        tuple(measures.split(",")),
        tuple(models.split(",")),
        ("digits",),
        weights="init",
        samples=16,
        **changes,
    )
    records = run(request, folder, execution=execution).records
    return {(r.subject.model, r.measure.name): r.result for r in records}


@pytest.mark.parametrize("first", ["switching", "learning"])
def test_subject_does_not_change_the_next_one(tmp_path, first):
    alone = measured(tmp_path / "alone", "innocent")
    after = measured(tmp_path / "after", f"{first},innocent")
    for measure in ("plain", "nlc"):
        result = after["innocent", measure]
        assert result.status == "ok"
        assert result == alone["innocent", measure]


@pytest.mark.parametrize(
    ("executor", "model"), [("serial", "leaving"), ("processes", "built_leaving")]
)
def test_a_changed_process_measures_no_other_subject(tmp_path, monkeypatch, executor, model):
    fork_workers(monkeypatch)
    alone = measured(tmp_path / "alone", "innocent")
    execution = ExecutionOptions(executor=executor, workers=1)
    try:
        after = measured(tmp_path / "after", f"{model},innocent", execution=execution)
    finally:
        import_module("nlbench_leaving").LIBRARY._destroy()
    reason = after[model, "plain"].reason
    for what in ("reset", "init", "dispatch"):
        assert LEAVINGS[what] in reason
    assert "can't be restored: torch.ops.aten.relu (CPU)" in reason
    for measure in ("plain", "nlc"):
        assert after["innocent", measure].status == "ok"
        assert after["innocent", measure] == alone["innocent", measure]


def test_models_leave_nothing_to_the_next_evaluation():
    module = import_module("nlbench_leaving")
    inputs = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    leaving = {what: getattr(module, f"run_{what}")(1) for what in LEAVINGS}
    innocent = module.innocent(1)

    def results(models):
        records = evaluate(models, inputs, "nlc").records
        return {record.subject.weights: record.result for record in records}

    after = results({**leaving, "innocent": innocent})
    assert after["innocent"] == results({"innocent": innocent})["innocent"]
    for what, name in LEAVINGS.items():
        assert f"the pass changed {name}; since restored" in after[what].reason


class Diary(ProgressMonitor):
    """Notes the beginning of loads and passes."""

    def __init__(self):
        super().__init__()
        self.events = []

    def loading(self):
        self.events.append("load")

    def observing(self, probe):
        self.events.append(probe)


def test_monitors_are_informed_of_loads_and_passes():
    request = Request(("plain", "nlc"), ("innocent",), ("digits",), weights="init", samples=16)
    plan, diary, runner = make_plan(request, "cpu", print), Diary(), UnitRunner()
    unit = Unit(plan.cells, "cpu")
    first = list(runner.measure(unit, diary))
    assert diary.events == ["load", "sites", "function"]
    again = list(runner.measure(unit, diary))
    assert [record.result for record in again] == [record.result for record in first]
    for record in (*first, *again):
        assert set(record.costs) == {"wall_seconds", "cpu_seconds", "peak_memory", "load_seconds"}
        # The subject is loaded once for all cells, which share the costs.
        assert record.costs["load_seconds"] == first[0].costs["load_seconds"] > 0


def test_changed_settings_are_recorded(tmp_path, monkeypatch):
    fork_workers(monkeypatch)
    results = measured(tmp_path / "run", "switching,patching,built_patching", "plain")
    assert results["switching", "plain"].reason.endswith(
        "the pass changed torch.get_default_device, torch.get_default_dtype, "
        "torch.backends.mkldnn.enabled, the working directory; since restored"
    )
    assert results["patching", "plain"].reason.endswith(
        "the pass changed torch.nn.ReLU.forward; since restored"
    )
    assert results["built_patching", "plain"].reason.endswith(
        "loading changed torch.get_default_dtype, torch.nn.functional.relu; since restored"
    )


def test_models_that_change_their_weights_are_undefined(tmp_path):
    results = measured(tmp_path / "run", "learning", "plain,nlc,accuracy,density,pathlength")
    assert results["learning", "plain"].reason == (
        "the model changes its own weights when it is run (conv.weight), so its numbers would "
        "depend on how often it is run"
    )
    statuses = {name: result.status for (_, name), result in results.items()}
    # The channel graph is built without running the network on numbers.
    assert statuses.pop("pathlength") == "ok"
    assert set(statuses.values()) == {"undefined"}


def test_probe_after_changed_weights_sees_the_loaded_ones(tmp_path):
    alone = measured(tmp_path / "alone", "innocent", "linear-units")
    after = measured(tmp_path / "after", "learning", "plain,linear-units")
    assert after["learning", "linear-units"].summary == alone["innocent", "linear-units"].summary


@pytest.mark.parametrize(
    "broken",
    [
        "own_in_forward", "own_in_builder", "mute_in_builder", "interrupting_builder",
        "interrupting_forward",
    ],
)  # fmt: skip
def test_any_exception_fails_only_its_subject(tmp_path, broken):
    results = measured(tmp_path / "run", f"{broken},innocent", "plain")
    assert results[broken, "plain"].status == "failed"
    assert results["innocent", "plain"].status == "ok"


def test_any_exception_fails_only_its_measure(tmp_path):
    results = measured(tmp_path / "run", "innocent", "mute,own,interrupting,plain")
    statuses = {name: (r.status, r.reason) for (_, name), r in results.items()}
    assert statuses["mute"] == ("failed", "Mute: its message can't be printed (RuntimeError)")
    assert statuses["own"] == ("failed", "Own: no")
    assert statuses["interrupting"] == ("failed", "KeyboardInterrupt:")
    assert statuses["plain"][0] == "ok"
