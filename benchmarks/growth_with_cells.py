"""Measure the growth of time and memory with the number of cells, from 10^3 to 10^5.

A grid of a small network and four quick measures is measured once per size. Then the plan of the
finished run, its resumption, its table, its page and its comparison with itself are timed, each in
its own process. Prints the results and writes them as JSON next to this file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from grids import quick_request, write_grid_plugin

SECONDS, GIGABYTES, MEGABYTES = 60.0, 2.0, 5.0  # limits at 100,000 cells; of the page
CELLS_PER_SEED = 4
TIMED = """
import json, resource, sys, time
from dataclasses import replace
from pathlib import Path
import nlbench
from nlbench.runner import run
from grids import quick_request
folder, seeds, step = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if step in ("table", "page", "compare"):
    loaded = nlbench.load_run(folder)
begin = time.perf_counter()
if step in ("measure", "resume"):
    run(quick_request(seeds), folder)
elif step == "table":
    len(loaded.scores)
elif step == "page":
    loaded.report(folder.parent / "page.html")
elif step == "compare":
    loaded.compare(loaded)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps({"seconds": round(time.perf_counter() - begin, 2), "gigabytes": round(peak, 2)}))
"""
STEPS = ("measure", "resume", "table", "page", "compare")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    arguments = parser.parse_args()
    results: dict[str, object] = {"limits": [SECONDS, GIGABYTES, MEGABYTES]}
    for cells in arguments.cells:
        with tempfile.TemporaryDirectory() as place:
            write_grid_plugin(Path(place))
            rows = {step: timed(Path(place), cells // CELLS_PER_SEED, step) for step in STEPS}
            page = round(Path(place, "page.html").stat().st_size / 1e6, 2)
        results[str(cells)] = {**rows, "page_megabytes": page}
        print(json.dumps({cells: results[str(cells)]}, indent=1), flush=True)
    Path(__file__).with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")


def timed(place: Path, seeds: int, step: str) -> dict[str, float]:
    """Run one step in a separate process."""
    assert len(quick_request(1).measures) == CELLS_PER_SEED
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(place), *sys.path])}
    command = [sys.executable, "-c", TIMED, str(place / "run"), str(seeds), step]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    main()
