"""How long it takes to take up a finished grid of a thousand cells.

The grid is measured once, with a small network and quick measures; then ``nlbench run`` is
called on it again, as a process of its own. Prints the result and writes it as JSON next to
this file.
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

GOAL = 3.0
CODE = (
    "import sys; from nlbench.cli import main\n"
    "try:\n    main()\nexcept SystemExit as done:\n    assert not done.code, done.code\n"
    "assert 'torch' not in sys.modules"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=250, help="four cells each")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        write_grid_plugin(Path(place))
        from nlbench.runner import run

        request = quick_request(arguments.seeds)
        result = run(request, Path(place, "run"))
        command = [
            sys.executable, "-c", CODE, "run", "--measures", ",".join(QUICK), "--model",
            ",".join(request.models), "--weights", "init", "--samples", str(request.samples),
            "--seeds", ",".join(map(str, request.seeds)), "--out", str(Path(place, "run")),
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([place, *sys.path])}
        times = []
        for number in range(arguments.repeats + 1):
            begin = time.perf_counter()
            done = subprocess.run(
                command, env=environment, cwd=place, capture_output=True, text=True, check=False
            )
            # The first call writes the page, which the others find up to date.
            if number:
                times.append(time.perf_counter() - begin)
                if done.returncode:
                    raise SystemExit(done.stderr)
    found = {
        "cells": len(result.records),
        "seconds": round(statistics.median(times), 3),
        "slowest": round(max(times), 3),
        "goal": GOAL,
        "torch_imported": False,
    }
    print(json.dumps(found, indent=1))
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
