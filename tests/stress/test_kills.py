"""A run killed at random moments: nothing finished is lost, nothing is half written.

``python tests/stress/test_kills.py 200`` kills as often as it is told, a third of the times
with each executor; ``python tests/stress/test_kills.py 66 dask`` only with those it names.
"""

import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

sys.path.append(str(Path(__file__).parents[1] / "support"))

from commands import call
from hostile import write_plugin

EXECUTORS = ("serial", "processes", "dask")
GONE_SECONDS = 120.0
"""Time that workers have to end; two seconds are meant, a busy machine may take longer."""


def begin(folder, seeds, executor):
    """Start a grid in a process of its own; give its number.

    The process is forked from one that has imported PyTorch and computed nothing, so that
    the moments fall into the run and not into imports.
    """
    import nlbench.execution.unit_runner  # noqa: F401
    from nlbench.request import ExecutionOptions, Request
    from nlbench.runner import run

    child = os.fork()
    if child:
        return child
    wanted = Request(
        ("plain", "drawing"),
        ("mini", "mini2"),
        ("digits",),
        weights="init",
        seeds=tuple(range(seeds)),
        samples=8,
    )
    # A worker of Dask has one of nlbench's.
    workers = {"serial": None, "processes": 2, "dask": 1}[executor]
    try:
        run(
            wanted,
            folder,
            execution=ExecutionOptions(threads=1, executor=executor, workers=workers),
        )
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def attempt(folder, seeds, executor, delay=None, *, counted_from_a_new_cell=False):
    """Run a grid, killed after a while if that is said.

    Returns
    -------
    int
        Its exit status.
    float
        Seconds until its last worker was gone.
    """
    before = set(folder.glob("cells/*.json"))
    child = begin(folder, seeds, executor)
    workers = []
    if delay is not None:
        clock = None if counted_from_a_new_cell else time.monotonic()
        while not (has_ended := os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
            if clock is None and set(folder.glob("cells/*.json")) - before:
                clock = time.monotonic()
            if clock is not None and time.monotonic() > clock + delay:
                break
            time.sleep(0.005)
        if not has_ended:
            workers = psutil.Process(child).children(recursive=True)
            os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    killed = time.monotonic()
    left = psutil.wait_procs(workers, timeout=GONE_SECONDS)[1]
    assert not left, f"workers go on after their run was killed: {left}"
    files = [path.name for path in Path(tempfile.gettempdir()).iterdir() if "nlbench" in path.name]
    assert not files, f"files are left after a run was killed: {files}"
    return status, time.monotonic() - killed


def whole_records(folder):
    """Records by name; one that can't be read is a defect."""
    return {
        path.name: json.loads(path.read_text()) and path.read_bytes()
        for path in (folder / "cells").glob("*.json")
    }


def kill_and_resume(place, kills, seeds, rng, executor, expected):
    """Kill a grid again and again, and take it up until it is done."""
    length = 0.0
    if kills > 1:
        begun = time.monotonic()
        assert attempt(place / f"{executor}-straight", seeds, executor)[0] == 0
        length = time.monotonic() - begun
    killed = rounds = during = 0
    slowest = 0.0
    while killed < kills:
        folder = place / f"{executor}{rounds}"
        rounds += 1
        finished = {}
        while killed < kills:
            # Much of a run with workers is their start: every other kill, and the first, falls
            # among cells.
            among_cells = killed % 2 == 0
            status, seconds = attempt(
                folder,
                seeds,
                executor,
                rng.random() * (0.5 if among_cells else length),
                counted_from_a_new_cell=among_cells,
            )
            if status == 0:
                break
            killed += 1
            slowest = max(slowest, seconds)
            now = whole_records(folder) if folder.exists() else {}
            assert finished.items() <= now.items(), "a finished cell was lost or changed"
            during += 0 < len(now) < 4 * seeds
            finished = now
        # Whoever takes it up comes to the same; to start workers would take longer.
        assert attempt(folder, seeds, "serial")[0] == 0
        assert finished.items() <= whole_records(folder).items()
        assert (folder / "scores.csv").read_bytes() == expected
        assert not list(folder.rglob("*.part"))
    return {
        "executor": executor,
        "kills": killed,
        "kills_between_first_and_last_cell": during,
        "runs": rounds,
        "cells": 4 * seeds,
        "seconds_of_a_run": round(length, 2),
        "slowest_end_of_workers": round(slowest, 2),
    }


def kill_all(place, kills, seeds, executors=EXECUTORS):
    """Kill runs of the executors; each comes to the table of an undisturbed one."""
    plugin, temporary = place / "plugin", place / "tmp"
    plugin.mkdir()
    temporary.mkdir()
    tempfile.tempdir = os.environ["TMPDIR"] = str(temporary)
    sys.path.insert(0, str(write_plugin(plugin)))
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    assert attempt(place / "straight", seeds, "serial")[0] == 0
    expected = (place / "straight" / "scores.csv").read_bytes()
    share, rest = divmod(kills, len(executors))
    rng = random.Random(1)
    return [
        kill_and_resume(place, share + (number < rest), seeds, rng, executor, expected)
        for number, executor in enumerate(executors)
        if share + (number < rest)
    ]


@pytest.mark.slow
def test_kills_at_random_moments_lose_no_finished_cell(tmp_path):
    # ``nlbench/execution/test_executors.py`` kills a run with Dask.
    done = call("2", "serial", "processes", cwd=tmp_path, script=__file__)
    assert done.returncode == 0, done.stderr
    assert sum(part["kills"] for part in json.loads(done.stdout)) == 2


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        kills = int(sys.argv[1]) if len(sys.argv) > 1 else 200
        executors = tuple(sys.argv[2:]) or EXECUTORS
        seeds = 12 if kills > len(executors) else 6
        print(json.dumps(kill_all(Path(place), kills, seeds, executors), indent=1))
