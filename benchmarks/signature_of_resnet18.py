"""Compare the cost of a signature, all six site measures, with that of the forward pass.

torchvision's ResNet18 with random weights runs on noise of 224×224 in batches of 128. Prints a
table and writes it as JSON next to this file. Times are processor seconds on the CPU, and
wall-clock seconds on a GPU. Forward passes with and without measures alternate, and the ratio is
that of the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn

import nlbench
from nlbench.introspection.precision import exact_arithmetic
from nlbench.probes.sites.sites_observation import observe_sites

MEASURES = ["affinity", "r2", "cka", "norm", "sparsity", "entropy"]


def bare(model: nn.Module, inputs: Tensor, size: int) -> None:
    with torch.no_grad(), exact_arithmetic():
        for batch in torch.split(inputs, size):
            model(batch)
    if inputs.is_cuda:
        torch.cuda.synchronize()


def probe_alone(model: nn.Module, inputs: Tensor, size: int) -> None:
    with exact_arithmetic():
        observe_sites(model, torch.split(inputs, size), lambda observation: None)
    if inputs.is_cuda:
        torch.cuda.synchronize()


def signature(model: nn.Module, inputs: Tensor, size: int, errors: str = "groups") -> None:
    settings = {"sites.batch": size}
    run = nlbench.evaluate(model, inputs, MEASURES, settings=settings, errors=errors)
    failures = [f"{r.measure.name}: {r.result.reason}" for r in run.records if not r.is_done]
    if failures:
        raise SystemExit("; ".join(failures))


def seconds(call: Callable[[], None], device: str) -> float:
    clock = time.process_time if device == "cpu" else time.perf_counter
    begin = clock()
    call()
    return clock() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None).eval().to(arguments.device)
    shape = (arguments.batch * arguments.batches, 3, arguments.image, arguments.image)
    inputs = torch.randn(shape, device=arguments.device)
    variants: dict[str, Callable[[nn.Module, Tensor, int], None]] = {
        "forward": bare,
        "probe": probe_alone,
        "without errors": partial(signature, errors="none"),
        "signature": signature,
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(arguments.repeats + 1):
        for name, variant in variants.items():
            call = partial(variant, model, inputs, arguments.batch)
            elapsed = seconds(call, arguments.device)
            # The first round warms up.
            if repeat:
                times[name].append(elapsed)
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"{'':>14} {'seconds':>8} {'of forward':>11}")
    for name, median in medians.items():
        print(f"{name:>14} {median:>8.2f} {median / medians['forward']:>11.2f}")
    result = {
        **vars(arguments),
        "threads": torch.get_num_threads(),
        "seconds": {name: round(median, 3) for name, median in medians.items()},
        "ratio": {name: round(median / medians["forward"], 3) for name, median in medians.items()},
    }
    device = arguments.device.partition(":")[0]
    suffix = ".json" if device == "cpu" else f".{device}.json"
    Path(__file__).with_suffix(suffix).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
