"""What the runner costs per cell, beyond the passes and the measures themselves.

A grid of a small network under many seeds, with measures that compute almost nothing, in a
run's folder: wall time less what the records say that loading, passes and measures took.
Prints the result and writes it as JSON next to this file.
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

GOAL = 0.020


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=50)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        write_grid_plugin(Path(place))
        # Imported after the plugin is on the path, and before the clock starts.
        from nlbench.runner import run

        run(quick_request(1), Path(place, "warm"))
        begin = time.perf_counter()
        result = run(quick_request(arguments.seeds), Path(place, "run"))
        seconds = time.perf_counter() - begin
    # Loading and the pass are shared by the cells of a subject.
    shared = {
        record.subject.key: record.costs["load_seconds"] + record.costs["wall_seconds"]
        for record in result.records
    }
    cells = len(result.records)
    overhead = (seconds - sum(shared.values())) / cells
    found = {
        "cells": cells,
        "measures": len(QUICK),
        "seconds": round(seconds, 3),
        "seconds_of_loading_and_passes": round(sum(shared.values()), 3),
        "overhead_per_cell": round(overhead, 5),
        "goal": GOAL,
    }
    print(json.dumps(found, indent=1))
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
