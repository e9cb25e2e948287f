"""Measure what a linear region costs, in forward passes of the same network.

Traces the closed path of one image of digits through VGG8 and divides the time a region
takes by the time a sample takes in a float64 forward pass at its fastest batch size.
Forward passes are timed before and after each trace, and the medians compared, so that a
machine that is busy with something else slows both. Prints a table and writes
``cost_per_region.json`` beside this file.

    python benchmarks/cost_per_region.py [--threads N] [--repeats N]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from nlbench.model import model_info
from nlbench.models.digits import digits
from nlbench.models.vgg import vgg8
from nlbench.probes.paths import closed_paths
from nlbench.probes.program import double_copy, record
from nlbench.probes.tracing import default_limit, trace_program

BATCHES = (8, 16, 32, 64, 128)


def network() -> tuple[nn.Module, str]:
    """VGG8 as shipped, or freshly initialised where no checkpoint is."""
    torch.manual_seed(0)
    model = vgg8()
    checkpoint = model_info(vgg8).trained["digits"]
    if checkpoint.exists():
        model.load_state_dict(load_file(checkpoint))
        return double_copy(model), "trained on digits"
    return double_copy(model), "initialised, seed 0"


def seconds_a_sample(model: nn.Module, inputs: Tensor) -> dict[int, float]:
    result = {}
    with torch.inference_mode():
        for batch in BATCHES:
            samples = inputs.repeat(-(-batch // len(inputs)), 1, 1, 1)[:batch]
            passes = max(1, 256 // batch)
            start = time.perf_counter()
            for _ in range(passes):
                model(samples)
            result[batch] = (time.perf_counter() - start) / (passes * batch)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    model, weights = network()
    data = digits()
    path = data.normalize(closed_paths(data.sample(1, split="test", seed=0).images)[0]).double()
    program = record(model, path[:2])
    segments = list(itertools.pairwise(path))
    trace_program(program, *segments[0])

    forward: list[dict[int, float]] = [seconds_a_sample(model, path[:-1])]
    traced: list[float] = []
    for _ in range(arguments.repeats):
        start = time.perf_counter()
        traces = [trace_program(program, *ends) for ends in segments]
        traced.append(time.perf_counter() - start)
        forward.append(seconds_a_sample(model, path[:-1]))

    regions = sum(trace.regions for trace in traces)
    by_batch = {b: statistics.median(run[b] for run in forward) for b in BATCHES}
    batch = min(by_batch, key=by_batch.__getitem__)
    seconds = statistics.median(traced)
    result = {
        "network": f"vgg8, {weights}",
        "path": "closed, 8 segments, first test image of digits (seed 0)",
        "threads": arguments.threads,
        "torch": torch.__version__,
        "points_at_once": default_limit(program, path.device),
        "regions": regions,
        "crossings": sum(trace.crossings for trace in traces),
        "seconds": seconds,
        "ms_per_region": 1e3 * seconds / regions,
        "ms_per_forward_sample": 1e3 * by_batch[batch],
        "fastest_batch": batch,
        "ratio": seconds / regions / by_batch[batch],
    }
    for name, value in result.items():
        print(f"{name:24}{value:.4g}" if isinstance(value, float) else f"{name:24}{value}")
    target = Path(__file__).with_suffix(".json")
    target.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
