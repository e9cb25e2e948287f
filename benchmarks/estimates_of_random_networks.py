"""Compare estimates with exact traces of random networks of many kinds.

Each seed makes a network and a segment: convolutions (dense, grouped, depthwise), batch norm with
statistics of data, activations with one or two kinks, max and average pooling with and without
overlap, residual and dense blocks, sorting, MLPs and mixers. The constants of the estimate were
chosen on seeds below 10,000, and rules were changed after a look at seeds from 20,000. Seeds from
30,000 were compared after the last change.

Prints each network whose lower bound is above the exact count or whose errors do not hold, and the
numbers of eight kinds: how many estimates of crossings are within their stated errors, and the mean
of estimate minus exact count over the mean of the stated errors (bias). Writes
``estimates_of_random_networks.json`` next to this file.

    python benchmarks/estimates_of_random_networks.py [--networks N] [--seed N] [--threads N]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nlbench.measures.absdev import absolute_deviation
from nlbench.probes.lines import estimate_segment, trace_segment

MAX_BOUNDARIES = 4000
"""Boundaries of a segment above which it is halved, to bound the time of exact traces."""

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky": lambda: nn.LeakyReLU(0.1),
    "prelu": nn.PReLU,
    "relu6": nn.ReLU6,
    "hardtanh": nn.Hardtanh,
    "abs": lambda: Function(torch.abs),
    "clamp": lambda: Function(lambda x: x.clamp(-0.5, 0.8)),
}
POOLINGS: dict[str, Callable[[], nn.Module]] = {
    "max 2": lambda: nn.MaxPool2d(2),
    "max 3/2": lambda: nn.MaxPool2d(3, 2, 1),
    "max 3/1": lambda: nn.MaxPool2d(3, 1, 1),
    "max 3/2 ceil": lambda: nn.MaxPool2d(3, 2, ceil_mode=True),
    "max 3/2/1 ceil": lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    "max adaptive": lambda: nn.AdaptiveMaxPool2d(4),
    "avg 2": lambda: nn.AvgPool2d(2),
    "avg 3/2": lambda: nn.AvgPool2d(3, 2, 1),
    "avg 3/1": lambda: nn.AvgPool2d(3, 1, 1),
}


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.function(x)


class Branches(nn.Module):
    """The input and a branch of it, added or concatenated."""

    def __init__(self, branch: nn.Module, is_added: bool) -> None:
        super().__init__()
        self.branch, self.is_added = branch, is_added

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        y = self.branch(x)
        return x + y if self.is_added else torch.cat([x, y], 1)


class Mixer(nn.Module):
    """A layer that mixes tokens, then channels, each with a skip; x is (n, tokens, channels)."""

    def __init__(self, tokens: int, channels: int, act: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.across_tokens = nn.Sequential(
            nn.Linear(tokens, 2 * tokens), act(), nn.Linear(2 * tokens, tokens)
        )
        self.across_channels = nn.Sequential(
            nn.Linear(channels, 2 * channels), act(), nn.Linear(2 * channels, channels)
        )

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        x = x + self.across_tokens(x.mT).mT
        return x + self.across_channels(x)


def convolutional(draw: random.Random) -> tuple[str, nn.Module, Tensor]:
    """Draw a convolutional network: stages of convolutions, norms, activations and poolings."""
    channels = draw.choice([1, 2, 3])
    example = torch.randn(32, channels, *2 * [draw.choice([8, 10, 12])])
    act_name = draw.choice([*ACTIVATIONS, "relu", "relu"])
    act = ACTIVATIONS[act_name]
    pool_name = draw.choice(list(POOLINGS))
    width = draw.choice([4, 6, 8])

    def norm(n: int) -> list[nn.Module]:
        return [nn.BatchNorm2d(n)] if draw.random() < 0.6 else []

    def conv(a: int, b: int, kinds: str = "dense grouped depthwise 1x1") -> list[nn.Module]:
        kind = draw.choice(kinds.split())
        bias = draw.random() < 0.7
        if kind == "depthwise" and b % a == 0:
            kernel = draw.choice([1, 3])
            return [nn.Conv2d(a, b, kernel, padding=kernel // 2, groups=a, bias=bias)]
        groups = 2 if kind == "grouped" and a % 2 == 0 and b % 2 == 0 else 1
        kernel = 1 if kind == "1x1" else 3
        return [nn.Conv2d(a, b, kernel, padding=kernel // 2, groups=groups, bias=bias)]

    layers: list[nn.Module] = []
    if draw.random() < 0.7:
        layers += [*conv(channels, width, "dense"), *norm(width), *draw.choice([[], [act()]])]
    else:
        width = channels
    kinds = [act_name, pool_name]
    for _ in range(draw.choice([1, 1, 2])):
        block = draw.choice(["pool", "pool", "pool", "residual", "dense", "plain"])
        kinds.append(block)
        if block == "pool":
            behind: list[nn.Module] = draw.choice([[], conv(width, width, "depthwise 1x1 dense")])
            layers += [POOLINGS[pool_name](), *behind, *norm(width), act()]
        elif block == "residual":
            inner = nn.Sequential(*conv(width, width), *norm(width), act(), *conv(width, width))
            layers += [Branches(inner, True), act()]
        elif block == "dense":
            inner = nn.Sequential(*norm(width), act(), *conv(width, 4, "dense 1x1"))
            layers += [Branches(inner, False)]
            width += 4
        else:
            layers += [*conv(width, width), *norm(width), act()]
    if draw.random() < 0.5:
        layers += [*conv(width, width, "dense"), act()]
    layers += [nn.Flatten(), nn.LazyLinear(draw.choice([3, 12]))]
    if draw.random() < 0.5:
        layers += [act(), nn.LazyLinear(4)]
    return " ".join(["conv", *kinds]), nn.Sequential(*layers), example


def dense(draw: random.Random) -> tuple[str, nn.Module, Tensor]:
    """Draw an MLP, with or without biases and skips."""
    act_name = draw.choice(list(ACTIVATIONS))
    act = ACTIVATIONS[act_name]
    inputs, width = draw.choice([2, 6, 20]), draw.choice([8, 24, 64])
    layers: list[nn.Module] = [nn.Linear(inputs, width), act()]
    for _ in range(draw.choice([0, 1, 2])):
        inner = nn.Sequential(nn.Linear(width, width), act())
        layers.append(Branches(inner, True) if draw.random() < 0.3 else inner)
    return f"mlp {act_name}", nn.Sequential(*layers, nn.Linear(width, 3)), torch.randn(32, inputs)


def ranked(draw: random.Random) -> tuple[str, nn.Module, Tensor]:
    """Draw a network that sorts, often behind units that may be off."""
    name = draw.choice(["topk", "sort", "median", "kthvalue", "amax", "cummax"])
    act_name = draw.choice(["relu", "relu", "leaky", "hardtanh", "abs", "none"])
    act = nn.Identity if act_name == "none" else ACTIVATIONS[act_name]
    inputs, width = draw.choice([4, 8]), draw.choice([5, 8, 12])
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "topk": lambda x: x.topk(3, 1)[0],
        "sort": lambda x: x.sort(1).values,
        "median": lambda x: x.unflatten(1, (1, -1)).median(2)[0],
        "kthvalue": lambda x: x.unflatten(1, (1, -1)).kthvalue(2, 2)[0],
        "amax": lambda x: x.unfold(1, 4, 1).amax(2),
        "cummax": lambda x: x.cummax(1)[0],
    }
    layers: list[nn.Module] = []
    if draw.random() < 0.6:
        layers += [nn.Linear(inputs, width)]
    layers += [act(), Function(functions[name])]
    if draw.random() < 0.5:
        layers += [nn.LazyLinear(10), ACTIVATIONS[draw.choice(list(ACTIVATIONS))]()]
    return (
        f"ranks {name} {act_name}",
        nn.Sequential(*layers, nn.LazyLinear(3)),
        torch.randn(32, inputs),
    )


def mixer(draw: random.Random) -> tuple[str, nn.Module, Tensor]:
    """Draw an MLP mixer."""
    act_name = draw.choice(list(ACTIVATIONS))
    tokens, channels = draw.choice([4, 9]), draw.choice([6, 10])
    layers = [Mixer(tokens, channels, ACTIVATIONS[act_name]) for _ in range(draw.choice([1, 2]))]
    head = [nn.Flatten(), nn.Linear(tokens * channels, 3)]
    return f"mixer {act_name}", nn.Sequential(*layers, *head), torch.randn(32, tokens, channels)


POOLED_KINDS = {
    "max 3/2": "overlapping max pooling",
    "max 3/1": "overlapping max pooling",
    "max 3/2 ceil": "overlapping max pooling",
    "max 3/2/1 ceil": "overlapping max pooling",
    "max 2": "other max pooling",
    "max adaptive": "other max pooling",
    "avg 3/2": "overlapping average pooling",
    "avg 3/1": "overlapping average pooling",
    "avg 2": "other average pooling",
}
OTHER_KINDS = {
    "conv": "convolutions without pooling",
    "mlp": "MLPs",
    "ranks": "sorting",
    "mixer": "mixers",
}


def kind_of(name: str) -> str:
    """Return the kind of a network with a name."""
    first, *words = name.split()
    if first == "conv" and "pool" in words:
        pool = next(pool for pool in sorted(POOLINGS, key=len, reverse=True) if f" {pool} " in name)
        return POOLED_KINDS[pool]
    return OTHER_KINDS[first]


DRAWS = [convolutional] * 6 + [dense, ranked, ranked, mixer]


def network_and_segment(seed: int) -> tuple[str, nn.Module, tuple[Tensor, Tensor]]:
    """Make the network and the segment of a seed."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    name, network, example = draw.choice(DRAWS)(draw)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.5)
    with torch.no_grad():
        network.train()(example)
    network.eval()
    start, end = 1.5 * example[:2]
    kind = draw.choice(["long", "long", "short", "moved"])
    if kind == "short":
        end = torch.lerp(start, end, 0.2)
    if kind == "moved" and start.ndim == 3:
        end = start.roll(1, 2)
        end[:, :, 0] = start[:, :, 0]
    return name, network, (start, end)


def compare(seed: int) -> dict[str, Any]:
    """Trace the segment of a seed exactly, and estimate it."""
    name, network, (start, end) = network_and_segment(seed)
    row: dict[str, Any] = {"seed": seed, "network": name}
    try:
        trace = trace_segment(network, start, end)
        while trace.crossings > MAX_BOUNDARIES:
            end = torch.lerp(start, end, 0.5)
            trace = trace_segment(network, start, end)
    except Exception as error:
        return row | {"failed": f"{type(error).__name__}: {error}"}
    begin = time.process_time()
    estimate = estimate_segment(network, start, end, tolerance=1e-3)
    seconds = time.process_time() - begin
    exact = absolute_deviation(trace)
    off = torch.linalg.vector_norm(absolute_deviation(estimate) - exact)
    stated = torch.linalg.vector_norm(estimate.length * estimate.deviation_error)
    return row | {
        "exact": trace.crossings,
        "at_least": estimate.at_least,
        "estimate": round(estimate.crossings, 2),
        "error": round(estimate.error, 2),
        "converged": estimate.converged,
        "evaluations": estimate.evaluations,
        "deviation_off": float(off),
        "deviation_error": float(stated),
        "seconds": seconds,
    }


def faults(row: dict[str, Any]) -> list[str]:
    """Return the violated bounds of an estimate."""
    if "failed" in row:
        return ["failed"]
    slack = 0.01  # The error is rounded.
    checks = {
        "bound": row["at_least"] > row["exact"],
        "crossings": abs(row["estimate"] - row["exact"]) > row["error"] + slack,
        "deviation": row["deviation_off"] > row["deviation_error"],
    }
    return [name for name, is_wrong in checks.items() if is_wrong]


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Count the estimates that do not hold, and compute the bias of the crossings."""
    outside = sum("crossings" in row["faults"] for row in rows)
    off = sum(row["estimate"] - row["exact"] for row in rows)
    stated = sum(row["error"] for row in rows)
    return {
        "networks": len(rows),
        "within the error, %": round(100 * (1 - outside / max(1, len(rows))), 1),
        "bias, in mean errors": round(off / stated, 3) if stated else 0.0,
        "bound above exact": sum("bound" in row["faults"] for row in rows),
        "crossings outside the error": outside,
        "deviation outside the error": sum("deviation" in row["faults"] for row in rows),
        "without an error": sum(row["error"] == 0 for row in rows),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", type=int, default=300)
    parser.add_argument("--seed", type=int, default=30_000, help="seed of the first network")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    for seed in range(arguments.seed, arguments.seed + arguments.networks):
        row = compare(seed)
        row["faults"] = faults(row)
        rows.append(row)
        if row["faults"]:
            print(json.dumps(row), flush=True)
    compared = [row for row in rows if "failed" not in row]
    table = {}
    for kind in dict.fromkeys([*POOLED_KINDS.values(), *OTHER_KINDS.values()]):
        table[kind] = summary([row for row in compared if kind_of(row["network"]) == kind])
    table["all"] = summary(compared)
    print(json.dumps(table, indent=1))
    content = {
        "seed": arguments.seed,
        "failed": len(rows) - len(compared),
        "table": table,
        "faulty": [row for row in rows if row["faults"]],
    }
    arguments.output.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
