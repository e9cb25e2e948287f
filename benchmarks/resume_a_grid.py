"""Measure the time to resume a finished grid of a thousand cells.

The grid is measured once, with a small network and quick measures. Then ``nlbench run`` is repeated
in new processes. Prints the result and writes it as JSON next to this file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from grids import QUICK, quick_request, write_grid_plugin

GOAL_SECONDS = 3.0
CODE = (
    "import sys; from nlbench.cli import main\n"
    "try:\n    main()\nexcept SystemExit as error:\n    assert not error.code, error.code\n"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=250, help="four cells each")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_grid_plugin(Path(folder))
        from nlbench.runner import run

        request = quick_request(arguments.seeds)
        result = run(request, Path(folder, "run"))
        command = [
            sys.executable, "-c", CODE, "run", "--measures", ",".join(QUICK), "--model",
            ",".join(request.models), "--weights", "init", "--samples", str(request.samples),
            "--seeds", ",".join(map(str, request.seeds)), "--out", str(Path(folder, "run")),
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, *sys.path])}
        times, processor_times = [], []
        for number in range(arguments.repeats + 1):
            begin, processor_begin = time.perf_counter(), _processor_seconds()
            done = subprocess.run(
                command, env=environment, cwd=folder, capture_output=True, text=True, check=False
            )
            # The first call writes the page, which is up to date for the others.
            if number:
                times.append(time.perf_counter() - begin)
                processor_times.append(_processor_seconds() - processor_begin)
                if done.returncode:
                    raise SystemExit(done.stderr)
    summary = {
        "cells": len(result.records),
        "seconds": round(statistics.median(times), 3),
        "slowest": round(max(times), 3),
        "processor_seconds": round(statistics.median(processor_times), 3),
        "goal": GOAL_SECONDS,
    }
    print(json.dumps(summary, indent=1))
    Path(__file__).with_suffix(".json").write_text(json.dumps(summary, indent=1) + "\n")


def _processor_seconds() -> float:
    """Return the time of finished child processes on all cores."""
    times = os.times()
    return times.children_user + times.children_system


if __name__ == "__main__":
    main()
