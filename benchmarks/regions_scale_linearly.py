"""Measure how the time of a trace grows with the number of regions, to 10^5 and beyond.

Traces pieces of increasing length of one segment through a network with many units, and fits a
power of the number of regions to the times. Prints a table and writes
``regions_scale_linearly.json`` and ``regions_scale_linearly.png`` next to this file.

    python benchmarks/regions_scale_linearly.py [--threads N] [--share S]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from narrow import network, segment

from nlbench.probes.lines.exact.trace import trace_exactly
from nlbench.probes.lines.recording.recorder import record_program

mpl.use("Agg")
from matplotlib import pyplot as plt

SHARES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


def measure(longest: float) -> list[dict[str, float]]:
    model, (start, end) = network(), segment()
    middle, half = (start + end) / 2, longest * (end - start) / 2
    program = record_program(model, start[None].clone())
    results = []
    for share in (SHARES[0], *SHARES):
        points = torch.stack([middle - share * half, middle + share * half])[None]
        began = time.perf_counter()
        (trace,) = trace_exactly(program, points)
        seconds = time.perf_counter() - began
        results.append({"share": share, "regions": trace.regions, "seconds": seconds})
        print("  ".join(f"{name} {value:.4g}" for name, value in results[-1].items()), flush=True)
    return results[1:]  # The first one warms up.


def draw(results: list[dict[str, float]], exponent: float, target: Path) -> None:
    regions = np.array([result["regions"] for result in results])
    seconds = np.array([result["seconds"] for result in results])
    figure, axes = plt.subplots(figsize=(4.5, 3.2), layout="constrained")
    axes.loglog(regions, seconds, "o-", label=f"traced (exponent {exponent:.2f})")
    axes.loglog(regions, seconds[-1] / regions[-1] * regions, "k:", label="linear")
    axes.set(xlabel="regions on the segment", ylabel="seconds", title="eight narrow convolutions")
    axes.legend(frameon=False)
    figure.savefig(target, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--share", type=float, default=1.0, help="share of the segment to trace")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = measure(arguments.share)
    large = [result for result in results if result["regions"] >= 1000]
    exponent = float(
        np.polyfit(
            np.log([result["regions"] for result in large]),
            np.log([result["seconds"] for result in large]),
            1,
        )[0]
    )
    target = Path(__file__).with_suffix(".json")
    content = {"threads": arguments.threads, "exponent": exponent, "segments": results}
    target.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    draw(results, exponent, Path(__file__).with_suffix(".png"))
    print(f"exponent {exponent:.3f}")


if __name__ == "__main__":
    main()
