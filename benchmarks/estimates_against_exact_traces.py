"""Compare estimates of boundaries and deviation with exact traces of the same segments.

The segments are long, short and translated. The networks are small ones of every supported kind,
random and trained, the shipped VGG8, and initialised residual networks. For each segment, checks if
the lower bound and the stated error hold, and computes the error of the estimate.

Prints a table and writes ``estimates_against_exact_traces.json`` and ``.png`` next to this file.
The JSON is written after each segment, so that an interrupted comparison resumes (``--again``
starts over).

    python benchmarks/estimates_against_exact_traces.py [--segments N] [--seed N] [--threads N]
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from nlbench.measures.absdev import absolute_deviation
from nlbench.probes.lines import estimate_segment, trace_segment
from nlbench.probes.lines.paths import closed_paths
from nlbench.subjects.load import load_dataset, load_subject
from nlbench.subjects.spec import SubjectSpec

mpl.use("Agg")
from matplotlib import pyplot as plt

SHAPE = (3, 16, 16)


def small(
    seed: int,
    act: Callable[[], nn.Module] = nn.ReLU,
    pool: Callable[[], nn.Module] = lambda: nn.AvgPool2d(2),
    groups: int = 1,
    norm: bool = True,
) -> nn.Module:
    torch.manual_seed(seed)
    width = 16
    layers = [
        *(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width) if norm else nn.Identity()),
        *(act(), pool(), nn.Conv2d(width, 2 * width, 3, padding=1, groups=groups)),
        *(nn.BatchNorm2d(2 * width) if norm else nn.Identity(), act(), pool(), nn.Flatten()),
        *(nn.LazyLinear(64), act(), nn.Linear(64, 10)),
    ]
    network = nn.Sequential(*layers).eval()
    network(torch.zeros(1, *SHAPE))
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return network


def dense(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    widths = [768, 256, 256, 256, 10]
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def trained(network: nn.Module) -> nn.Module:
    """Train a small network on the digits to a training accuracy of about 99 %."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    images = functional.interpolate(images, SHAPE[1:], mode="bilinear").expand(-1, *SHAPE)
    labels = torch.tensor(data.target)
    network.train()
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        for batch in torch.randperm(len(labels), generator=generator).split(64):
            optimizer.zero_grad()
            functional.cross_entropy(network(images[batch]), labels[batch]).backward()
            optimizer.step()
    return network.eval()


SMALL = {
    "dense": lambda: dense(0),
    "batch norm": lambda: small(1),
    "no batch norm": lambda: small(2, norm=False),
    "grouped": lambda: small(3, groups=4),
    "leaky": lambda: small(4, nn.LeakyReLU),
    "PReLU": lambda: small(5, nn.PReLU),
    "ReLU6": lambda: small(6, nn.ReLU6),
    "hardtanh": lambda: small(7, nn.Hardtanh),
    "max pooling": lambda: small(8, pool=lambda: nn.MaxPool2d(2)),
    "overlapping max pooling": lambda: small(9, pool=lambda: nn.MaxPool2d(3, 2, 1)),
    "adaptive max pooling": lambda: small(10, pool=lambda: nn.AdaptiveMaxPool2d(5)),
    "dense, trained": lambda: trained(dense(11)),
    "batch norm, trained": lambda: trained(small(12)),
    "max pooling, trained": lambda: trained(small(13, pool=lambda: nn.MaxPool2d(2))),
}
NAMED = {
    "vgg8, trained": ("vgg8", "trained", "digits", 1.0),
    "vgg8, initialised": ("vgg8", "init", "digits", 1.0),
    "vgg8, synthetic": ("vgg8", "init", "synthetic", 1.0),
    "resnet18-w4": ("resnet18-w4", "init", "digits", 1.0),
    "resnet18-w8": ("resnet18-w8", "init", "synthetic", 0.5),
    "resnet18-w16": ("resnet18-w16", "init", "digits", 0.15),
    "resnet20": ("resnet20", "init", "digits", 0.1),
}
"""Model, weights, dataset, and share of a segment for which exact traces take little time."""


def segments(count: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield segments: a third long, a third a quarter as long, a third from shifts of an image."""
    generator = torch.Generator().manual_seed(seed)
    for i in range(count):
        start, end = torch.randn(2, *SHAPE, generator=generator)
        if i % 3 == 1:
            end = torch.lerp(start, end, 0.25)
        if i % 3 == 2:
            end = start.roll(1, 2)
            end[:, :, 0] = start[:, :, 0]
        yield start, end


def named(name: str, count: int, seed: int) -> tuple[nn.Module, Iterator[tuple[Tensor, Tensor]]]:
    """Return a network and segments between images of a dataset."""
    model, weights, data_name, share = NAMED[name]
    spec = SubjectSpec(model, weights, data_name, seed=0, samples=1)
    data = load_dataset(data_name)
    images = data.sample(2 * count, split="test", seed=seed).images
    paths, inputs = data.normalize(closed_paths(images)), data.normalize(images)

    def ends() -> Iterator[tuple[Tensor, Tensor]]:
        for i in range(count):
            start, end = inputs[i], torch.lerp(inputs[i], inputs[count + i], share)
            if i % 3 == 1:
                end = torch.lerp(start, end, 0.25)
            if i % 3 == 2:
                start = paths[i, i % 8]
                end = torch.lerp(start, paths[i, i % 8 + 1], share)
            yield start, end

    return load_subject(spec, torch.device("cpu")).model, ends()


def compare(name: str, network: nn.Module, start: Tensor, end: Tensor) -> dict[str, Any]:
    begin = time.perf_counter()
    trace = trace_segment(network, start, end)
    middle = time.perf_counter()
    estimate = estimate_segment(network, start, end, tolerance=1e-3)
    stop = time.perf_counter()
    exact = absolute_deviation(trace)
    off = absolute_deviation(estimate) - exact
    stated = estimate.length * estimate.deviation_error
    norm = float(torch.linalg.vector_norm(exact))
    return {
        "network": name,
        "crossings": trace.crossings,
        "at_least": estimate.at_least,
        "estimate": estimate.crossings,
        "error": estimate.error,
        "evaluations": estimate.evaluations,
        "converged": estimate.converged,
        "deviation_off": float(torch.linalg.vector_norm(off)) / norm,
        "deviation_error": float(torch.linalg.vector_norm(stated)) / norm,
        "logits": len(exact),
        "logits_within": int((off.abs() <= stated).sum()),
        "seconds_exact": middle - begin,
        "seconds_estimate": stop - middle,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    off = [abs(row["estimate"] - row["crossings"]) for row in rows]
    return {
        "segments": len(rows),
        "lower bound above exact": sum(row["at_least"] > row["crossings"] for row in rows),
        "crossings within the error": np.mean(
            [o <= row["error"] for o, row in zip(off, rows, strict=True)]
        ),
        "within 0.2 % or one": np.mean(
            [o <= max(1, 0.002 * row["crossings"]) for o, row in zip(off, rows, strict=True)]
        ),
        "deviation within the error": np.mean(
            [row["deviation_off"] <= row["deviation_error"] for row in rows]
        ),
        "logits within the error": sum(row["logits_within"] for row in rows)
        / sum(row["logits"] for row in rows),
        "largest deviation off": max(row["deviation_off"] for row in rows),
        "evaluations": float(np.median([row["evaluations"] for row in rows])),
        "crossings": float(np.median([row["crossings"] for row in rows])),
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    names = list(dict.fromkeys(row["network"] for row in rows))
    for i, name in enumerate(names):
        group = [row for row in rows if row["network"] == name]
        jitter = i + np.linspace(-0.3, 0.3, len(group))
        off = [100 * (r["estimate"] - r["crossings"]) / max(1, r["crossings"]) for r in group]
        bars = [100 * r["error"] / max(1, r["crossings"]) for r in group]
        left.errorbar(jitter, off, bars, fmt=".", markersize=3, linewidth=0.6)
        stated = [r["deviation_error"] for r in group]
        right.loglog(stated, [max(r["deviation_off"], 1e-9) for r in group], ".", markersize=4)
    left.axhspan(-0.2, 0.2, color="0.9", zorder=0)
    left.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
    left.set_ylabel("crossings: estimate - exact, %")
    ends = right.get_xlim()
    right.plot(ends, ends, "k-", linewidth=0.6)
    right.set_xlabel("deviation: stated error, relative")
    right.set_ylabel("true error")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--segments", type=int, default=12, help="segments per small network")
    parser.add_argument("--named", type=int, default=9, help="segments per named network")
    parser.add_argument("--seed", type=int, default=2026, help="seed of the segments")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--again", action="store_true", help="start over")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    target = Path(__file__).with_suffix(".json")
    request = {key: getattr(arguments, key) for key in ("segments", "named", "seed")}
    rows: list[dict[str, Any]] = []
    if target.is_file() and not arguments.again:
        recorded = json.loads(target.read_text("utf-8"))
        rows = recorded["segments"] if recorded.get("asked") == request else []

    def write() -> None:
        table = {
            name: summary([row for row in rows if row["network"] == name])
            for name in dict.fromkeys(row["network"] for row in rows)
        }
        content = {"asked": request, "table": table | {"all": summary(rows)}, "segments": rows}
        target.write_text(json.dumps(content, indent=1) + "\n", "utf-8")

    counts = dict.fromkeys(SMALL, arguments.segments) | dict.fromkeys(NAMED, arguments.named)
    for name, count in counts.items():
        finished = sum(row["network"] == name for row in rows)
        if finished >= count:
            continue
        seed = arguments.seed + zlib.crc32(name.encode())
        if name in SMALL:
            network, ends = SMALL[name](), segments(count, seed)
        else:
            network, ends = named(name, count, seed)
        for start, end in itertools.islice(ends, finished, None):
            rows.append(compare(name, network, start, end))
            write()
        print(name, flush=True)
    write()
    for name, line in json.loads(target.read_text("utf-8"))["table"].items():
        print(f"{name:24}", " ".join(f"{key} {value:.4g}" for key, value in line.items()))
    draw(rows, target.with_suffix(".png"))


if __name__ == "__main__":
    main()
