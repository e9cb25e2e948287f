import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import tempfile
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from commands import running
from hostile import write_plugin
from made_runs import make_run
from workers import fork_workers

import nlbench
from nlbench.errors import RequestError
from nlbench.execution import dask_cluster, processes
from nlbench.execution.dask_cluster import _call_within
from nlbench.execution.executors import WorkerPool
from nlbench.execution.supervisor import WorkerCrash
from nlbench.execution.unit_runner import UnitRunner
from nlbench.execution.work_units import Unit, group_by_subject, to_message
from nlbench.plan import make_plan
from nlbench.progress import ProgressMonitor
from nlbench.request import ExecutionOptions, Request
from nlbench.runner import run
from nlbench.signals import interruptible
from nlbench.store import locked_folder
from nlbench.store.record import RecordedMachine
from nlbench.store.run_folder import table_text


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    folder = write_plugin(tmp_path_factory.mktemp("plugin"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(folder))
        yield folder


def request(measures, models="mini,mini2", **changes):
    defaults = {"samples": 16, "weights": "init", "data": ("digits",)}
    return Request(tuple(measures.split(",")), tuple(models.split(",")), **(defaults | changes))


def table(result):
    return (result.path / "scores.csv").read_bytes()


def test_table_is_independent_of_processes(plugin, tmp_path, monkeypatch):
    fork_workers(monkeypatch)
    wanted = request("drawing,r2,affinity,absdev", settings={"lines.number": 1})
    one = run(wanted, tmp_path / "one")
    two = run(wanted, tmp_path / "two", execution=ExecutionOptions(executor="processes", workers=2))
    assert two.manifest["cells"] == {"ok": 8}
    assert table(one) == table(two)
    assert [r.key for r in one.records] == [r.key for r in two.records]


GONE_SECONDS = 120.0
"""Time that processes have to end on a busy machine."""


@pytest.fixture(scope="module")
def started_cluster(plugin):
    distributed = pytest.importorskip("distributed")
    import dask

    # Its workers are forked from a process that has imported the libraries.
    method = {"distributed.worker.multiprocessing-method": "forkserver"}
    with (
        dask.config.set(method),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=50
        ) as cluster,
    ):
        yield cluster


@pytest.fixture
def cluster(started_cluster, monkeypatch):
    monkeypatch.setattr(dask_cluster, "CONNECT_SECONDS", GONE_SECONDS)
    return started_cluster


@pytest.mark.slow
def test_cluster_stops_when_its_run_is_killed(plugin, tmp_path, cluster):
    script = tmp_path / "ask.py"
    script.write_text(
        "from nlbench.request import ExecutionOptions, Request; from nlbench.runner import run\n"
        "run(Request(('sleepy',), ('mini',), ('digits',), weights='init', samples=8), 'r',"
        f" execution=ExecutionOptions(executor='dask', address={cluster.scheduler_address!r}))"
    )
    workers = [psutil.Process(nanny.pid) for nanny in cluster.workers.values()]

    def measuring():
        return [child for worker in workers for child in worker.children()]

    with running(
        cwd=tmp_path,
        out=tmp_path / "out",
        error=tmp_path / "error",
        paths=[plugin],
        script=str(script),
    ) as process:
        while not (left := measuring()) and process.is_alive():
            time.sleep(0.02)
        assert left, (tmp_path / "error").read_text()
    assert not psutil.wait_procs(left, timeout=GONE_SECONDS)[1]
    assert all(worker.is_running() for worker in workers)


@pytest.mark.slow
def test_dask_cluster_survives_a_lost_worker(plugin, tmp_path, cluster):
    wanted = request("plain,waiting,drawing", seeds=(0, 1))
    cells = tmp_path / "run" / "cells"
    pids = [nanny.pid for nanny in cluster.workers.values()]
    killed, ended = [], []

    def kill_one():
        while not list(cells.glob("*.json")) and not ended:
            time.sleep(0.01)
        os.kill(pids[0], signal.SIGKILL)
        killed.append(pids[0])
        # Until then mini2 is not finished.
        (plugin / "gate").touch()

    killer = threading.Thread(target=kill_one)
    killer.start()
    try:
        result = run(
            wanted,
            tmp_path / "run",
            execution=ExecutionOptions(executor="dask", address=cluster.scheduler_address),
        )
    finally:
        ended.append(True)
        killer.join()
    assert len(set(pids)) == 2
    assert killed
    assert result.manifest["cells"] == {"ok": 12}
    assert table(result) == table(run(wanted, tmp_path / "undisturbed"))
    (plugin / "gate").unlink()


def test_missing_scheduler_raises_in_one_line(plugin, tmp_path, monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr(dask_cluster, "CONNECT_SECONDS", 1.0)
    with socket.socket() as bound:
        # A port at which nothing listens.
        bound.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{bound.getsockname()[1]}"
        execution = ExecutionOptions(executor="dask", address=address)
        with pytest.raises(RequestError) as caught:
            run(request("plain"), tmp_path / "run", execution=execution)
    assert f"no Dask scheduler at {address}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("address", ["garbage", "foo://x:1", "tcp://a:b", "tcp://[::1", "tcp://"])
def test_malformed_address_starts_no_client(plugin, tmp_path, address, monkeypatch):
    monkeypatch.setattr(pytest.importorskip("distributed"), "Client", None)
    with pytest.raises(RequestError, match="--address"):
        run(
            request("plain"),
            tmp_path / "run",
            execution=ExecutionOptions(executor="dask", address=address),
        )


def test_client_is_closed_after_the_run(monkeypatch):
    class Client:
        def __init__(self, address, **options):
            self.address, self.is_open = address, False

        def __enter__(self):
            self.is_open = True

        def __exit__(self, *error):
            self.is_open = False

    monkeypatch.setattr(pytest.importorskip("distributed"), "Client", Client)
    execution = ExecutionOptions(executor="dask", address="tcp://127.0.0.1:9")
    with dask_cluster._cluster(WorkerPool(execution, 1, 1)) as client:
        assert (client.address, client.is_open) == ("tcp://127.0.0.1:9", True)
    assert not client.is_open


def test_local_clusters_accept_only_their_own_client(tmp_path, monkeypatch):
    distributed = pytest.importorskip("distributed")
    pytest.importorskip("cryptography")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with dask_cluster._cluster(WorkerPool(ExecutionOptions(executor="dask"), 1, 1)) as client:
        address = client.scheduler.address
        assert address.startswith("tls://127.0.0.1:")
        assert client.submit(os.getpid).result() != os.getpid()
        is_enabled = client.submit(logging.getLogger("asyncio").isEnabledFor, logging.CRITICAL)
        assert not is_enabled.result()
        keys = [distributed.Security(), distributed.Security.temporary()]
        for place, security in zip((address.replace("tls", "tcp"), address), keys, strict=True):
            with pytest.raises((OSError, RuntimeError)):
                distributed.Client(place, timeout=0.5, set_as_default=False, security=security)
    assert list(tmp_path.iterdir()) == []


def test_a_task_that_failed_has_a_reason():
    killed = type("KilledWorker", (Exception,), {})("the key of the task")
    for status, error, reason in [
        ("finished", None, ""),
        ("cancelled", None, "the cluster cancelled the task"),
        ("error", killed, "the workers that had this task were lost"),
        ("error", OSError("no disk"), "a worker could not measure this: OSError: no disk"),
    ]:
        future = SimpleNamespace(status=status, exception=lambda error=error: error)
        assert dask_cluster._problem(future) == reason


def test_cluster_results_count_once_and_events_are_forwarded():
    missing = {"b"}

    def received(result):
        return list(dask_cluster._new_results(to_message(result), missing))

    for event in ({"step": "mini: plain"}, {"unloadable": "no memory"}):
        assert received(event) == [event]
    record = make_run(1, measures=("nlc",)).records[0]
    assert received(record) == []
    record = replace(record, key="b")
    assert received(record) == [record]
    assert received(record) == []


def test_errors_of_abandoned_coroutines_are_not_logged(caplog):
    async def fail():
        raise OSError("the connection is closed")

    def leave_behind():
        task = loop.create_task(fail())
        loop.run_until_complete(asyncio.sleep(0))
        assert task.done()

    loop = asyncio.new_event_loop()
    client = SimpleNamespace(
        loop=SimpleNamespace(asyncio_loop=loop),
        cancel=lambda futures: leave_behind(),
        run=lambda function: None,
    )
    leave_behind()
    gc.collect()
    assert "the connection is closed" in caplog.text
    caplog.clear()
    dask_cluster._stop(client, [])
    gc.collect()
    loop.close()
    assert "the connection is closed" not in caplog.text


def test_interruption_of_a_cluster_that_stops_is_deferred():
    stopped = []

    def stop():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        stopped.append(True)
        raise OSError("the cluster is gone")

    with pytest.raises(KeyboardInterrupt), interruptible():
        _call_within(30.0, stop)
    assert stopped


def test_cluster_that_never_stops_is_left_alone():
    released, stopped = threading.Event(), []
    _call_within(0.05, lambda: stopped.append(released.wait()))
    assert not stopped
    released.set()


@pytest.mark.slow
@pytest.mark.parametrize(("executor", "workers"), [("processes", 2), ("dask", 1)])
def test_interrupted_run_leaves_no_process_and_resumes(plugin, tmp_path, executor, workers):
    if executor == "dask":
        pytest.importorskip("distributed")
    said = tmp_path / "error"
    with running(
        "run", "--measures", "plain,waiting,drawing", "--model", "mini,mini2", "--weights", "init",
        "--samples", "16", "--out", "r", "--executor", executor, "--workers", str(workers),
        "--no-report", "--progress", "none", cwd=tmp_path, out=tmp_path / "out", error=said,
        paths=[plugin],
    ) as process:  # fmt: skip
        # One worker may have ended when the first cell is written.
        started = set()
        while not list(tmp_path.glob("r/cells/*.json")):
            assert process.is_alive(), said.read_text()
            started |= set(psutil.Process(process.pid).children(recursive=True))
            time.sleep(0.02)
        # As a terminal does, which tells the whole group.
        os.killpg(process.pid, signal.SIGINT)
        process.join()
        assert process.exitcode == 130, said.read_text()
    # A worker of Dask has one of nlbench's.
    assert len(started) >= 2
    assert not psutil.wait_procs(list(started), timeout=GONE_SECONDS)[1]
    error = said.read_text()
    assert "Traceback" not in error
    lines = error.splitlines()
    assert len(lines) == 2, error
    assert lines[0].startswith("nlbench: interrupted; finished cells are in r")
    assert lines[1].startswith("nlbench: resume with: nlbench run")
    kept = {p.name: p.read_bytes() for p in tmp_path.glob("r/cells/*.json")}
    assert kept
    (plugin / "gate").touch()
    wanted = request("plain,waiting,drawing")
    taken_up = run(wanted, tmp_path / "r")
    after = {p.name: p.read_bytes() for p in tmp_path.glob("r/cells/*.json")}
    assert len(after) == 6
    assert {name: after[name] for name in kept} == kept
    straight = run(wanted, tmp_path / "straight")
    assert table(straight) == table(taken_up)
    assert nlbench.load_run(tmp_path / "r").scores.shape == straight.scores.shape
    (plugin / "gate").unlink()


class Stopping(ProgressMonitor):
    """Ends the run in some way at its first step."""

    def __init__(self, stop):
        super().__init__()
        self.stop = stop

    def step(self, what):
        self.stop()


def interrupt():
    raise KeyboardInterrupt


def test_cell_is_written_atomically_despite_signals(plugin, tmp_path, monkeypatch):
    write = locked_folder.write_atomically

    def asked(path, content):
        os.kill(os.getpid(), signal.SIGTERM)
        write(path, content)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(locked_folder, "write_atomically", asked)
    with pytest.raises(KeyboardInterrupt):
        run(request("plain", "mini"), tmp_path / "run")
    # The manifest came first, and had to be whole, too.
    assert (tmp_path / "run" / "manifest.json").is_file()
    monkeypatch.setattr(
        locked_folder,
        "write_atomically",
        lambda path, content: (asked if path.parent.name == "cells" else write)(path, content),
    )
    with pytest.raises(KeyboardInterrupt):
        run(request("plain", seeds=(0, 1)), tmp_path / "run")
    kept = nlbench.load_run(tmp_path / "run")
    assert len(kept.records) == 1
    assert (tmp_path / "run" / "scores.csv").read_text() == table_text(kept.records)
    assert kept.manifest["unfinished"]


def test_progress_arrives_during_a_unit(plugin, tmp_path, monkeypatch):
    fork_workers(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run(
            request("plain", "mini", settings={"sites.batch": 4}),
            tmp_path / "run",
            progress=Stopping(interrupt),
            execution=ExecutionOptions(executor="processes", workers=1),
        )
    # Told only afterwards, it would have come with the unit's record.
    assert not nlbench.load_run(tmp_path / "run").records


def test_process_settings_are_restored_at_each_yield(plugin, tmp_path):
    def state():
        cudnn = torch.backends.cudnn
        return (
            torch.get_num_threads(),
            torch.is_autocast_enabled("cpu"),
            cudnn.deterministic,
            cudnn.benchmark,
        )

    plan = make_plan(request("plain,nlc", "mini", precision="bfloat16", samples=4), "cpu", print)
    unit = Unit(plan.cells, "cpu", "bfloat16")
    before = state()
    results = UnitRunner(threads=before[0] + 1).measure(unit, ProgressMonitor())
    seen = [(state(), result.machine.environment["threads"]) for result in results]
    assert seen == [(before, before[0] + 1)] * 2


@pytest.mark.parametrize(
    ("executor", "timeout", "is_serial"),
    [("serial", None, True), ("serial", 5.0, False), ("processes", None, False)],
)
def test_serial_runs_without_timeout_need_no_worker(executor, timeout, is_serial):
    pool = WorkerPool(ExecutionOptions(executor=executor, timeout=timeout), 1, 1)
    assert pool.is_serial is is_serial


def test_systems_without_room_for_processes_say_so(monkeypatch):
    supervisor = SimpleNamespace(end=lambda: ended.append(True))
    monkeypatch.setattr(processes, "take_supervisor", lambda *_: supervisor)
    ended = []

    def supervise(*_):
        yield "one"
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    items = processes._run_supervisors(supervise, 1, 1, None)
    assert next(items) == "one"
    with pytest.raises(RequestError):
        next(items)
    assert ended == [True]


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), GeneratorExit()])
def test_errors_of_supervising_threads_are_raised(monkeypatch, error):
    supervisor = SimpleNamespace(end=lambda: None)
    monkeypatch.setattr(processes, "take_supervisor", lambda *_: supervisor)

    def supervise(*_):
        yield "one"
        raise error

    items = processes._run_supervisors(supervise, 2, 1, None)
    with pytest.raises(type(error)) as caught:
        list(items)
    assert caught.value is error


@pytest.mark.parametrize("workers", [1, 3])
def test_calls_in_processes_wait_their_turn(monkeypatch, workers):
    def ask(request, is_wanted):
        argument = request["argument"]
        assert request["call"] == "module:name"
        assert is_wanted()
        yield {"value": argument["x"]}
        if argument["x"] == 1:
            raise WorkerCrash("it crashed", None)

    supervisor = SimpleNamespace(ask=ask, end=lambda: None)
    monkeypatch.setattr(processes, "take_supervisor", lambda *_: supervisor)
    arguments = {name: {"x": x} for x, name in enumerate("abcd")}
    messages = list(
        processes.call_in_processes(
            "module:name", arguments, after={"a": "c", "d": "elsewhere"}, workers=workers, threads=1
        )
    )
    for x, name in enumerate("abcd"):
        done = {"done": "it crashed" if name == "b" else ""}
        assert [m for n, m in messages if n == name] == [{"value": x}, done]
    assert messages.index(("a", {"value": 0})) > messages.index(("c", {"done": ""}))
    if workers == 1:
        assert [name for name, message in messages if "done" in message] == list("bcda")


def three_probes_of_two_subjects():
    plan = make_plan(request("absdev,affinity,nlc"), "cpu", print)
    machine = RecordedMachine("cpu", "", {})
    return group_by_subject(plan.cells, plan, machine, memory=None, expected={})


def measured_by_fakes(monkeypatch, units, workers, measure):
    """Measure units with a fake in place of worker processes."""
    supervisor = SimpleNamespace(measure=measure, end=lambda: None)
    monkeypatch.setattr(processes, "take_supervisor", lambda *_: supervisor)
    pool = WorkerPool(ExecutionOptions(executor="processes"), workers, 1)
    return list(processes.measure_in_processes(units, pool))


def test_free_workers_take_probes_of_started_subjects(plugin, monkeypatch):
    units, taken, all_taken = three_probes_of_two_subjects(), [], threading.Event()

    def measure(unit, is_wanted):
        taken.append((unit.cells[0].subject.spec.model, unit.cells[0].probe.name))
        if len(taken) == 6:
            all_taken.set()
        if taken[-1] == ("mini", "lines"):
            assert all_taken.wait(60)
        yield from unit.missing_records("no worker")

    results = measured_by_fakes(monkeypatch, units, 2, measure)
    assert sorted(record.key for record in results) == sorted(
        c.key for unit in units for c in unit.cells
    )
    assert ("mini", "lines") in taken[:2]
    assert [probe for model, probe in taken if model == "mini2"] == ["lines", "sites", "function"]
    assert taken[4:] == [("mini", "sites"), ("mini", "function")]


@pytest.mark.parametrize("is_unloadable", [True, False])
def test_failing_subjects_are_loaded_once(plugin, monkeypatch, is_unloadable):
    units, taken = three_probes_of_two_subjects(), []

    def measure(unit, is_wanted):
        taken.append(unit.cells[0].subject.spec.model)
        if is_unloadable and taken[-1] == "mini":
            yield {"unloadable": ""}
        yield from unit.missing_records(f"no {taken[-1]}", "trace")

    results = measured_by_fakes(monkeypatch, units, 1, measure)
    assert taken == ["mini"] * (1 if is_unloadable else 3) + ["mini2"] * 3
    records = [record for record in results if not isinstance(record, dict)]
    assert [(r.key, r.result.reason, r.traceback) for r in records] == [
        (c.key, f"no {c.subject.spec.model}", "trace") for unit in units for c in unit.cells
    ]
