"""Compare exact traces of small networks with other packages that find regions on a segment.

Each comparison runs both sides alternately in one process, on one thread, and takes the median of
the ratios of their processor times: above 1, nlbench is faster. Both sides have to count as many
regions on every segment, or the numbers of segments on which they differ are in the table.

regioncam (0.5.2, on PyPI) computes in float32, stores all activations at all vertices and takes
sequential networks. Its `through_points` covers the middle three quarters of a segment, so the line
is made a layer here. linear-regions (magamba, on GitHub) steps from region to region in float64,
with a batch of segments, and integrates the absolute deviation.

Prints a table and writes it as JSON next to this file.

    python benchmarks/lines_against_peers.py [--peers FOLDER] [--quick]
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from nlbench.probes.lines import trace_segment, trace_segments

WIDTHS = ((8, 32, 32, 3), (8, 64, 64, 64, 3), (8, 256, 256, 256, 3), (784, 1000, 1000, 10))
MANY_SEGMENTS = 100
MANY_UNITS = 1000
"""Width above which fewer segments are traced."""
LENGTH = 3.0
"""Standard deviation of the inputs at the ends of segments."""
BUFFER = 4000
"""Number of regions that linear-regions reserves memory for."""

Count = Callable[[], Sequence[int]]
"""Traces all segments, and returns the number of regions on each."""


@dataclass(frozen=True)
class Row:
    """One row of the table: milliseconds are medians a segment."""

    network: str
    segments: int
    peer: str
    regions: float
    ratio: float
    nlbench_ms: float
    peer_ms: float
    segments_that_differ: int


def perceptron(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def segments(number: int, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    starts, ends = LENGTH * torch.randn(2, number, width, generator=generator)
    return starts, ends


def regions_of_nlbench(network: nn.Module, starts: Tensor, ends: Tensor) -> list[int]:
    if len(starts) == 1:
        return [trace_segment(network, starts[0], ends[0]).regions]
    return [trace.regions for trace in trace_segments(network, starts, ends)]


def regions_of_regioncam(
    regioncam: ModuleType, network: nn.Sequential, starts: Tensor, ends: Tensor
) -> list[int]:
    layers = [
        (layer.weight.detach().T.contiguous().numpy(), layer.bias.detach().numpy())
        for layer in network
        if isinstance(layer, nn.Linear)
    ]
    counts = []
    for start, end in zip(starts, ends, strict=True):
        line = regioncam.Regioncam1D(1.0)  # From -1/2 to 1/2.
        line.linear((end - start)[None].numpy(), ((start + end) / 2).numpy())
        for index, (weight, bias) in enumerate(layers):
            if index:
                line.relu()
            line.linear(weight, bias)
        counts.append(line.num_edges)
    return counts


def regions_of_linear_regions(counter: object, starts: Tensor, ends: Tensor) -> list[int]:
    with default_float64():
        results = counter.count(starts.double(), ends.double())  # type: ignore[attr-defined]
    return [int(boundaries) + 1 for boundaries in results[2]]


def linear_regions_counter(package: ModuleType, widths: Sequence[int], number: int) -> object:
    # It wraps the layers of the network, and reserves memory for all regions at each call.
    network = perceptron(*widths).double()
    with default_float64():
        counter: object = package.ModuleCounter(
            network, input_shape=(widths[0],), batch_size=number, buff_size=BUFFER
        )
    return counter


@contextmanager
def default_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def load(name: str, folder: Path | None = None) -> ModuleType | None:
    """Import a package, from a folder if one is given.

    Return None if it is missing.
    """
    if folder is not None:
        sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    except ImportError as error:
        print(f"{name} is missing: {error}")
        return None


def compare(ours: Count, theirs: Count, repeats: int) -> tuple[float, float, float, list[int], int]:
    """Return the ratio, both times, our regions, and the number of segments that differ."""
    counts = ours(), theirs()
    seconds: list[tuple[float, float]] = []
    for _ in range(repeats):
        times = []
        for side in (ours, theirs):
            begin = time.process_time()
            side()
            times.append(time.process_time() - begin)
        seconds.append((times[0], times[1]))
    ratio = statistics.median(their / our for our, their in seconds)
    own, other = (statistics.median(side) for side in zip(*seconds, strict=True))
    differ = sum(a != b for a, b in zip(*counts, strict=True))
    return ratio, own, other, list(counts[0]), differ


def rows(peers: Path | None, repeats: int) -> list[Row]:
    """Compare one segment, and many, of each network with each peer."""
    result = []
    regioncam = load("regioncam")
    linear_regions = load("core.module_counter", peers / "linear-regions") if peers else None
    for widths in WIDTHS:
        many = MANY_SEGMENTS if max(widths) < MANY_UNITS else MANY_SEGMENTS // 20
        network, name = perceptron(*widths), "-".join(map(str, widths))
        for number in (1, many):
            starts, ends = segments(number, widths[0])
            sides: dict[str, Count] = {}
            if regioncam is not None:
                sides["regioncam"] = lambda n=network, a=starts, b=ends: regions_of_regioncam(
                    regioncam, n, a, b
                )
            if linear_regions is not None and max(widths) < MANY_UNITS:
                counter = linear_regions_counter(linear_regions, widths, number)
                sides["linear-regions"] = lambda c=counter, a=starts, b=ends: (
                    regions_of_linear_regions(c, a, b)
                )
            for peer, theirs in sides.items():
                ratio, own, other, counts, differ = compare(
                    lambda n=network, a=starts, b=ends: regions_of_nlbench(n, a, b), theirs, repeats
                )
                row = Row(
                    name,
                    number,
                    peer,
                    sum(counts) / number,
                    ratio,
                    1e3 * own / number,
                    1e3 * other / number,
                    differ,
                )
                print(
                    f"{row.network:20}{row.segments:5}  {row.peer:16}{row.regions:8.1f}"
                    f"{row.ratio:8.3f}{row.nlbench_ms:9.3f}{row.peer_ms:9.3f}"
                    f"{row.segments_that_differ:4}",
                    flush=True,
                )
                result.append(row)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, help="folder with the code that is on GitHub")
    parser.add_argument("--quick", action="store_true", help="three repeats, nothing is written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("network          segments  peer             regions   ratio  nlbench     peer  differ")
    table = rows(arguments.peers, 3 if arguments.quick else 7)
    if not arguments.quick:
        target = Path(__file__).with_suffix(".json")
        target.write_text(json.dumps([asdict(row) for row in table], indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
