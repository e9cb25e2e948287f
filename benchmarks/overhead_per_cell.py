"""Measure the runner's overhead per cell, without passes and measures.

The grid consists of a small network with many seeds and measures that compute almost nothing. The
overhead is the wall time minus the recorded times of loading, passes and measures. Prints the
result and writes it as JSON next to this file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from grids import QUICK, quick_request, write_grid_plugin

GOAL_SECONDS = 0.020


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=50)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_grid_plugin(Path(folder))
        # Imported once the plugin is on the path.
        from nlbench.runner import run

        run(quick_request(1), Path(folder, "warm"))
        begin = time.perf_counter()
        result = run(quick_request(arguments.seeds), Path(folder, "run"))
        seconds = time.perf_counter() - begin
    # The cells of a subject share loading and the pass.
    shared = {
        record.subject.key: record.costs["load_seconds"] + record.costs["wall_seconds"]
        for record in result.records
    }
    cells = len(result.records)
    overhead = (seconds - sum(shared.values())) / cells
    summary = {
        "cells": cells,
        "measures": len(QUICK),
        "seconds": round(seconds, 3),
        "seconds_of_loading_and_passes": round(sum(shared.values()), 3),
        "overhead_per_cell": round(overhead, 5),
        "goal": GOAL_SECONDS,
    }
    print(json.dumps(summary, indent=1))
    Path(__file__).with_suffix(".json").write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
