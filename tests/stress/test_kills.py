"""A run killed at random moments: nothing finished is lost, nothing is half written.

``python tests/stress/test_kills.py 200`` kills as often as it is told.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "support"))

from hostile import write_plugin


def attempt(folder, seeds, delay=None):
    """Run a grid in a process that is killed after a while; give its exit status.

    The process is forked from one that has imported PyTorch and computed nothing, so that
    the moments fall into the run and not into imports.
    """
    from nlbench.request import ExecutionOptions, Request
    from nlbench.runner import run

    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if delay is not None:

        def kill():
            time.sleep(delay)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
    wanted = Request(
        ("plain", "drawing"),
        ("mini", "mini2"),
        ("digits",),
        weights="init",
        seeds=tuple(range(seeds)),
        samples=8,
    )
    try:
        run(wanted, folder, execution=ExecutionOptions(threads=1))
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def whole_records(folder):
    """Records by name; one that can't be read is a defect."""
    return {
        path.name: json.loads(path.read_text()) and path.read_bytes()
        for path in (folder / "cells").glob("*.json")
    }


def kill_and_resume(place, kills, seeds, rng):
    plugin = place / "plugin"
    plugin.mkdir()
    sys.path.insert(0, str(write_plugin(plugin)))
    begin = time.monotonic()
    assert attempt(place / "straight", seeds) == 0
    length = time.monotonic() - begin
    expected = (place / "straight" / "scores.csv").read_bytes()
    killed = rounds = 0
    while killed < kills:
        folder = place / f"run{rounds}"
        rounds += 1
        finished = {}
        while killed < kills:
            if attempt(folder, seeds, rng.random() * length) == 0:
                break
            killed += 1
            now = whole_records(folder) if folder.exists() else {}
            assert finished.items() <= now.items(), "a finished cell was lost or changed"
            finished = now
        assert attempt(folder, seeds) == 0
        assert finished.items() <= whole_records(folder).items()
        assert (folder / "scores.csv").read_bytes() == expected
        assert not list(folder.rglob("*.part"))
    return {"kills": killed, "runs": rounds, "cells": 4 * seeds, "seconds": round(length, 2)}


@pytest.mark.slow
def test_kills_at_random_moments_lose_no_finished_cell():
    done = subprocess.run(
        [sys.executable, __file__, "12"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kills"] == 12


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        kills = int(sys.argv[1]) if len(sys.argv) > 1 else 200
        print(json.dumps(kill_and_resume(Path(place), kills, 12, random.Random(1))))
