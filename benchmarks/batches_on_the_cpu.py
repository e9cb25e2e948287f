"""Measure what limiting batches and keeping freed memory save on the CPU.

torchvision's EfficientNet-B0 with random weights runs on noise of 224×224: six site measures, and
the nonlinearity coefficient. Whole batches are compared with batches limited to 256 MiB, and the C
library's default allocator with one that keeps freed memory. Each variant runs in its own process,
on one thread. Prints a table of processor times (of the program, and of the system, mostly for
zeroing memory) and writes it as JSON next to this file.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

MEASURES = {"sites": ["affinity", "r2", "cka", "norm", "sparsity", "entropy"], "nlc": ["nlc"]}
VARIANTS = {
    "whole batches": (False, False),
    "whole batches, freed memory kept": (False, True),
    "limited batches": (True, False),
    "limited batches, freed memory kept": (True, True),
}


def run_variant(measures: list[str], samples: int, is_limited: bool, is_kept: bool) -> None:
    from nlbench.introspection.allocator import keep_freed_memory

    if is_kept:
        keep_freed_memory()
    import torch
    import torchvision

    import nlbench
    from nlbench.introspection import memory

    if not is_limited:
        memory.CPU_BATCH_BYTES = sys.maxsize
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torchvision.models.efficientnet_b0(weights=None).eval()
    inputs = torch.randn(samples, 3, 224, 224)
    start = resource.getrusage(resource.RUSAGE_SELF)
    run = nlbench.evaluate(model, inputs, measures)
    end = resource.getrusage(resource.RUSAGE_SELF)
    failures = [r.result.reason for r in run.records if not r.is_done]
    if failures:
        raise SystemExit("; ".join(failures))
    print(
        json.dumps(
            {
                "user": round(end.ru_utime - start.ru_utime, 2),
                "system": round(end.ru_stime - start.ru_stime, 2),
                "peak_MiB": round(end.ru_maxrss / 1024),
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--variant", choices=VARIANTS)
    parser.add_argument("--measures", choices=MEASURES)
    arguments = parser.parse_args()
    if arguments.variant:
        measures = MEASURES[arguments.measures]
        run_variant(measures, arguments.samples, *VARIANTS[arguments.variant])
        return
    costs: dict[str, dict[str, dict[str, float]]] = {}
    print(f"{'':>42} {'program':>8} {'system':>8} {'peak MiB':>9}")
    for measures in MEASURES:
        for variant in VARIANTS:
            command = [sys.executable, __file__, "--samples", str(arguments.samples)]
            output = subprocess.run(
                [*command, "--variant", variant, "--measures", measures],
                check=True,
                capture_output=True,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            cost = json.loads(output.stdout.splitlines()[-1])
            costs.setdefault(measures, {})[variant] = cost
            print(
                f"{measures + ', ' + variant:>42} {cost['user']:>8.1f} {cost['system']:>8.1f} "
                f"{cost['peak_MiB']:>9}"
            )
    content = {"samples": arguments.samples, "costs": costs}
    Path(__file__).with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
