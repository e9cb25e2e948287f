"""Measure the cost of a linear region in forward passes of the same network.

Traces the closed path of one image of digits through VGG8, and a part of it through ResNet18 of
width 16. The time per region is divided by the time per sample of a float64 forward pass at the
fastest batch size. Forward passes are timed before and after each trace and the medians compared,
so that other load slows both.

The floor is the cost of evaluating each layer once at every breakpoint known by then, at the speed
of the forward pass. It counts multiplications of linear layers and convolutions, as a share of
those of a forward pass at every breakpoint.

Prints a table and writes ``cost_per_region.json`` next to this file.

    python benchmarks/cost_per_region.py [--threads N] [--repeats N] [--network NAME]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from nlbench.introspection.model_copy import double_copy
from nlbench.probes.lines import SegmentTrace
from nlbench.probes.lines.exact.trace import trace_exactly
from nlbench.probes.lines.paths import closed_paths
from nlbench.probes.lines.recording.point_memory import measure_point_memory
from nlbench.probes.lines.recording.program import Program
from nlbench.probes.lines.recording.recorder import record_program
from nlbench.subjects.load import load_dataset, load_subject
from nlbench.subjects.spec import SubjectSpec

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
# Share of each segment that is traced, so that a run takes a minute.
SHARES = {"vgg8": 1.0, "resnet18-w16": 0.1}


def network(name: str) -> tuple[nn.Module, str]:
    """Return a network with its shipped weights, or initialised if it has none."""
    subject = load_subject(SubjectSpec(name, "auto", "digits", samples=1), torch.device("cpu"))
    return double_copy(subject.model), str(subject.facts.weights)


def seconds_per_sample(model: nn.Module, inputs: Tensor) -> dict[int, float]:
    """Time the forward pass at each batch size."""
    result = {}
    with torch.inference_mode():
        for batch in BATCHES:
            samples = inputs.repeat(-(-batch // len(inputs)), 1, 1, 1)[:batch]
            model(samples)
            passes = max(1, 64 // batch)
            start = time.perf_counter()
            for _ in range(passes):
                model(samples)
            result[batch] = (time.perf_counter() - start) / (passes * batch)
    return result


def floor(program: Program, model: nn.Module, traces: list[SegmentTrace]) -> float:
    """Compute the cost of each layer at the breakpoints known by then, in forward passes."""
    products = _products(model, program)
    by_site = {name: sum(trace.contributions[name] for trace in traces) for name in program.sites}
    known, total = 2 * len(traces), 0.0
    for step in program.steps:
        if step.site:
            known += by_site[step.site]
        total += products.get(step.place, 0) * known
        products.pop(step.place, None)
    regions = sum(trace.regions for trace in traces)
    return total / (regions * sum(_products(model, program).values()))


def _products(model: nn.Module, program: Program) -> dict[str, int]:
    """Return the multiplications for one sample by layer."""
    shapes = {step.place: step.shape for step in program.steps if step.operation != "relu"}
    return {
        name: module.weight[0].numel() * math.prod(shapes[name])
        for name, module in model.named_modules()
        if isinstance(module, (nn.Conv2d, nn.Linear))
    }


def measure(name: str, repeats: int) -> dict[str, object]:
    model, weights = network(name)
    data = load_dataset("digits")
    image = data.sample(1, split="test", seed=0).images
    path = data.normalize(closed_paths(image)[0]).double()
    share = SHARES[name]
    segments = torch.stack([path[:-1], torch.lerp(path[:-1], path[1:], share)], 1)
    program = record_program(model, path[:1].clone())
    trace_exactly(program, segments[:1])

    forward, trace_seconds = [seconds_per_sample(model, path[:-1])], []
    for _ in range(repeats):
        start = time.perf_counter()
        traces = [trace for ends in segments for trace in trace_exactly(program, ends[None])]
        trace_seconds.append(time.perf_counter() - start)
        forward.append(seconds_per_sample(model, path[:-1]))

    regions = sum(trace.regions for trace in traces)
    by_batch = {b: statistics.median(run[b] for run in forward) for b in BATCHES}
    batch = min(by_batch, key=by_batch.__getitem__)
    seconds = statistics.median(trace_seconds)
    ratio, lower_bound = seconds / regions / by_batch[batch], floor(program, model, traces)
    return {
        "network": f"{name}, weights {weights}",
        "path": f"closed, first {share:.0%} of 8 segments, first test image of digits (seed 0)",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "bytes_alive_at_a_point": measure_point_memory(program, path[:2]).width,
        "regions": regions,
        "seconds": seconds,
        "ms_per_region": 1e3 * seconds / regions,
        "ms_per_forward_sample": 1e3 * by_batch[batch],
        "fastest_batch": batch,
        "ratio": ratio,
        "floor": lower_bound,
        "ratio_to_floor": ratio / lower_bound,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--network", choices=sorted(SHARES), action="append")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = [measure(name, arguments.repeats) for name in arguments.network or SHARES]
    for result in results:
        for name, value in result.items():
            print(f"{name:24}{value:.4g}" if isinstance(value, float) else f"{name:24}{value}")
        print()
    if not arguments.network:
        target = Path(__file__).with_suffix(".json")
        target.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
