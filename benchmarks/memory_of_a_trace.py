"""Compare the peak memory of a trace of 100,000 regions with its budget.

Each budget is measured in its own process, since a process's peak never falls. The baseline is the
resident memory just before the trace, with the model and PyTorch loaded. The trace adds its points
(the budget), memory that the allocator retains, and the result. Prints a table and writes
``memory_of_a_trace.json`` next to this file.

    python benchmarks/memory_of_a_trace.py [--threads N] [--share S] [--budgets MIB ...]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from pathlib import Path

import psutil
import torch
from narrow import network, segment

from nlbench.probes.lines.exact.trace import trace_exactly
from nlbench.probes.lines.recording.recorder import record_program

MIB = 2**20


def measure(budget: int, share: float, threads: int) -> dict[str, float]:
    torch.set_num_threads(threads)
    model, (start, end) = network(), segment()
    program = record_program(model, start[None].clone())
    points = torch.stack([start, torch.lerp(start, end, 1e-4)])[None]
    trace_exactly(program, points, memory=budget)
    points = torch.stack([start, torch.lerp(start, end, share)])[None]
    before = psutil.Process().memory_info().rss
    began = time.perf_counter()
    (trace,) = trace_exactly(program, points, memory=budget)
    seconds = time.perf_counter() - began
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    trace_bytes = sum(x.nbytes for x in (trace.t, trace.values, trace.origins))
    return {
        "budget_mib": budget / MIB,
        "regions": trace.regions,
        "added_at_peak_mib": (peak - before) / MIB,
        "of_which_the_trace_mib": trace_bytes / MIB,
        "share_of_budget": (peak - before) / budget,
        "process_before_mib": before / MIB,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--share", type=float, default=1.0, help="share of the segment to trace")
    parser.add_argument("--budgets", type=int, nargs="+", default=[64, 256, 1024], help="MiB")
    arguments = parser.parse_args()
    processes = multiprocessing.get_context("spawn")
    results = []
    for budget in arguments.budgets:
        with processes.Pool(1) as pool:
            task = (budget * MIB, arguments.share, arguments.threads)
            results.append(pool.apply(measure, task))
        print("  ".join(f"{name} {value:.4g}" for name, value in results[-1].items()))
    target = Path(__file__).with_suffix(".json")
    target.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
