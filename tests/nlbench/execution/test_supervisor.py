import contextlib
import os
import tempfile
import time
from types import SimpleNamespace

import psutil
import pytest
from hostile import install_plugin, request
from workers import fork_workers

import nlbench
from nlbench.execution import supervisor
from nlbench.execution.supervisor import Phase, Supervisor, WorkerCrash, _late_cells
from nlbench.request import ExecutionOptions
from nlbench.runner import run


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    monkeypatch.setenv("NLBENCH_TEST_MARK", str(tmp_path / "mark"))
    return install_plugin(tmp_path, monkeypatch)


@pytest.fixture
def forked(monkeypatch):
    fork_workers(monkeypatch)


@pytest.fixture
def fast_while_hanging(plugin, monkeypatch):
    """Run the supervisor's clock faster while a worker hangs, so that its limit may be long."""
    ahead = 0.0

    def is_hanging():
        try:
            worker = psutil.Process(int((plugin / "hanging").read_text()))
            return worker.status() != psutil.STATUS_ZOMBIE
        except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
            return False

    def monotonic():
        nonlocal ahead
        ahead += 20.0 if is_hanging() else 0.0
        return time.monotonic() + ahead

    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=monotonic))


def statuses(result):
    return {
        (r.subject.model, r.measure.name): (r.result.status, r.result.reason)
        for r in result.records
    }


def test_hanging_measure_times_out_alone(plugin, forked, fast_while_hanging, tmp_path):
    result = run(
        request("plain,sleepy,r2"), tmp_path / "run", execution=ExecutionOptions(timeout=100.0)
    )
    status = statuses(result)
    assert status["mini", "sleepy"] == ("failed", "took longer than 100 s")
    assert status["mini", "plain"][0] == status["mini", "r2"][0] == "ok"
    assert not nlbench.load_run(tmp_path / "run").manifest.get("unfinished")


def test_timeout_counts_all_updates(plugin, forked, tmp_path):
    wanted = request("plain,slow", samples=32, settings={"sites.batch": 4})
    status = statuses(run(wanted, tmp_path / "run", execution=ExecutionOptions(timeout=100.0)))
    # Each of its eight updates takes 20 s.
    assert status["mini", "slow"] == ("failed", "took longer than 100 s")
    assert status["mini", "plain"][0] == "ok"


def test_crash_fails_only_the_responsible_cells(plugin, forked, tmp_path):
    wanted = request("once,exiting,plain,killed", "mini,deadly")
    status = statuses(run(wanted, tmp_path / "run", execution=ExecutionOptions(timeout=60.0)))
    assert status["mini", "exiting"][0] == "failed"
    assert "exited with status 3" in status["mini", "exiting"][1]
    assert status["mini", "killed"][0] == "failed"
    assert "killed by SIGKILL" in status["mini", "killed"][1]
    assert status["mini", "plain"] == ("ok", "")
    # Each is tried once more, alone.
    assert status["mini", "once"] == ("ok", "")
    assert {s for (model, _), (s, _) in status.items() if model == "deadly"} == {"failed"}


def test_killed_worker_of_two_fails_one_cell(plugin, forked, tmp_path):
    result = run(
        request("choosy,patient,plain", "mini,mini2"),
        tmp_path / "run",
        execution=ExecutionOptions(executor="processes", workers=2, threads=1),
    )
    status = statuses(result)
    guilty = status.pop(("mini2", "choosy"))
    assert guilty == (
        "failed",
        "the worker was killed by SIGKILL (the system does that when memory runs out)",
    )
    assert set(status.values()) == {("ok", "")}
    assert nlbench.load_run(tmp_path / "run").manifest["cells"] == {"failed": 1, "ok": 5}


def test_subjects_that_never_load_fail_their_cells(plugin, forked, fast_while_hanging, tmp_path):
    wanted = request("plain,r2", "endless,mini")
    status = statuses(run(wanted, tmp_path / "run", execution=ExecutionOptions(timeout=100.0)))
    reason = "loading the subject took longer than 100 s"
    for measure in ("plain", "r2"):
        assert status["endless", measure] == ("failed", reason)
        assert status["mini", measure][0] == "ok"


def test_own_processes_give_the_same_numbers(plugin, forked, tmp_path):
    wanted = request("plain,drawing,r2,affinity", seeds=(0, 1))
    here = run(wanted, tmp_path / "here")
    there = run(wanted, tmp_path / "there", execution=ExecutionOptions(timeout=60.0))
    assert (here.path / "scores.csv").read_bytes() == (there.path / "scores.csv").read_bytes()


@pytest.fixture
def typed_input(tmp_path):
    """Text at the standard input of this process, and so of those that inherit it."""
    (tmp_path / "typed").write_text("yes")
    before = os.dup(0)
    with (tmp_path / "typed").open() as typed:
        os.dup2(typed.fileno(), 0)
    yield
    os.dup2(before, 0)
    os.close(before)


def command_lines():
    """The commands of all processes that this one has started and that still run."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            yield " ".join(child.cmdline())


@pytest.mark.usefixtures("typed_input")
def test_plugin_output_is_harmless_and_no_worker_survives(plugin, tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    result = run(request("chatty"), tmp_path / "run", execution=ExecutionOptions(timeout=60.0))
    assert result["chatty"].summary["value"] == 0.0
    assert not list(temporary.iterdir())
    assert not [line for line in command_lines() if "nlbench.execution.worker" in line]


def test_workers_killed_at_their_end_get_nothing(forked, monkeypatch):
    supervised = Supervisor(1, None)
    supervised._start()
    first = supervised._process
    messages = [
        {"phase": "measuring", "probe": "", "measure": "", "spent": 100.0},
        None,
        {"done": True},
    ]
    monkeypatch.setattr(supervised, "_receive", lambda: messages.pop(0))
    assert list(supervised.ask({}, lambda: True, 1.0)) == []
    supervised._start()
    assert supervised._process is not first
    supervised.end()


def test_dead_worker_is_reported(forked, monkeypatch):
    supervised = Supervisor(1, None)
    supervised._start()
    supervised._process.kill()
    supervised._process.wait()
    monkeypatch.setattr(supervised, "_start", lambda: None)
    with pytest.raises(WorkerCrash, match="SIGKILL"):
        list(supervised.ask({}, lambda: True))


@pytest.mark.parametrize(("set_by_user", "policy"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_of_a_worker_wait_passively_by_default(monkeypatch, set_by_user, policy):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if set_by_user:
        monkeypatch.setenv("OMP_WAIT_POLICY", set_by_user)
    variables = {}
    started = SimpleNamespace(
        DEVNULL=None, Popen=lambda _, *, env, **options: variables.update(env)
    )
    monkeypatch.setattr(supervisor, "subprocess", started)
    supervised = Supervisor(1, None)
    supervised._start()
    supervised._connection.close()
    assert variables["OMP_WAIT_POLICY"] == policy


def cell_of(name, probe):
    return SimpleNamespace(measure=SimpleNamespace(name=name), probe=SimpleNamespace(name=probe))


@pytest.mark.parametrize(
    ("probe", "measure", "pending", "late"),
    [
        ("sites", "", "abcd", "ac"),
        ("lines", "", "abcd", "bd"),
        # Cells that are recorded already are not late.
        ("sites", "", "bcd", "c"),
        ("sites", "c", "abcd", "c"),
        # After the last record of a pass, the next one is late.
        ("sites", "c", "abd", "a"),
        ("sites", "", "bd", "bd"),
        # The subject is not loaded.
        ("", "", "bd", "bd"),
        ("", "", "abcd", "abcd"),
    ],
)
def test_timeout_fails_only_the_cells_of_its_phase(probe, measure, pending, late):
    cells = [cell_of("a", "sites"), cell_of("b", "lines"), cell_of("c", "sites")]
    cells.append(cell_of("d", "lines"))
    phase = Phase("", probe, measure, 0.0, 0.0)
    left = [cell for cell in cells if cell.measure.name in pending]
    assert "".join(cell.measure.name for cell in _late_cells(phase, left)) == late


def test_worker_with_another_number_of_threads_is_replaced(forked):
    supervised = Supervisor(1, None)
    supervised._start()
    first = supervised._process
    supervised._start()
    assert supervised._process is first
    supervised.threads = 2
    supervised._start()
    assert supervised._process is not first
    assert first.poll() is not None
    supervised.end()
