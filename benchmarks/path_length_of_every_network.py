"""Measure the time of the average path length of each of torchvision's networks.

Builds every classification network on the meta device, records its channel graph at its usual
resolution, and computes both path lengths. ResNet152 is also measured with weights in memory.

Prints a table and writes ``path_length_of_every_network.json`` next to this file.

    python benchmarks/path_length_of_every_network.py [--threads N] [--repeats N] [--name GLOB]
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nlbench.probes.graph.channel_graph import counted_lengths, walked_length
from nlbench.probes.graph.graph_observation import channel_graph


class MetaParameters(TorchFunctionMode):
    """Creates parameters on the meta device, which takes no memory and no time."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.empty, torch.zeros, torch.ones):
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def measure(model: nn.Module, example: Tensor, repeats: int) -> dict[str, float]:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        graph = channel_graph(model, example)
        walked, counted = walked_length(graph), counted_lengths(graph)
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": statistics.median(seconds),
        "normalized": walked,
        "unnormalized": counted.mean,
        "log10_paths": counted.log10_paths,
        "nodes": graph.nodes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--name", default="*")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", category=FutureWarning)
    results = {}
    names = torchvision.models.list_models(module=torchvision.models)
    for name in fnmatch.filter(names, options.name):
        size = 299 if name == "inception_v3" else 224
        with MetaParameters():
            model = torchvision.models.get_model(name, weights=None)
        example = torch.empty(1, 3, size, size, device="meta")
        results[name] = measure(model, example, options.repeats)
    if fnmatch.fnmatch("resnet152", options.name):
        model = torchvision.models.resnet152(weights=None)
        results["resnet152, with weights"] = measure(
            model, torch.zeros(1, 3, 224, 224), options.repeats
        )
    for name, result in results.items():
        print(
            f"{name:26} {result['normalized']:8.3f} {result['unnormalized']:8.3f} "
            f"{result['seconds']:6.2f} s"
        )
    report = {"torch": torch.__version__, "threads": options.threads, "networks": results}
    Path(__file__).with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
