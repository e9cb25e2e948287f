"""Compare the peak memory of an estimate on one segment of ResNet18 with its budget.

Each budget is measured in its own process, since a process's peak never falls. The baseline is the
resident memory just before the estimate, with the model and PyTorch loaded. Copies of the model, in
single and in double precision, add to the budget. The segment connects a smooth image of 224×224
with its shift by a pixel. Prints a table and writes ``memory_of_an_estimate.json`` next to this
file.

    python benchmarks/memory_of_an_estimate.py [--threads N] [--budgets MIB ...]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
from pathlib import Path

import psutil
import torch
import torchvision
from torch import nn

from nlbench.probes.lines import estimate_segment

MIB = 2**20
EVALUATIONS = 50


def measure(budget: int, threads: int) -> dict[str, float]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None).eval()
    generator = torch.Generator().manual_seed(1)
    coarse = torch.randn(1, 3, 14, 14, generator=generator)
    image = nn.functional.interpolate(coarse, size=(224, 224), mode="bicubic")[0]
    shifted = image.roll(1, 2)
    shifted[:, :, 0] = image[:, :, 0]
    # A small network first, to warm up.
    small = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    estimate_segment(small, image[:, :8, :8], shifted[:, 8:16, :8])
    before = psutil.Process().memory_info().rss
    estimate = estimate_segment(
        model, image, shifted, tolerance=1e-3, evaluations=EVALUATIONS, memory=budget
    )
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {
        "budget_mib": budget / MIB,
        "crossings": estimate.crossings or 0.0,
        "evaluations": estimate.evaluations,
        "added_at_peak_mib": (peak - before) / MIB,
        "of_which_copies_mib": 3 * sum(p.nbytes for p in model.parameters()) / MIB,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--budgets", type=int, nargs="+", default=[80, 256, 1024], help="MiB")
    arguments = parser.parse_args()
    processes = multiprocessing.get_context("spawn")
    results = []
    for budget in arguments.budgets:
        with processes.Pool(1) as pool:
            results.append(pool.apply(measure, (budget * MIB, arguments.threads)))
        print("  ".join(f"{name} {value:.4g}" for name, value in results[-1].items()), flush=True)
    target = Path(__file__).with_suffix(".json")
    target.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
