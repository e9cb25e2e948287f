import json
import math
import os
import shutil
import subprocess
import types
import weakref

import pytest
import torch
from torch import nn

import nlbench
from nlbench import plan as planning
from nlbench import registry, runner
from nlbench.errors import RequestError
from nlbench.execution import machine
from nlbench.execution.work_units import Unit
from nlbench.introspection.precision import exact_arithmetic
from nlbench.measure import Measure, Result, site_measure
from nlbench.options import Option
from nlbench.progress import ProgressMonitor
from nlbench.request import ExecutionOptions, Request
from nlbench.runner import run

QUICK = {"lines.number": 1, "lines.anchors": 2, "lines.radius": 1}


@site_measure()
def good(x, y):
    """Fine."""
    return (y - x).abs().mean()


@site_measure()
def crashing(x, y):
    """Never works."""
    raise ZeroDivisionError("no such luck")


@site_measure()
def exiting(x, y):
    """Calls exit."""
    raise SystemExit(3)


class Wrong(Measure):
    """Gives something else than a reading."""

    probe = "sites"

    def update(self, observation):
        pass

    def compute(self):
        return 0.5


class Counting(Measure):
    """Counts its looks."""

    probe = "sites"
    observations = 0

    def update(self, observation):
        type(self).observations += 1

    def compute(self):
        return Result.of({"all": 1.0})


def tiny(in_channels=3, num_classes=10):
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, stride=4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, num_classes),
    )


def nan_model():
    model = tiny()
    with torch.no_grad():
        model[0].bias.fill_(math.nan)
    return model


def smooth():
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 5), nn.Tanh(), nn.Linear(5, 10))


def broken():
    raise RuntimeError("can't be built")


@pytest.fixture
def names(monkeypatch):
    """Measures and models that exist for these tests, beside the installed ones."""
    local = {
        "measures": {m.name: m for m in (good, crashing, exiting, Wrong, Counting)},
        "models": {"tiny": tiny, "nan": nan_model, "smooth": smooth, "broken": broken},
    }
    load, entries, find = registry.load, registry.entries, registry.find

    def both(group):
        found = dict(entries(group))
        some = next(iter(found.values()))
        return found | {n: registry.Entry(group, n, some.claims) for n in local.get(group, {})}

    def local_first(group, name):
        return local.get(group, {}).get(name) or load(group, name)

    def found(group, name):
        return both(group)[name] if name in local.get(group, {}) else find(group, name)

    monkeypatch.setattr(registry, "entries", both)
    monkeypatch.setattr(registry, "find", found)
    monkeypatch.setattr(registry, "load", local_first)
    return local


def request(measures="good", models="tiny", **changes):
    defaults = {"samples": 16, "weights": "init", "settings": {}, "data": ("digits",)}
    return Request(tuple(measures.split(",")), tuple(models.split(",")), **(defaults | changes))


def statuses(result):
    return {
        (r.subject.model, r.measure.name): (r.result.status, r.result.reason)
        for r in result.records
    }


def test_a_run_writes_manifest_records_and_table(names, tmp_path):
    result = run(request("good,affinity"), tmp_path / "run")
    assert sorted(p.name for p in result.path.iterdir()) == [
        "cells",
        "manifest.json",
        "request.toml",
        "scores.csv",
    ]
    loaded = nlbench.load_run(result.path)
    assert loaded.scores.equals(result.scores)
    manifest = loaded.manifest
    assert manifest["measures"]["affinity"]["options"]["shrinkage"] == "ledoit-wolf"
    (subject,) = manifest["subjects"]
    assert {"weights_hash", "sample_hash", "preprocessing", "parameters"} <= set(subject)
    assert manifest["environment"]["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert manifest["cells"] == {"ok": 2}


def test_raising_measure_fails_alone_with_its_traceback(names, tmp_path):
    result = run(request("crashing,exiting,wrong,good"), tmp_path / "run")
    status = statuses(result)
    assert status["tiny", "crashing"] == ("failed", "ZeroDivisionError: no such luck")
    assert status["tiny", "exiting"][0] == "failed"
    assert status["tiny", "wrong"] == (
        "failed",
        "compute() returned a float, expected an nlbench.Result; return "
        "nlbench.Result.of({place: number})",
    )
    assert status["tiny", "good"][0] == "ok"
    record = next(r for r in result.records if r.measure.name == "crashing")
    assert "ZeroDivisionError" in record.traceback


def test_control_characters_of_plugins_are_removed(names, tmp_path):
    class Painting(Measure):
        """Writes escape sequences wherever it can."""

        probe = "sites"

        def update(self, observation):
            pass

        def compute(self):
            values = (
                nlbench.Value("a", {"value": 1.0}),
                nlbench.Value.missing("b", "undefined", "\x1b[2Jgone\x07"),
            )
            return Result({"value": 1.0}, values, 16, reason="1 of 2\n=2 \udcff\u202e")

    @site_measure()
    def raising(x, y):
        """Raises them."""
        raise ValueError("\x1b[31mred\nline \udcff")

    names["measures"] |= {"painting": Painting, "raising": raising}
    result = run(request("painting,raising"), tmp_path / "run")
    assert statuses(result)["tiny", "painting"] == ("ok", "1 of 2 =2")
    assert statuses(result)["tiny", "raising"] == ("failed", "ValueError: [31mred line")
    for file in ("scores.csv", *(f"cells/{r.key}.json" for r in result.records)):
        text = (tmp_path / "run" / file).read_text(encoding="utf-8")
        assert not {"\x1b", "\x07", "\u202e"} & set(text)
        assert not [escape for escape in ("\\u001b", "\\u0007", "\\u202e") if escape in text]
    assert nlbench.load_run(tmp_path / "run").scores.equals(result.scores)


@pytest.mark.parametrize(
    "wrong",
    [
        Result({"value": 1.0}, n=2.5),
        Result({"value": 1.0}, n=2**80),
        Result({"value": 1.0}, (nlbench.Value(7, {"value": 1.0}),), 1),
        Result({"value": 1.0}, notes={"count": 10**30}),
        Result({"value": 1.0}, notes={"half": "\ud800"}),
        Result({"value": 1.0}, notes=["method"]),
    ],
    ids=["n", "large n", "place", "note", "half a character", "notes"],
)
def test_unreadable_result_fails_its_cell_alone(names, tmp_path, wrong):
    class Odd(Wrong):
        """Gives what JSON takes and no reader does."""

        name = "odd"

        def compute(self):
            return wrong

    names["measures"]["odd"] = Odd
    result = run(request("odd,good"), tmp_path / "run")
    assert statuses(result)["tiny", "odd"][0] == "failed"
    assert statuses(result)["tiny", "good"][0] == "ok"
    assert nlbench.load_run(tmp_path / "run").scores.equals(result.scores)


def test_measures_of_a_probe_share_one_pass(names, tmp_path, monkeypatch):
    passes = []
    model = tiny()
    monkeypatch.setitem(names["models"], "tiny", lambda: model)
    model.register_forward_hook(lambda module, inputs, output: passes.append(len(inputs[0])))
    run(request("good,affinity,cka,r2", settings={"sites.batch": 8}), tmp_path / "run")
    assert passes.count(8) == 2  # the comparison with float64 takes fewer samples


def test_unloadable_subject_fails_its_own_cells(names, tmp_path):
    result = run(request("good", "broken,tiny"), tmp_path / "run")
    assert statuses(result) == {
        ("broken", "good"): ("failed", "broken on digits: RuntimeError: can't be built"),
        ("tiny", "good"): ("ok", ""),
    }


def test_single_unloadable_subject_leaves_no_folder(names, tmp_path):
    with pytest.raises(RequestError):
        run(request("good", "broken"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_model_with_nan_fails_its_own_cells(names, tmp_path):
    result = run(request("affinity,r2,absdev", "nan,tiny", settings=QUICK), tmp_path / "run")
    for (model, _), (status, reason) in statuses(result).items():
        assert status == ("failed" if model == "nan" else "ok"), reason
    assert result.manifest["cells"] == {"failed": 3, "ok": 3}


def test_smooth_networks_density_names_the_operation(names, tmp_path):
    result = run(request("density,good", "smooth", settings=QUICK), tmp_path / "run")
    status, reason = statuses(result)["smooth", "density"]
    assert status == "undefined"
    assert reason.startswith("tanh at 2")
    assert statuses(result)["smooth", "good"][0] == "ok"


def test_only_failed_cells_are_measured_again(names, tmp_path, monkeypatch):
    Counting.observations = 0
    run(request("counting,crashing"), tmp_path / "run")
    observations = Counting.observations
    assert observations > 0
    monkeypatch.setitem(names["measures"], "crashing", repaired())
    result = run(request("counting,crashing"), tmp_path / "run")
    assert Counting.observations == observations
    assert statuses(result)["tiny", "crashing"] == ("ok", "")


def repaired():
    @site_measure(options={"factor": Option(1.0)})
    def crashing(x, y, factor):
        """Works now."""
        return factor

    return crashing


def test_run_is_extended_by_more_measures_and_subjects(names, tmp_path):
    run(request("good"), tmp_path / "run")
    run(request("good,counting", seeds=(0, 1)), tmp_path / "run")
    result = nlbench.load_run(tmp_path / "run")
    assert len(result.records) == 4
    assert len(result.manifest["subjects"]) == 2


def test_conflicting_versions_of_a_cell_are_refused(names, tmp_path):
    run(request("affinity"), tmp_path / "run")
    before = (tmp_path / "run" / "scores.csv").read_bytes()
    for measure, name, changes in (
        ("affinity", "affinity", {"settings": {"affinity.shrinkage": "none"}}),
        ("affinity", "affinity", {"seeds": (1,), "settings": {"affinity.ridge": 1e-3}}),
        ("good", "affinity through sites", {"settings": {"sites.batch": 8}}),
        ("affinity", "tiny", {"samples": 8}),
        ("affinity", "tiny", {"split": "train"}),
        ("good", "tiny", {"samples": 8}),
        ("good", "tiny", {"split": "train"}),
    ):
        with pytest.raises(RequestError, match=name):
            run(request(measure, **changes), tmp_path / "run")
    assert (tmp_path / "run" / "scores.csv").read_bytes() == before


def test_repeated_request_has_bit_equal_scores(names, tmp_path):
    wanted = request("affinity,r2,cka,absdev,density", settings=QUICK)
    first, second = (run(wanted, tmp_path / name) for name in ("a", "b"))
    assert (first.path / "scores.csv").read_bytes() == (second.path / "scores.csv").read_bytes()
    assert [r.key for r in first.records] == [r.key for r in second.records]


def test_cells_key_changes_with_everything_that_decides_number(names, tmp_path):
    keys = set()
    variants = [
        {},
        {"samples": 15},
        {"seeds": (1,)},
        {"split": "train"},
        {"settings": {"affinity.ridge": 1e-5}},
        {"settings": {"sites.batch": 64}},
        {"settings": {"sites.reduction": "flatten"}},
    ]
    for number, changes in enumerate(variants):
        keys |= {r.key for r in run(request("affinity", **changes), tmp_path / f"{number}").records}
    assert len(keys) == len(variants)


def test_paths_are_equal_for_all_subjects(names, tmp_path):
    result = run(request("absdev", "tiny,vgg8", settings=QUICK), tmp_path / "run")
    assert len({r.probe.facts["paths_hash"] for r in result.records}) == 1
    assert len({r.subject.sample_hash for r in result.records}) == 1


def test_too_few_samples_for_paths_are_refused(names, tmp_path):
    with pytest.raises(RequestError, match="paths"):
        run(request("good,absdev", samples=2, settings={"lines.number": 3}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_split_too_small_for_paths_fails_the_cell(names, tmp_path):
    result = run(request("absdev", samples=0, settings={"lines.number": 513}), tmp_path / "run")
    status, reason = statuses(result)["tiny", "absdev"]
    assert status == "failed"
    assert "513 paths (closed) need 513 samples, there are 512" in reason


def test_failure_can_be_corrected(names, tmp_path, monkeypatch):
    run(request("crashing,good"), tmp_path / "run")
    monkeypatch.setitem(names["measures"], "crashing", repaired())
    result = run(request("crashing", settings={"crashing.factor": 2}), tmp_path / "run")
    assert statuses(result)["tiny", "crashing"] == ("ok", "")
    assert len(nlbench.load_run(tmp_path / "run").records) == 2


def test_batch_of_one_is_undefined_with_the_reason(names, tmp_path):
    result = run(request("affinity", samples=1), tmp_path / "run")
    status, reason = statuses(result)["tiny", "affinity"]
    assert status == "undefined"
    assert reason


def test_foreign_folder_is_refused_and_unchanged(names, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RequestError):
        run(request(), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_output_at_or_below_a_file_is_refused(names, tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(RequestError):
        run(request(), file)
    with pytest.raises(RequestError):
        run(request(), file / "below")


def test_each_cell_keeps_versions_it_was_measured_with(names, tmp_path, monkeypatch):
    run(request("good"), tmp_path / "run")
    real = machine.describe_environment
    monkeypatch.setattr(
        machine, "describe_environment", lambda *given: {**real(*given), "python": "4.0"}
    )
    result = nlbench.load_run(run(request("good,counting"), tmp_path / "run").path)
    pythons = {r.measure.name: r.machine.environment["python"] for r in result.records}
    assert pythons["good"] != "4.0"
    assert pythons["counting"] == "4.0"
    assert {e["python"] for e in result.manifest["environments"]} == set(pythons.values())


def test_run_has_its_manifest_before_its_first_cell(names, tmp_path):
    seen = []

    class Watching(Counting):
        """Looks at the folder while it is measured."""

        def update(self, observation):
            seen.append((tmp_path / "run" / "manifest.json").is_file())

    names["measures"]["watching"] = Watching
    run(request("watching"), tmp_path / "run")
    assert seen
    assert all(seen)


def test_cells_without_a_manifest_are_not_overwritten(names, tmp_path):
    result = run(request("good"), tmp_path / "run")
    (result.path / "manifest.json").unlink()
    with pytest.raises(RequestError):
        run(request("good"), tmp_path / "run")
    assert len(list((result.path / "cells").iterdir())) == 1


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git on this machine")
def test_the_git_state_is_that_of_nlbench(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(tmp_path)]
    subprocess.run([*command, "init", "-q"], check=True)
    (tmp_path / "theirs").write_text("")
    (tmp_path / "machine.py").write_text("")
    subprocess.run([*command, "add", "theirs"], check=True)
    subprocess.run([*command, "commit", "-qm", "theirs"], check=True)
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    monkeypatch.setattr(machine, "_git_state", machine._git_state.__wrapped__)
    assert machine.describe_environment(torch.device("cpu"))["git"] is None
    subprocess.run([*command, "add", "machine.py"], check=True)
    assert machine.describe_environment(torch.device("cpu"))["git"].endswith("+changes")


def test_run_saved_by_evaluate_can_be_extended(names, tmp_path):
    nlbench.evaluate(tiny(), torch.rand(16, 3, 32, 32), [good]).save(tmp_path / "run")
    result = run(request("good"), tmp_path / "run")
    assert {r.subject.model for r in result.records} == {"Sequential", "tiny"}
    assert len(nlbench.load_run(tmp_path / "run").manifest["subjects"]) == 2


def test_each_missing_checkpoint_fails_its_cells(names, tmp_path):
    weights = ("init", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"))
    result = run(request("good", weights=weights), tmp_path / "run")
    found = {r.subject.weights: r.result.reason for r in result.records}
    assert set(found) == set(weights)
    assert all(name == "init" or name in reason for name, reason in found.items())
    assert result.manifest["cells"] == {"ok": 1, "skipped": 2}


def test_copied_checkpoint_is_measured_once_with_a_warning(names, tmp_path):
    said = []
    monitor = ProgressMonitor()
    monitor.warn = said.append
    torch.save(tiny().state_dict(), tmp_path / "a.pt")
    shutil.copy(tmp_path / "a.pt", tmp_path / "b.pt")
    weights = (str(tmp_path / "a.pt"), str(tmp_path / "b.pt"))
    result = run(request("good", weights=weights), tmp_path / "run", progress=monitor)
    assert len(result.records) == 1
    assert said == [
        "tiny: the weights 'b.pt' are identical to 'a.pt', so they are measured only once"
    ]


def test_equally_named_checkpoints_are_different_subjects(names, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        torch.manual_seed(ord(folder))
        torch.save(tiny().state_dict(), tmp_path / folder / "w.pt")
    run(request("good", weights=str(tmp_path / "a" / "w.pt")), tmp_path / "run")
    with pytest.raises(RequestError):
        run(request("counting", weights=str(tmp_path / "b" / "w.pt")), tmp_path / "run")


def test_every_call_of_run_is_in_its_manifest(names, tmp_path):
    run(request("good"), tmp_path / "run", command="first")
    result = run(request("counting"), tmp_path / "run", command="second")
    calls = nlbench.load_run(result.path).manifest["calls"]
    assert [call["command"] for call in calls] == ["first", "second"]
    assert [call["request"]["measures"] for call in calls] == [["good"], ["counting"]]


class Heard(ProgressMonitor):
    """Keeps what it is told."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def warn(self, message):
        self.lines.append(message)


def test_fewer_samples_than_requested_are_warned_of_once(names, tmp_path):
    heard = Heard()
    run(request("good", samples=10**9, seeds=(0, 1)), tmp_path / "run", progress=heard)
    (line,) = heard.lines
    assert line.startswith(
        "1000000000 samples of digits were requested; its test split has only 512"
    )


def test_deleted_run_folder_raises_in_one_line(names, tmp_path):
    class Deleting(Counting):
        """Deletes the folder of the run."""

        def reset(self):
            shutil.rmtree(tmp_path / "run", ignore_errors=True)

    names["measures"]["deleting"] = Deleting
    with pytest.raises(RequestError) as caught:
        run(request("deleting,good", seeds=(0, 1)), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_planning_reads_a_checkpoint_once(names, tmp_path, monkeypatch):
    torch.save(tiny().state_dict(), tmp_path / "w.pt")
    read = []
    choose = planning.choose_weights
    monkeypatch.setattr(planning, "choose_weights", lambda spec: read.append(spec) or choose(spec))
    wanted = request(weights=str(tmp_path / "w.pt"), seeds=tuple(range(50)))
    plan = planning.make_plan(wanted, "cpu", print)
    assert len(plan.cells) == 50
    assert len(read) == 1


def pool_of(executor, device, gpus, monkeypatch, **options):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    plan = types.SimpleNamespace(device=device)
    return runner._worker_pool(ExecutionOptions(executor=executor, threads=1, **options), plan)


@pytest.mark.parametrize("executor", ["processes", "dask"])
@pytest.mark.parametrize(
    ("device", "gpus", "workers", "devices"),
    [
        ("cuda", 3, 3, ("cuda:0", "cuda:1", "cuda:2")),
        ("cuda", 1, 1, ()),
        ("cuda:0", 3, 1, ()),
        ("cuda:2", 3, 1, ()),
    ],
)
def test_each_gpu_has_one_worker(executor, device, gpus, workers, devices, monkeypatch):
    pool = pool_of(executor, device, gpus, monkeypatch)
    assert (pool.workers, pool.devices) == (workers, devices)
    unit = Unit((), device)
    assert [pool.placed(unit, n).device for n in range(workers)] == list(devices or [device])


def test_local_workers_share_gpus_but_clusters_assign_theirs(monkeypatch):
    pool = pool_of("dask", "cuda", 2, monkeypatch, workers=3)
    assert [pool.placed(Unit((), "cuda"), n).device for n in range(3)] == [
        "cuda:0",
        "cuda:1",
        "cuda:0",
    ]
    theirs = pool_of("dask", "cuda", 2, monkeypatch, address="tcp://127.0.0.1:1")
    assert theirs.placed(Unit((), "cuda"), 1).device == "cuda"


def test_coordinator_does_not_touch_the_gpu(names, tmp_path, monkeypatch):
    def used(*given):
        raise AssertionError("the GPU is taken into use")

    asked, facts = [], machine.describe_environment(torch.device("cpu"))

    def apart(command, **options):
        asked.append(command[-3:])
        return subprocess.CompletedProcess(command, 0, f"a plugin prints\n{json.dumps(facts)}\n")

    for name in ("_lazy_init", "init", "get_device_name", "get_device_capability", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, used)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(machine.subprocess, "run", apart)
    monkeypatch.setattr(runner, "execute", lambda *_, **options: (x for x in ()))
    result = run(
        request(device="cuda:0"), tmp_path / "run", execution=ExecutionOptions(executor="processes")
    )
    assert result.manifest["device"] == "cuda:0"
    assert [command[:2] for command in asked] == [["cuda:0", "native"]]


def test_machine_seen_from_another_process_is_the_same():
    machine._git_state.cache_clear()  # Files may have changed since.
    cpu = torch.device("cpu")
    with exact_arithmetic():
        here = machine.describe_machine(cpu)
    assert machine.describe_machine_in_subprocess(cpu, "native") == here


def test_unusable_device_raises(monkeypatch):
    done = subprocess.CompletedProcess([], 1, "", "Traceback\n  ...\nRuntimeError: no driver\n")
    monkeypatch.setattr(machine.subprocess, "run", lambda *given, **options: done)
    with pytest.raises(RequestError, match="'cuda:7'"):
        machine.describe_machine_in_subprocess(torch.device("cuda:7"), "native")


def test_subject_is_released_before_the_next(names, tmp_path):
    alive, left = [], []

    def built():
        left.append(sum(reference() is not None for reference in alive))
        model = tiny()
        alive.append(weakref.ref(model))
        return model

    names["models"] |= {"one": built, "two": built, "three": built}
    result = run(request(models="one,two,three"), tmp_path / "run")
    assert {r.result.status for r in result.records} == {"ok"}
    assert left
    assert not any(left)
