import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from hostile import write_plugin

import nlbench
from nlbench.errors import RequestError
from nlbench.execution.executors import _seat, _Task
from nlbench.request import ExecutionOptions, Request
from nlbench.runner import run

NLBENCH = Path(sys.executable).with_name("nlbench")


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    folder = tmp_path / "plugin"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(write_plugin(folder)))
    return folder


def request(measures, models="mini,mini2", **changes):
    defaults = {"samples": 16, "weights": "init", "data": ("digits",)}
    return Request(tuple(measures.split(",")), tuple(models.split(",")), **(defaults | changes))


def table(result):
    return (result.path / "scores.csv").read_bytes()


def test_a_grid_gives_the_same_bytes_in_one_process_and_in_two(plugin, tmp_path):
    wanted = request("drawing,r2,affinity,absdev", settings={"lines.number": 1})
    one = run(wanted, tmp_path / "one")
    two = run(wanted, tmp_path / "two", execution=ExecutionOptions(executor="processes", workers=2))
    assert two.manifest["cells"] == {"ok": 8}
    assert table(one) == table(two)
    assert [r.key for r in one.records] == [r.key for r in two.records]


def test_in_processes_only_the_guilty_cell_fails(plugin, tmp_path):
    result = run(
        request("killed,plain"),
        tmp_path / "run",
        execution=ExecutionOptions(executor="processes", workers=2),
    )
    found = {(r.subject["model"], r.measure["name"]): r.result.status for r in result.records}
    assert found == {
        ("mini", "killed"): "failed",
        ("mini", "plain"): "ok",
        ("mini2", "killed"): "failed",
        ("mini2", "plain"): "ok",
    }


@pytest.mark.slow
def test_a_dask_cluster_that_loses_a_worker_delivers_every_cell(plugin, tmp_path):
    distributed = pytest.importorskip("distributed")
    wanted = request("plain,slow,drawing", "mini", seeds=(0, 1, 2))
    cells = tmp_path / "run" / "cells"
    killed = []
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=50
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        pids = list(client.run(os.getpid).values())

        def kill_one():
            deadline = time.monotonic() + 120
            while not list(cells.glob("*.json")) and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(pids[0], signal.SIGKILL)
            killed.append(pids[0])

        killer = threading.Thread(target=kill_one)
        killer.start()
        result = run(
            wanted,
            tmp_path / "run",
            execution=ExecutionOptions(executor="dask", address=cluster.scheduler_address),
        )
        killer.join()
    assert len(set(pids)) == 2
    assert killed
    assert result.manifest["cells"] == {"ok": 9}
    assert table(result) == table(run(wanted, tmp_path / "undisturbed"))


@pytest.mark.slow
def test_a_scheduler_that_is_not_there_is_one_line(plugin, tmp_path):
    pytest.importorskip("distributed")
    with pytest.raises(RequestError, match=r"no Dask scheduler at tcp://127\.0\.0\.1:9") as caught:
        run(
            request("plain"),
            tmp_path / "run",
            execution=ExecutionOptions(executor="dask", address="tcp://127.0.0.1:9"),
        )
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["processes", "dask"])
def test_an_interrupted_run_leaves_no_process_and_is_taken_up_to_come_to_the_same(
    plugin, tmp_path, executor
):
    if executor == "dask":
        pytest.importorskip("distributed")
    arguments = [
        NLBENCH, "run", "--measures", "plain,slow,drawing", "--model", "mini,mini2", "--weights",
        "init", "--samples", "16", "--seeds", "0,1", "--out", "r", "--executor", executor,
        "--workers", "2", "--no-report",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(plugin), *sys.path])}
    process = subprocess.Popen(
        arguments,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 100
    while not list(tmp_path.glob("r/cells/*.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    started = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert len(started) > 2
    assert not psutil.wait_procs(started, timeout=10)[1]
    assert "Traceback" not in error
    said = error.splitlines()
    assert len(said) == 2, error
    assert said[0].startswith("nlbench: interrupted; what was finished is in r")
    assert said[1].startswith("nlbench: go on with: nlbench run")
    kept = {p.name: p.read_bytes() for p in tmp_path.glob("r/cells/*.json")}
    assert kept
    done = subprocess.run(
        arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    after = {p.name: p.read_bytes() for p in tmp_path.glob("r/cells/*.json")}
    assert len(after) == 12
    assert {name: after[name] for name in kept} == kept
    wanted = request("plain,slow,drawing", seeds=(0, 1))
    straight = run(wanted, tmp_path / "straight")
    assert table(straight) == (tmp_path / "r" / "scores.csv").read_bytes()
    assert nlbench.load_run(tmp_path / "r").scores.shape == straight.scores.shape


def test_each_gpu_is_taken_by_one_worker_at_a_time(tmp_path):
    task = _Task(None, None, 1, "", "", str(tmp_path), ("cuda:0", "cuda:1"), 2)
    with _seat(task) as first, _seat(task) as second:
        assert {first, second} == {"cuda:0", "cuda:1"}
    with _seat(task) as again:
        assert again == "cuda:0"
