"""How much more than the forward pass a whole signature costs: all six site measures.

torchvision's ResNet18 with random weights on noise of 224 x 224, batches of 128. Prints a
table and writes it as JSON next to this file. Times are wall-clock seconds; the bare forward
pass and the pass with all measures alternate, and the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn

import nlbench
from nlbench.introspection.precision import exact_arithmetic
from nlbench.probes.sites.probe import observe_sites

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


def signature(model: nn.Module, inputs: Tensor, size: int) -> None:
    run = nlbench.evaluate(model, inputs, MEASURES, settings={"sites.batch": size})
    wrong = [f"{r.measure.name}: {r.result.reason}" for r in run.records if not r.is_done]
    if wrong:
        raise SystemExit("; ".join(wrong))


def seconds(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--device", default="cpu")
    given.add_argument("--batch", type=int, default=128)
    given.add_argument("--batches", type=int, default=3)
    given.add_argument("--image", type=int, default=224)
    given.add_argument("--repeats", type=int, default=3)
    asked = given.parse_args()
    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None).eval().to(asked.device)
    shape = (asked.batch * asked.batches, 3, asked.image, asked.image)
    inputs = torch.randn(shape, device=asked.device)
    ways = {"forward": bare, "probe": probe_alone, "signature": signature}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(asked.repeats + 1):
        for name, way in ways.items():
            found = seconds(lambda way=way: way(model, inputs, asked.batch))
            # The first round warms up.
            if repeat:
                taken[name].append(found)
    medians = {name: statistics.median(values) for name, values in taken.items()}
    print(f"{'':>10} {'seconds':>8} {'of forward':>11}")
    for name, median in medians.items():
        print(f"{name:>10} {median:>8.2f} {median / medians['forward']:>11.2f}")
    found = {
        **vars(asked),
        "threads": torch.get_num_threads(),
        "seconds": {name: round(median, 3) for name, median in medians.items()},
        "ratio": {name: round(median / medians["forward"], 3) for name, median in medians.items()},
    }
    suffix = ".json" if asked.device == "cpu" else f".{asked.device.partition(':')[0]}.json"
    Path(__file__).with_suffix(suffix).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
