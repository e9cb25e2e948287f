"""Compare the time of small jobs with that of other packages, in pairs within one process.

Prints a table and writes it as JSON next to this file. A ratio is the processor time of the other
package divided by that of nlbench, the median over alternating runs: above 1, nlbench is faster.
For networks, the other side is the bare forward pass, and the ratio is nlbench's time divided by
its time.

``pip install nlbench[bench]`` installs the packages that are on PyPI. Code that is only on GitHub
is read from folders of the repositories' names in the folder ``--peers``: AffScoreDeep (qbouniot),
linear-regions (magamba) and nas-without-training (BayesWatch). Rows of a missing package stay
empty.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fnmatch
import importlib
import importlib.metadata
import itertools
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

import nlbench
from nlbench.measures.affinity import affinity_score
from nlbench.measures.cka import linear_cka
from nlbench.measures.naswot import naswot_score, pattern_kernel
from nlbench.measures.r2 import r2_score
from nlbench.probes.lines import trace_segment, trace_segments

PYPI = {"ckatorch": "ckatorch", "regioncam": "regioncam", "scikit-learn": "sklearn"}
GITHUB = {
    "AffScoreDeep": ("src", "aff_core"),
    "linear-regions": ("", "core.module_counter"),
    "nas-without-training": ("", "scores"),
}

# The idle threads of a BLAS keep their core busy for a while.
PAUSE_SECONDS = 0.3
# A side is repeated until its measurement takes this long.
MIN_SECONDS = 0.05


class Missing(Exception):
    """A package that is not installed."""


@dataclass(frozen=True)
class Pair:
    """The two sides of a comparison.

    Parameters
    ----------
    ours, theirs : callable
        Return a value that both have to agree on within `tolerance`, or None.
    """

    ours: Callable[[], float | None]
    theirs: Callable[[], float | None]
    tolerance: float = 0.0


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Parameters
    ----------
    goal : float
        Smallest ratio to reach; for ``forward pass``, the largest.
    """

    work: str
    peer: str
    goal: float
    pair: Callable[[Peers], Pair]
    repeats: int = 7

    @property
    def is_overhead(self) -> bool:
        """True if the other side is a part of our own work."""
        return self.peer == "forward pass"


@dataclass(frozen=True)
class Timing:
    """Processor seconds of both sides, medians."""

    threads: int
    ratio: float
    ours: float
    theirs: float


class Peers:
    """The other packages, imported when they are first used."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def load(self, name: str) -> ModuleType:
        """Import a package, or raise `Missing`."""
        if name in PYPI:
            try:
                return importlib.import_module(PYPI[name])
            except ImportError:
                raise Missing(f"{name} is not installed: pip install nlbench[bench]") from None
        place, module = GITHUB[name]
        if self._folder is None:
            raise Missing(f"{name} is only on GitHub: name the folder that holds it by --peers")
        root = self._folder / name
        if not root.is_dir():
            raise Missing(f"{name} is not in {self._folder}")
        sys.path.insert(0, str(root / place))
        try:
            return importlib.import_module(module)
        except ImportError as error:
            raise Missing(f"{name} can't be imported: {error}") from error
        finally:
            sys.path.pop(0)


# --- Values of tensors


def gaussian(n: int, d: int) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(n + d))


def mixed(n: int, d: int) -> tuple[Tensor, Tensor]:
    x = gaussian(n, d) @ gaussian(d, d) / math.sqrt(d)
    return x, x.relu()


def affinity(name: str, n: int, d: int) -> Callable[[Peers], Pair]:
    activations = {"relu": torch.relu, "abs": torch.abs, "sin 3x": lambda x: torch.sin(3 * x)}

    def pair(peers: Peers) -> Pair:
        published = peers.load("AffScoreDeep").rho_aff
        x = gaussian(n, d)
        y = activations[name](x)
        return Pair(
            lambda: affinity_score(x, y).item(),
            lambda: published(x.T, y.T, correctCov=True, device="cpu"),
            1e-4,
        )

    return pair


def cka(n: int, d: int) -> Callable[[Peers], Pair]:
    def pair(peers: Peers) -> Pair:
        published = peers.load("ckatorch").cka_base
        x, y = (values.double() for values in mixed(n, d))
        return Pair(lambda: linear_cka(x, y).item(), lambda: published(x, y).item(), 1e-9)

    return pair


def r2(n: int, d: int) -> Callable[[Peers], Pair]:
    def pair(peers: Peers) -> Pair:
        peers.load("scikit-learn")
        linear_model = importlib.import_module("sklearn.linear_model")
        x, y = mixed(n, d)
        before, after = x.numpy(), y.numpy()

        def theirs() -> float:
            return float(linear_model.LinearRegression().fit(before, after).score(before, after))

        return Pair(lambda: r2_score(x, y).item(), theirs, 1e-4)

    return pair


def naswot(n: int, widths: tuple[int, ...]) -> Callable[[Peers], Pair]:
    def pair(peers: Peers) -> Pair:
        log_determinant = peers.load("nas-without-training").get_score_func("hook_logdet")
        layers = [gaussian(n, width) for width in widths]

        def theirs() -> float:
            # Their kernel is written inside the script that scores networks.
            kernel = np.zeros((n, n))
            for layer in layers:
                on = (layer > 0).float()
                kernel += (on @ on.T).numpy() + ((1 - on) @ (1 - on).T).numpy()
            return float(log_determinant(kernel))

        def ours() -> float:
            return naswot_score(sum(map(pattern_kernel, layers), torch.zeros(n, n))).item()

        return Pair(ours, theirs, 1e-6)

    return pair


# --- Networks


def norm_of_resnet18(*shape: int, errors: str) -> Callable[[Peers], Pair]:
    def pair(peers: Peers) -> Pair:
        torchvision = importlib.import_module("torchvision")
        model = torchvision.models.resnet18().eval()
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))

        def forward() -> None:
            with torch.no_grad():
                model(x)

        return Pair(lambda: evaluate_norm(model, x, errors), forward)

    return pair


def evaluate_norm(model: nn.Module, x: Tensor, errors: str) -> None:
    nlbench.evaluate(model, x, ["norm"], errors=errors)


def perceptron(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double().requires_grad_(False)


def segments(network: nn.Sequential, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = network[0].in_features
    ends = torch.randn(2, number, inputs, generator=generator, dtype=torch.float64)
    return ends[0], ends[1]


def lines_of_regioncam(number: int, *widths: int) -> Callable[[Peers], Pair]:
    def pair(peers: Peers) -> Pair:
        regioncam = peers.load("regioncam")
        network = perceptron(*widths)
        starts, ends = segments(network, number)
        layers = [
            (layer.weight.float().T.contiguous().numpy(), layer.bias.float().numpy())
            for layer in network
            if isinstance(layer, nn.Linear)
        ]

        def theirs() -> None:
            for start, end in zip(starts.float(), ends.float(), strict=True):
                # `through_points` covers only a part of the segment, so the line is a layer.
                line = regioncam.Regioncam1D(1.0)
                line.linear((end - start)[None].numpy(), ((start + end) / 2).numpy())
                for index, (weight, bias) in enumerate(layers):
                    if index:
                        line.relu()
                    line.linear(weight, bias)

        return Pair(lambda: trace_all(network, starts, ends), theirs)

    return pair


def trace_all(network: nn.Module, starts: Tensor, ends: Tensor) -> None:
    if len(starts) == 1:
        trace_segment(network, starts[0], ends[0])
    else:
        list(trace_segments(network, starts, ends))


def lines_of_linear_regions(number: int, *widths: int) -> Callable[[Peers], Pair]:
    def pair(peers: Peers) -> Pair:
        counter = peers.load("linear-regions").ModuleCounter
        network = perceptron(*widths)
        starts, ends = segments(network, number)
        # It wraps the layers of the network that it is given.
        with default_float64():
            counted = counter(
                perceptron(*widths), input_shape=(widths[0],), batch_size=number, buff_size=2000
            )

        def theirs() -> None:
            with default_float64():
                counted.count(starts.clone(), ends.clone())

        return Pair(lambda: trace_all(network, starts, ends), theirs)

    return pair


@contextlib.contextmanager
def default_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


ROWS = (
    Row("affinity, relu 1024×4", "AffScoreDeep", 1.2, affinity("relu", 1024, 4)),
    Row("affinity, abs 1024×8", "AffScoreDeep", 1.2, affinity("abs", 1024, 8)),
    Row("affinity, abs 2048×64", "AffScoreDeep", 1.2, affinity("abs", 2048, 64), 3),
    Row("affinity, sin 3x 1024×16", "AffScoreDeep", 1.2, affinity("sin 3x", 1024, 16)),
    Row("linear_cka 128×512", "ckatorch", 1.2, cka(128, 512)),
    Row("linear_cka 256×1024", "ckatorch", 1.2, cka(256, 1024)),
    Row("linear_cka 512×2048", "ckatorch", 1.2, cka(512, 2048)),
    Row("r2_score 1024×64", "scikit-learn", 1.2, r2(1024, 64)),
    Row("r2_score 2048×256", "scikit-learn", 1.2, r2(2048, 256)),
    Row("r2_score 2048×512", "scikit-learn", 1.2, r2(2048, 512)),
    Row("naswot 128, 3 × 4096", "nas-without-training", 0.8, naswot(128, (4096,) * 3)),
    Row("naswot 128, 9 × 65536", "nas-without-training", 0.8, naswot(128, (65536,) * 9), 3),
    Row("lines, 8-32-32-3, 1 segment", "regioncam", 0.5, lines_of_regioncam(1, 8, 32, 32, 3)),
    Row("lines, 8-64-64-64-3, 1", "regioncam", 0.5, lines_of_regioncam(1, 8, 64, 64, 64, 3)),
    Row("lines, 8-256-256-256-3, 1", "regioncam", 0.5, lines_of_regioncam(1, 8, 256, 256, 256, 3)),
    Row("lines, 784-1000-1000-10, 1", "regioncam", 0.5, lines_of_regioncam(1, 784, 1000, 1000, 10)),
    Row("lines, 8-32-32-3, 100", "regioncam", 2.0, lines_of_regioncam(100, 8, 32, 32, 3), 3),
    Row("lines, 8-64-64-64-3, 100", "regioncam", 2.0, lines_of_regioncam(100, 8, 64, 64, 64, 3), 3),
    Row("lines, 8-32-32-3, 32", "linear-regions", 3.0, lines_of_linear_regions(32, 8, 32, 32, 3)),
    Row(
        "lines, 8-64-64-64-3, 32",
        "linear-regions",
        3.0,
        lines_of_linear_regions(32, 8, 64, 64, 64, 3),
        3,
    ),
    Row(
        "evaluate norm, 8×3×64×64",
        "forward pass",
        1.3,
        norm_of_resnet18(8, 3, 64, 64, errors="groups"),
    ),
    Row(
        "evaluate norm, 32×3×64×64",
        "forward pass",
        1.3,
        norm_of_resnet18(32, 3, 64, 64, errors="groups"),
    ),
    Row(
        "evaluate norm, 8×3×224×224",
        "forward pass",
        1.3,
        norm_of_resnet18(8, 3, 224, 224, errors="groups"),
        5,
    ),
    Row(
        "evaluate norm, 32×3×224×224",
        "forward pass",
        1.3,
        norm_of_resnet18(32, 3, 224, 224, errors="groups"),
        5,
    ),
)
"""The rows in the order of the table."""


def seconds_of(compute: Callable[[], object], calls: int) -> float:
    time.sleep(PAUSE_SECONDS)
    start = time.process_time()
    for _ in range(calls):
        compute()
    return (time.process_time() - start) / calls


def calls_for(compute: Callable[[], object]) -> int:
    start = time.perf_counter()
    compute()
    return max(1, round(MIN_SECONDS / max(time.perf_counter() - start, 1e-6)))


def compare(row: Row, peers: Peers, threads: int, repeats: int) -> Timing:
    pair = row.pair(peers)
    values = pair.ours(), pair.theirs()
    if pair.tolerance and not abs(values[0] - values[1]) <= pair.tolerance:  # type: ignore[operator]
        raise SystemExit(f"{row.work}: {values[0]} differs from {values[1]} of {row.peer}")
    calls = calls_for(pair.ours), calls_for(pair.theirs)
    ours, theirs = [], []
    for _ in range(repeats):
        ours.append(seconds_of(pair.ours, calls[0]))
        theirs.append(seconds_of(pair.theirs, calls[1]))
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    ratio = statistics.median(ratios)
    if row.is_overhead:
        ratio = 1 / ratio
    medians = [float(f"{statistics.median(side):.4g}") for side in (ours, theirs)]
    return Timing(threads, round(ratio, 3), *medians)


# --- The main job


def main_job(repeats: int) -> dict[str, float]:
    """Run the main job in new processes.

    Return the medians of processor and clock time.
    """
    script = Path(sys.executable).with_name("nlbench")
    arguments = ["run", "--measures", "affinity,absdev", "--model", "vgg8", "--progress", "none"]
    times: list[tuple[float, float]] = []
    for _ in range(repeats + 1):
        with tempfile.TemporaryDirectory() as folder:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            start = time.perf_counter()
            subprocess.run(
                [script, *arguments, "--out", folder + "/run"], check=True, capture_output=True
            )
            clock = time.perf_counter() - start
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        times.append((used, clock))
    # The first run only warms the system's cache of files.
    used, clock = (statistics.median(column) for column in zip(*times[1:], strict=True))
    return {"processor_seconds": round(used, 2), "seconds": round(clock, 2)}


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in ("torch", "numpy", "scipy", "pot", *PYPI):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commits(folder: Path | None) -> Iterator[tuple[str, str]]:
    """Yield the commits of the repositories in a folder, where git knows them."""
    for name in GITHUB if folder else ():
        root = folder / name  # type: ignore[operator]
        if (root / ".git").exists():
            command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
            yield name, subprocess.run(command, capture_output=True, text=True).stdout.strip()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=Path, help="folder of the repositories from GitHub")
    parser.add_argument("--threads", default="1,2", help="numbers of threads (default: 1,2)")
    parser.add_argument("--rows", default="*", help="glob of the rows to measure, such as 'lines*'")
    parser.add_argument("--repeats", type=int, help="pairs of runs of each row and the main job")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    warnings.simplefilter("ignore")
    peers, threads = Peers(options.peers), [int(n) for n in options.threads.split(",")]
    missing: dict[str, None] = {}
    rows = []
    print(f"{'work':<30} {'peer':<22} {'goal':>5}" + "".join(f"{n:>3} thread(s)" for n in threads))
    for row in ROWS:
        if not fnmatch.fnmatch(row.work, options.rows):
            continue
        timings: list[Timing] = []
        for number in threads:
            torch.set_num_threads(number)
            try:
                with threadpool_limits(number):
                    timings.append(compare(row, peers, number, options.repeats or row.repeats))
            except Missing as error:
                missing.setdefault(str(error))
        cells = "".join(f"{timing.ratio:>12.2f}" for timing in timings)
        print(f"{row.work:<30} {row.peer:<22} {row.goal:>5}{cells}", flush=True)
        rows.append(
            {
                "work": row.work,
                "peer": row.peer,
                "goal": row.goal,
                "timings": [asdict(timing) for timing in timings],
            }
        )
    result = {
        "date": datetime.date.today().isoformat(),
        "versions": versions() | dict(commits(options.peers)),
        "rows": rows,
    }
    if fnmatch.fnmatch("main job", options.rows):
        result["main job"] = main_job(options.repeats or 3)
        print("main job, seconds of processor and clock:", *result["main job"].values())
    for line in missing:
        print(line, file=sys.stderr)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
