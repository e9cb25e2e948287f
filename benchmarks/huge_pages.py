"""Compare runs whose large tensors have huge pages, the default, with runs without.

`nlbench run` measures six measures of sites of torchvision's networks with random weights on
224×224 images, with one thread. Processes with and without huge pages alternate; processor times
include the start of Python. Prints a table and writes it as JSON next to this file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

VARIABLE = "THP_MEM_ALLOC_ENABLE"
MODELS = ["resnet50", "efficientnet_b0", "vit_b_32"]
MEASURES = "affinity,r2,cka,norm,sparsity,entropy"
PROGRAM = Path(sys.executable).with_name("nlbench")


def cost(model: str, samples: int, pages: str) -> tuple[float, float, float]:
    """Return user and system seconds of a run, and its peak memory in GB."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(PROGRAM), "run", "--model", f"torchvision/{model}", "--weights", "init"]
        command += ["--data", "synthetic", "--samples", str(samples), "--measures", MEASURES]
        command += ["--out", f"{folder}/run", "--progress", "none"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", VARIABLE: pages}
        quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
        process = os.posix_spawn(PROGRAM, command, environment, file_actions=quiet)
        _, status, usage = os.wait4(process, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {status}")
    return usage.ru_utime, usage.ru_stime, usage.ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    rows = []
    print(f"{'network':<16} {'pages':>6} {'user s':>7} {'system s':>9} {'peak GB':>8}")
    for model in MODELS:
        costs: dict[str, list[tuple[float, float, float]]] = {"0": [], "1": []}
        for _ in range(arguments.repeats):
            for pages, values in costs.items():
                values.append(cost(model, arguments.samples, pages))
        row: dict[str, object] = {"network": model}
        totals = {}
        for pages, name in (("0", "small"), ("1", "huge")):
            user, system, peak = map(statistics.median, zip(*costs[pages], strict=True))
            totals[name] = statistics.median(a + b for a, b, _ in costs[pages])
            row |= {f"{name}_user": user, f"{name}_system": system, f"{name}_peak_gb": peak}
            print(f"{model:<16} {name:>6} {user:>7.1f} {system:>9.1f} {peak:>8.2f}")
        row["ratio"] = totals["small"] / totals["huge"]
        print(f"{model:<16}  ratio {row['ratio']:>6.2f}")
        rows.append(row)
    result = {"samples": arguments.samples, "repeats": arguments.repeats, "runs": rows}
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
