"""Say in ten minutes whether nlbench is right on a GPU, and what it costs there.

``make gpu`` runs all of it. Each part runs in a process of its own, so that one that fails,
hangs or takes the GPU down with it is a line in the table, and the others go on; what it had found
by then is kept. What has been found is on the disk after every part, as ``gpu.json`` and as the
table ``gpu.md`` beside this file, also when the minutes are spent or Ctrl-C ends it. Ratios are
what counts: each compares two things measured in turn in this run.

Without a GPU ``--quick --device cpu`` runs the same parts on small networks, and ``--quick
--device pretended`` on a CUDA device that is pretended; they are written where ``--out`` says.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import itertools
import json
import math
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from safetensors.torch import load_file
from torch import Tensor, nn

import nlbench
from nlbench.execution.machine import describe_environment
from nlbench.introspection.precision import exact_arithmetic
from nlbench.measures.transport.gaussian_map import optimal_map
from nlbench.probes.lines import observe_paths, trace_segments

SITE_MEASURES = ("affinity", "r2", "cka", "norm", "sparsity", "entropy")
MINUTES = 10.0
TESTS = Path(__file__).parent.parent / "tests"
sys.path.insert(0, str(TESTS / "support"))

from pretend_cuda import PretendCuda

Found = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """Where the parts run, and how large.

    Parameters
    ----------
    device : str
        ``cuda:N``, ``cpu``, or ``pretended``.
    quick : bool
        Whether small networks stand for large ones.
    pretended : PretendCuda, optional
        While it is entered.
    """

    device: str
    quick: bool
    pretended: PretendCuda | None = None

    @property
    def torch_device(self) -> torch.device:
        """The device that tensors are on."""
        return torch.device("cuda:0" if self.device == "pretended" else self.device)

    @property
    def pixels(self) -> int:
        """Edge of ImageNet's images."""
        return 32 if self.quick else 224

    def network(self) -> nn.Module:
        """One for what is asked many times; the same weights at each call."""
        torch.manual_seed(0)
        if self.quick:
            layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10)
            return nn.Sequential(*layers).eval().to(self.torch_device)
        return torchvision.models.resnet18(weights=None).eval().to(self.torch_device)

    def large(self) -> nn.Module:
        """One of the size of ImageNet's."""
        torch.manual_seed(0)
        if self.quick:
            layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.ReLU()
            layers = (*layers, nn.Flatten(), nn.Linear(8 * 14 * 14, 10))
            return nn.Sequential(*layers).eval().to(self.torch_device)
        return torchvision.models.resnet50(weights=None).eval().to(self.torch_device)

    @property
    def small(self) -> Tensor:
        """Images for what is asked many times; the same at each call."""
        count, edge = (16, 16) if self.quick else (64, 64)
        random = torch.Generator().manual_seed(1)
        return torch.randn(count, 3, edge, edge, generator=random).to(self.torch_device)

    @property
    def batch(self) -> int:
        """Samples a batch."""
        return 8 if self.quick else 128

    def command(self, *arguments: str) -> list[str]:
        """The command line of nlbench on this device."""
        given = [*arguments, "--device", str(self.torch_device)]
        if self.pretended is not None:
            return [sys.executable, __file__, "--pretended", *given]
        return [sys.executable, "-m", "nlbench.cli.app", *given]

    def wait(self) -> None:
        """Wait until the device has done what it was given."""
        if self.torch_device.type == "cuda":
            torch.cuda.synchronize(self.torch_device)

    def seconds(self, call: Callable[[], object], repeats: int = 3) -> float:
        """Give the median of some runs, after one that warms up."""
        call()
        taken = []
        for _ in range(1 if self.quick else repeats):
            self.wait()
            begin = time.perf_counter()
            call()
            self.wait()
            taken.append(time.perf_counter() - begin)
        return statistics.median(taken)

    def waits(self, call: Callable[[], object]) -> int:
        """Count how often a call makes the host wait for the device."""
        if self.pretended is not None:
            self.pretended.reset()
            call()
            return self.pretended.waits.total()
        if self.torch_device.type != "cuda":
            call()
            return 0
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(warning.message) for warning in said)

    def driver_calls(self, call: Callable[[], object]) -> Found:
        """Count what a call has CUDA do: kernels, copies and waits, by PyTorch's profiler."""
        if self.pretended is not None:
            self.pretended.reset()
            call()
            return {"kernels": self.pretended.kernels.total(), **self.pretended.waits}
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self.torch_device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=kinds) as profile:
            call()
        counts = {event.key: event.count for event in profile.key_averages()}
        wanted = ("Synchronize", "LaunchKernel", "Memcpy")
        return {
            key: counts[key]
            for key in sorted(counts)
            if key.startswith("cu") and any(word in key for word in wanted)
        }


# Each part yields what it has found, piece by piece: what one that is cut short has found is kept.


def machine(setting: Setting) -> Iterator[Found]:
    """What the numbers are made on, and what a record says of it."""
    yield {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "cores": os.cpu_count(),
    }
    if setting.torch_device.type == "cuda":
        properties = torch.cuda.get_device_properties(setting.torch_device)
        yield {"gpu": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
    with exact_arithmetic():
        facts = describe_environment(setting.torch_device)
    named = ("device_name", "capability", "driver", "cudnn", "cuda", "float32", "tf32", "emulation")
    yield {"recorded": {name: facts.get(name) for name in named}}


def tests(setting: Setting) -> Iterator[Found]:
    """Those marked ``gpu``."""
    files = [path for path in TESTS.rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8")]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    environment = {**os.environ, "OMP_NUM_THREADS": "4"}
    done = subprocess.run(
        [*command, *map(str, sorted(files))],
        capture_output=True,
        text=True,
        env=environment,
        cwd=TESTS.parent,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    wrong = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    yield {"status": done.returncode, "summary": lines[-1] if lines else "", "wrong": wrong}
    if done.returncode:
        raise RuntimeError(
            f"{len(wrong)} tests failed: {lines[-1] if lines else done.stderr[-200:]}"
        )


@contextlib.contextmanager
def older_flags(matmul: bool, cudnn: bool, precision: str) -> Iterator[None]:
    """Have TF32 by some of the older settings."""
    before = (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.get_float32_matmul_precision(),
    )
    torch.set_float32_matmul_precision(precision)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[2])
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before[:2]


def older() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


NEWER_FLAGS = tuple(
    (name, partial(getattr, owner, "fp32_precision"), partial(setattr, owner, "fp32_precision"))
    for name, owner in (
        ("all", torch.backends),
        ("matmul", torch.backends.cuda.matmul),
        ("conv", getattr(torch.backends.cudnn, "conv", None)),
        ("rnn", getattr(torch.backends.cudnn, "rnn", None)),
    )
)
NEWER = tuple(
    names
    for count in range(5)
    for names in itertools.combinations(("all", "matmul", "conv", "rnn"), count)
)


@contextlib.contextmanager
def newer_flags(settings: tuple[str, ...]) -> Iterator[None]:
    """Have TF32 by some of the newer settings."""
    chosen = [(read, write) for name, read, write in NEWER_FLAGS if name in settings]
    before = [read() for read, _ in chosen]
    for _, write in chosen:
        write("tf32")
    try:
        yield
    finally:
        for (_, write), value in zip(chosen, before, strict=True):
            write(value)


def tf32(setting: Setting) -> Iterator[Found]:
    """The numbers are the same whatever flags a user has set, and the flags stay."""
    model, inputs = setting.network(), setting.small
    found: dict[str, list[float]] = {}
    kept: dict[str, bool] = {}

    def look(name: str, settings: Callable[[], object]) -> None:
        asked = settings()
        run = nlbench.evaluate(model, inputs, ["norm", "nlc"])
        found[name] = [run[measure].summary["value"] for measure in ("norm", "nlc")]
        kept[name] = asked == settings()

    def told() -> Found:
        values = list(found.values())
        pairs = ((a, b) for one in values for a, b in zip(one, values[0], strict=True))
        return {
            "settings": len(found),
            "largest_difference": max(abs(a / b - 1) for a, b in pairs),
            "not_kept": [name for name, same in kept.items() if not same],
        }

    # First the newer ones: the older change what convolutions inherit, for good.
    chosen = NEWER[:: 5 if setting.quick else 1]
    for settings in chosen if hasattr(torch.backends, "fp32_precision") else ():
        with newer_flags(settings):
            look("new: " + " ".join(settings), lambda: [read() for _, read, _ in NEWER_FLAGS])
    yield told() if found else {}
    precisions = ("highest", "high", "medium")
    for matmul, cudnn, precision in itertools.product((False, True), (False, True), precisions):
        if setting.quick and (matmul, cudnn) != (True, True):
            continue
        with older_flags(matmul, cudnn, precision):
            look(f"old: {matmul} {cudnn} {precision}", older)
    yield told()
    # Whether there was anything to be turned off.
    with torch.no_grad():
        with older_flags(True, True, "high"):
            short = model(inputs)
        with exact_arithmetic():
            whole = model(inputs)
    yield {"tf32_would_change_outputs_by": float(((short - whole).norm() / whole.norm()).cpu())}
    if not all(kept.values()) or told()["largest_difference"] > 0:
        raise RuntimeError("numbers or flags changed with TF32's flags")


def polar_factor(matrix: Tensor, least: float = 1e-16) -> Tensor:
    """Orthogonal factor U of A = U H, H positive semidefinite, by QDWH.

    The dynamically weighted Halley iteration: at most six steps of QR factors, or of Cholesky's
    once the matrix is well conditioned, and products.

    Parameters
    ----------
    matrix : tensor of shape (..., n, n)
        Floating; each of full rank.
    least : float
        At most the ratio of the smallest singular value to Frobenius' norm.

    References
    ----------
    Y. Nakatsukasa, N. J. Higham, "Stable and Efficient Spectral Divide and Conquer Algorithms for
    the Symmetric Eigenvalue Decomposition and the SVD", SIAM J. Sci. Comput. 35(3), 2013.
    """
    x = matrix / torch.linalg.matrix_norm(matrix)[..., None, None]
    identity = torch.eye(matrix.shape[-1], dtype=x.dtype, device=x.device).expand_as(x)
    epsilon = torch.finfo(x.dtype).eps
    bound = max(least, epsilon)
    while abs(bound - 1) > 10 * epsilon:
        a, b, c = _weights(bound)
        if c > 100:
            q = torch.linalg.qr(torch.cat([math.sqrt(c) * x, identity], -2)).Q
            first, second = q[..., : x.shape[-2], :], q[..., x.shape[-2] :, :]
            step = (a - b / c) / math.sqrt(c) * (first @ second.mT)
        else:
            factor = torch.linalg.cholesky(identity + c * x.mT @ x)
            step = (a - b / c) * torch.cholesky_solve(x.mT, factor).mT
        x = (b / c) * x + step
        bound = min(1.0, bound * (a + b * bound**2) / (1 + c * bound**2))
    return x


def _weights(bound: float) -> tuple[float, float, float]:
    """Those of the next step, from a lower bound of the singular values, of which 1 is largest."""
    square = bound**2
    d = (4 * (1 - square) / square**2) ** (1 / 3)
    root = math.sqrt(1 + d)
    a = root + math.sqrt(8 - 4 * d + 8 * (2 - square) / (square * root)) / 2
    b = (a - 1) ** 2 / 4
    return a, b, a + b - 1


def map_by_polar(source: Tensor, target: Tensor) -> Tensor:
    """The transport map between covariances Σx and Σy, both definite, by a polar factor.

    With Σx = Lx Lxᵀ and Σy = Ly Lyᵀ it is A = Ly U Lx⁻¹, U the factor of Lyᵀ Lx: no square of the
    condition, as in the eigenvalues of Lxᵀ Σy Lx.
    """
    x, y = torch.linalg.cholesky(source), torch.linalg.cholesky(target)
    factor = polar_factor(y.mT @ x)
    return torch.linalg.solve_triangular(x.mT, (y @ factor).mT, upper=True).mT


def linear_algebra(setting: Setting) -> Iterator[Found]:
    """Double-precision decompositions: seconds on the CPU and on the device, one and a batch."""
    sizes = (16, 32) if setting.quick else (128, 256, 512, 1024, 2048, 4096)
    device, cpu = setting.torch_device, Setting("cpu", setting.quick)
    random = torch.Generator().manual_seed(0)
    slow: dict[str, tuple[int, float]] = {}
    calls: dict[str, Callable[[Tensor, Tensor], object]] = {
        "eigh": lambda x, y: torch.linalg.eigh(x),
        "cholesky": lambda x, y: torch.linalg.cholesky(x),
        "qdwh": lambda x, y: polar_factor(x),
        "map_by_eigh": optimal_map,
        "map_by_qdwh": map_by_polar,
    }
    for size, many in itertools.product(sizes, (1, 32)):
        if many > 1 and size > 512:
            continue
        data = torch.randn(2, many, 2 * size, size, dtype=torch.float64, generator=random)
        source, target = (data.mT @ data / (2 * size)).squeeze(1)
        for name, call in calls.items():
            if many > 1 and name.startswith("map"):
                continue
            row: Found = {}
            for where, place, clock in (("cpu", "cpu", cpu), ("device", device, setting)):
                key = f"{name} {where} {many}"
                before, taken = slow.get(key, (size, 0.0))
                if taken * (size / before) ** 3 > 4:
                    row[where] = f"left out: about {taken * (size / before) ** 3:.0f} s"
                    continue
                here, there = source.to(place), target.to(place)
                row[where] = clock.seconds(lambda: call(here, there), 1 if size > 512 else 3)  # noqa: B023
                slow[key] = size, row[where]
            if all(isinstance(value, float) for value in row.values()):
                row["cpu_over_device"] = row["cpu"] / row["device"]
            if name.startswith("map"):
                found = call(source.to(device), target.to(device))
                assert isinstance(found, Tensor)
                made = found @ source.to(device) @ found
                row["residual"] = float(((made - target.to(device)).norm() / target.norm()).cpu())
            yield {f"{name}, {size}{f' of {many}' if many > 1 else ''}": row}


def convolutions(setting: Setting) -> Iterator[Found]:
    """What a convolution costs in double precision, against single."""
    taken = {}
    for dtype in (torch.float32, torch.float64):
        layer = nn.Conv2d(64, 64, 3, padding=1).to(setting.torch_device, dtype)
        given = torch.randn(setting.batch, 64, 28, 28, dtype=dtype).to(setting.torch_device)

        def call(layer: nn.Module = layer, given: Tensor = given) -> None:
            with torch.no_grad(), exact_arithmetic():
                layer(given)

        taken[dtype] = setting.seconds(call)
    yield {
        "float32": taken[torch.float32],
        "float64": taken[torch.float64],
        "ratio": taken[torch.float64] / taken[torch.float32],
        "double_precision_flops": 2 * setting.batch * 64 * 64 * 9 * 28 * 28 / taken[torch.float64],
    }


def site_measures(setting: Setting) -> Iterator[Found]:
    """ResNet50 with each site measure and with all, against its forward pass; and its waits."""
    model, batches = setting.large(), 2
    shape = (batches * setting.batch, 3, setting.pixels, setting.pixels)
    inputs = torch.randn(shape).to(setting.torch_device)
    options = {"sites.batch": setting.batch}

    def forward() -> None:
        with torch.no_grad(), exact_arithmetic():
            for batch in torch.split(inputs, setting.batch):
                model(batch)

    bare = setting.seconds(forward)
    yield {"forward_a_batch": bare / batches}

    def call(measures: Sequence[str] = SITE_MEASURES) -> None:
        run = nlbench.evaluate(model, inputs, list(measures), settings=options)
        if run.failed:
            raise RuntimeError(run.failed[0].result.reason)

    for measures in (SITE_MEASURES, *((name,) for name in SITE_MEASURES)):
        name = measures[0] if len(measures) == 1 else "all"
        taken = setting.seconds(partial(call, measures), repeats=1)
        yield {name: {"a_batch": taken / batches, "of_forward": taken / bare}}
    yield {"waits_a_batch": setting.waits(call) / batches}
    yield {"driver_calls": setting.driver_calls(call)}


def closed_path(setting: Setting) -> Iterator[Found]:
    """A closed path of the trained VGG8 on digits: exact and refined, counts and seconds."""
    for method in ("refined", "exact"):
        with tempfile.TemporaryDirectory() as folder:
            command = setting.command(
                "run", "--measures", "density,absdev", "--model", "vgg8", "--no-report", "--out",
                f"{folder}/run", "--set", f"lines.method={method}", "--set", "lines.number=1",
            )  # fmt: skip
            if setting.quick:
                # Short segments of the same network.
                for option in ("paths=directions", "anchors=2", "radius=0.05"):
                    command += ["--set", f"lines.{option}"]
            ended(subprocess.run(command, capture_output=True, text=True, check=False))
            run = nlbench.load_run(f"{folder}/run")
        yield {
            method: {
                "density": run["density"].summary.get("value"),
                "absdev": run["absdev"].summary.get("value"),
                "seconds": run.records[0].costs["wall_seconds"],
            }
        }


def ended(done: subprocess.CompletedProcess[str]) -> None:
    """Pass on what a command that failed has said."""
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise RuntimeError(f"exit status {done.returncode}: {said}")


def against_the_cpu(setting: Setting) -> Iterator[Found]:
    """Segments and activations of small networks: the same as on the CPU."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(8 * 64, 64), nn.ReLU(), nn.Linear(64, 10),
    ).eval()  # fmt: skip
    starts, ends = torch.rand(2, 2, 3, 16, 16)
    if setting.quick:
        ends = starts + (ends - starts) / 16
    away = copy.deepcopy(model).to(setting.torch_device)
    paths = torch.stack([starts, ends], 1)
    pairs = [
        list(trace_segments(one, starts.to(place), ends.to(place)))
        for one, place in ((model, "cpu"), (away, setting.torch_device))
    ]
    yield {"regions": [[trace.regions for trace in traces] for traces in pairs]}
    yield {
        "largest_difference_of_outputs": max(
            float((a.values[[0, -1]] - b.values.cpu()[[0, -1]]).abs().max())
            for a, b in zip(*pairs, strict=True)
        )
    }
    estimates = [
        [seen.trace.crossings for seen in observe_paths(one, paths.to(place), method="refined")]
        for one, place in ((model, "cpu"), (away, setting.torch_device))
    ]
    yield {"estimated_crossings": estimates}
    network, inputs = setting.network(), setting.small
    names = [*SITE_MEASURES, "nlc", "pathlength"]
    there = nlbench.evaluate(network, inputs, names)
    here = nlbench.evaluate(copy.deepcopy(network).cpu(), inputs.cpu(), names)
    yield {
        "relative_difference": {
            name: abs(there[name].summary["value"] / here[name].summary["value"] - 1)
            for name in names
        }
    }


def refined_segments(setting: Setting) -> Iterator[Found]:
    """Estimates at ImageNet's size, by the hundred: images and themselves moved by a pixel."""
    names = ("quick",) if setting.quick else ("resnet18", "vgg16", "resnet50")
    wanted, limit = (3, 5.0) if setting.quick else (100, 30.0)
    random = torch.Generator().manual_seed(0)
    for name in names:
        torch.manual_seed(0)
        model = setting.network() if setting.quick else torchvision.models.get_model(name)
        model = model.eval().to(setting.torch_device)
        edge = 16 if setting.quick else setting.pixels
        starts = torch.rand(wanted, 3, edge, edge, generator=random)
        paths = torch.stack([starts, starts.roll(1, 3)], 1).to(setting.torch_device)
        begin, done = time.perf_counter(), []
        for seen in observe_paths(model, paths, method="refined"):
            done.append(seen.trace)
            if time.perf_counter() - begin > limit:
                break
        setting.wait()
        taken = time.perf_counter() - begin
        yield {
            name: {
                "segments": len(done),
                "seconds_a_segment": taken / len(done),
                "crossings": statistics.mean(float(trace.crossings) for trace in done),
                "error": statistics.mean(float(trace.error) for trace in done),
                "evaluations": statistics.mean(trace.evaluations for trace in done),
            }
        }


def little_memory(setting: Setting) -> Iterator[Found]:
    """A twentieth of the card: batches are halved, and the numbers are those of whole ones."""
    if setting.torch_device.type != "cuda":
        yield {"left_out": "needs a GPU"}
        return
    model, samples = setting.large(), 4 * setting.batch
    inputs = torch.randn(samples, 3, setting.pixels, setting.pixels)
    options = {"sites.batch": samples, "sites.select": "every:8"}
    whole = nlbench.evaluate(model, inputs, ["norm", "cka"], settings=options)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.05, setting.torch_device)
    parts = nlbench.evaluate(model, inputs, ["norm", "cka"], settings=options)
    for name in ("norm", "cka"):
        found, expected = parts[name], whole[name].summary["value"]
        difference = found.summary.get("value", math.nan) / expected - 1
        yield {name: {"status": found.status, "reason": found.reason, "difference": difference}}


def memory_between_subjects(setting: Setting) -> Iterator[Found]:
    """What is left on the device when one subject has gone and the next has come."""
    request = nlbench.Request(
        ("norm",), ("vgg8", "resnet18-w4"), weights=("init",), samples=16,
        device=str(setting.torch_device),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run = nlbench.run(request, f"{folder}/run")
    gc.collect()
    yield {"peaks": [record.costs.get("peak_device_memory") for record in run.records]}
    if setting.torch_device.type == "cuda":
        torch.cuda.empty_cache()
        yield {
            "left_allocated": torch.cuda.memory_allocated(setting.torch_device),
            "left_reserved": torch.cuda.memory_reserved(setting.torch_device),
        }


def workers(setting: Setting) -> Iterator[Found]:
    """Two workers, one of which is killed: nothing is lost, and the table is the serial one's."""
    if setting.pretended is not None:
        yield {"left_out": "processes of their own don't pretend"}
        return
    models = ("vgg8",) if setting.quick else ("vgg8", "resnet18-w4")
    given = (
        "run", "--measures", "cka,norm" if setting.quick else "affinity,cka,norm", "--model",
        ",".join(models), "--weights", "init", "--seeds", "0,1", "--no-report",
    )  # fmt: skip
    if setting.quick:
        given = (*given, "--samples", "16")
    with tempfile.TemporaryDirectory() as folder:
        serial, beside = f"{folder}/serial", f"{folder}/beside"
        alone = setting.command(*given, "--out", serial)
        ended(subprocess.run(alone, capture_output=True, text=True, check=False))
        yield {"serial": "ended"}
        both = setting.command(*given, "--out", beside, "--executor", "processes", "--workers", "2")
        with subprocess.Popen(
            both, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as running:
            try:
                yield {"killed": _kill_a_worker(running.pid, 60.0)}
                yield {"status": running.wait(timeout=200)}
            finally:
                running.terminate()
        again = subprocess.run(both, capture_output=True, text=True, check=False)
        yield {"status_again": again.returncode}
        ended(again)
        tables = [(Path(run) / "scores.csv").read_text() for run in (serial, beside)]
        yield {"same_table": tables[0] == tables[1]}


def _kill_a_worker(parent: int, patience: float) -> bool:
    """Kill a process that measures; the one that describes the GPU is left alone."""
    import psutil

    end = time.monotonic() + patience
    while time.monotonic() < end:
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(parent).children()
            measuring = [c for c in children if any("execution.worker" in a for a in c.cmdline())]
            if measuring:
                time.sleep(2.0)
                measuring[-1].send_signal(signal.SIGKILL)
                return True
        time.sleep(0.05)
    return False


def repeated(setting: Setting) -> Iterator[Found]:
    """The same twice: whether it is identical to the last digit."""
    model, inputs = setting.network(), setting.small
    names = [*SITE_MEASURES, "nlc", "pathlength"]
    one, two = (nlbench.evaluate(model, inputs, names) for _ in range(2))
    yield {name: one[name].summary == two[name].summary for name in names}
    start, end = inputs[:1], inputs[:1].roll(1, 3)
    traces = [next(trace_segments(model, start, start + (end - start) / 64)) for _ in range(2)]
    yield {"a_traced_segment": bool(torch.equal(traces[0].values.cpu(), traces[1].values.cpu()))}


def interrupted_training(setting: Setting) -> Iterator[Found]:
    """A training that Ctrl-C ends after its first epoch, and the rest of it."""
    with tempfile.TemporaryDirectory() as folder:
        command, there, state = {}, {}, {}
        for name in ("whole", "parts"):
            there[name] = Path(folder, f"{name}.safetensors")
            state[name] = Path(folder, f"{name}.training", "state")
            command[name] = setting.command(
                "train", "--model", "vgg8", "--epochs", "2" if setting.quick else "6",
                "--out", str(there[name]),
            )  # fmt: skip
        with subprocess.Popen(
            command["parts"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as running:
            try:
                while running.poll() is None and not state["parts"].exists():
                    time.sleep(0.02)
                running.send_signal(signal.SIGINT)
                yield {"status": running.wait(60)}
            finally:
                running.terminate()
        rest = [*command["parts"], "--resume"]
        again = subprocess.run(rest, capture_output=True, text=True, check=False)
        yield {"status_again": again.returncode, "weights": there["parts"].is_file()}
        ended(again)
        ended(subprocess.run(command["whole"], capture_output=True, text=True, check=False))
        parts, whole = (load_file(there[name]) for name in ("parts", "whole"))
        yield {"same_weights": all(torch.equal(parts[name], whole[name]) for name in whole)}


PARTS: dict[str, Callable[[Setting], Iterator[Found]]] = {
    "machine": machine,
    "against_the_cpu": against_the_cpu,
    "tf32": tf32,
    "repeated": repeated,
    "tests": tests,
    "site_measures": site_measures,
    "closed_path": closed_path,
    "refined_segments": refined_segments,
    "little_memory": little_memory,
    "memory_between_subjects": memory_between_subjects,
    "workers": workers,
    "interrupted_training": interrupted_training,
    "convolutions": convolutions,
    "linear_algebra": linear_algebra,
}
"""In the order of what would be missed most if time runs out."""


def one_part(name: str, setting: Setting, file: Path) -> int:
    """Run a part in this process, and write down each piece that it finds."""
    found: Found = {}

    def keep() -> None:
        beside = file.with_suffix(".new")
        beside.write_text(json.dumps(found, default=str))
        beside.replace(file)

    try:
        for piece in PARTS[name](setting):
            found |= piece
            keep()
    except Exception as error:
        # A part's failure is a finding.
        traceback.print_exc()
        found["failed"] = f"{type(error).__name__}: {error}"
        keep()
        return 1
    return 0


def apart(name: str, asked: argparse.Namespace, left: float) -> Found:
    """Run a part in a process of its own, for so many seconds at most."""
    command = [sys.executable, __file__, "--part", name, "--device", asked.device]
    command += ["--quick"] if asked.quick else []
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        # A group of its own, so that what the part starts ends with it; and it does not hear
        # Ctrl-C, which is for this process.
        running = subprocess.Popen([*command, "--out", str(file)], start_new_session=True)
        why, status = "", None
        try:
            status = running.wait(left)
        except subprocess.TimeoutExpired:
            why = "no time left to end it"
        except KeyboardInterrupt:
            why = "interrupted"
        finally:
            with contextlib.suppress(OSError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        found: Found = json.loads(file.read_text()) if file.exists() else {}
    if why:
        found["left_out"] = why
    elif status and "failed" not in found:
        found["failed"] = f"its process ended with status {status}"
    return found | {"seconds": round(time.monotonic() - begin, 1)}


def main() -> int:
    """Run the parts one after the other, and write down what came of them."""
    if "--pretended" in sys.argv[1:2]:
        return pretended_command(sys.argv[2:])
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--device", default="cuda:0", help="cuda:N, cpu or pretended")
    given.add_argument("--quick", action="store_true", help="small networks")
    given.add_argument("--parts", default=",".join(PARTS))
    given.add_argument("--minutes", type=float, default=MINUTES)
    given.add_argument("--out", type=Path, help="the JSON file; the table lies beside it")
    given.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    asked = given.parse_args()
    if asked.part:
        with contextlib.ExitStack() as stack:
            is_pretended = asked.device == "pretended"
            pretended = stack.enter_context(PretendCuda()) if is_pretended else None
            return one_part(asked.part, Setting(asked.device, asked.quick, pretended), asked.out)
    names = asked.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        given.error(f"unknown part '{unknown[0]}', expected some of {', '.join(PARTS)}")
    is_real = asked.device.startswith("cuda")
    if is_real and not torch.cuda.is_available():
        print("there is no GPU here; --quick --device cpu or pretended tries the parts without one")
        return 2
    file = asked.out or (Path(__file__).with_suffix(".json") if is_real else None)
    signal.signal(signal.SIGTERM, _as_ctrl_c)
    results: Found = {}
    begin, is_over = time.monotonic(), False
    for name in names:
        left = 60 * asked.minutes - (time.monotonic() - begin)
        if is_over or left <= 0:
            results[name] = {"left_out": "interrupted" if is_over else "no time left"}
        else:
            results[name] = apart(name, asked, left)
            is_over = results[name].get("left_out") == "interrupted"
            print(f"{name} ({results[name]['seconds']} s)", *shown(results[name]), sep="\n")
            sys.stdout.flush()
        write(results, asked, file)
    print("", *table(results), "", *([] if asked.quick else targets(results)), sep="\n")
    if file is not None:
        print(f"written to {file} and {file.with_suffix('.md').name}")
    if is_over:
        return 130
    return int(any("failed" in found for found in results.values()))


def _as_ctrl_c(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def pretended_command(arguments: list[str]) -> int:
    """Run a command of nlbench's on a device that is pretended."""
    from nlbench.cli.app import main as command

    sys.argv[1:] = arguments
    with PretendCuda():
        command()
    return 0


def write(results: Found, asked: argparse.Namespace, file: Path | None) -> None:
    """Put what was found by now on the disk."""
    if file is None:
        return
    about = {"device": asked.device, "quick": asked.quick, "minutes": asked.minutes}
    content = json.dumps({"asked": about, **results}, indent=1, default=str) + "\n"
    lines = [*table(results), "", *([] if asked.quick else targets(results))]
    for path, text in ((file, content), (file.with_suffix(".md"), "\n".join(lines) + "\n")):
        beside = path.with_name(path.name + ".new")
        beside.write_text(text)
        shutil.move(beside, path)


def shown(found: Found, indent: str = "  ") -> Iterator[str]:
    """Give a part's lines."""
    for key, value in found.items():
        if isinstance(value, dict):
            yield f"{indent}{key}"
            yield from shown(value, indent + "  ")
        else:
            text = f"{value:.4g}" if isinstance(value, float) else value
            yield f"{indent}{key}: {text}"


def table(results: Found) -> Iterator[str]:
    """Give the results as a table in Markdown, for README."""
    about = results.get("machine", {})
    what = about.get("gpu") or about.get("recorded", {}).get("device_name") or "?"
    yield f"Measured on {what}, PyTorch {about.get('torch', '?')}."
    yield ""
    yield "| what | came out | result |"
    yield "| --- | --- | --- |"
    for name, found in results.items():
        if name == "machine":
            continue
        how = next((word for word in ("failed", "left_out") if word in found), "ran")
        told = [f"{key} {value}" for key, value in _flat(found) if key != "seconds"]
        text = "; ".join(told).replace("|", "/").replace("\n", " ")
        title = f"{name.replace('_', ' ')} ({found.get('seconds', 0)} s)"
        yield f"| {title} | {how.replace('_', ' ')} | {text} |"


def _flat(found: Found, above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in found.items():
        name = f"{above} {key}".strip().replace("_", " ")
        if isinstance(value, dict):
            yield from _flat(value, name)
        else:
            yield name, f"{value:.4g}" if isinstance(value, float) else str(value)


def targets(results: Found) -> Iterator[str]:
    """Set what came out beside what is wanted on a large card, where both are known."""
    sites, paths = results.get("site_measures", {}), results.get("closed_path", {})
    cpu, whole = results.get("against_the_cpu", {}), sites.get("all", {})
    refined = results.get("refined_segments", {}).get("resnet18", {})
    exact = paths.get("exact", {})
    regions = cpu.get("regions")
    apart = [abs(b / a - 1) for a, b in zip(*regions, strict=True)] if regions else []
    differences = cpu.get("relative_difference", {})
    identical = [v for k, v in results.get("repeated", {}).items() if isinstance(v, bool)]
    wanted: list[tuple[str, float | None, float]] = [
        ("six site measures on ResNet50, seconds a batch of 128", whole.get("a_batch"), 0.1),
        ("the same, in forward passes", whole.get("of_forward"), 2.0),
        ("closed path of VGG8, exact, seconds", exact.get("seconds"), 0.5),
        ("100 segments of ResNet18, seconds", _times(refined.get("seconds_a_segment"), 100), 60.0),
        ("regions, share by which they differ from the CPU's", max(apart, default=None), 1e-3),
        ("values of sites, the same", max(differences.values(), default=None), 1e-4),
        ("measures that a repetition changes", identical.count(False) if identical else None, 0),
    ]
    known = [(what, found, most) for what, found, most in wanted if found is not None]
    if known:
        yield "| wanted at most | found | |"
        yield "| --- | --- | --- |"
    for what, found, most in known:
        yield f"| {what}: {most:g} | {found:.3g} | {'reached' if found <= most else 'missed'} |"


def _times(value: float | None, number: int) -> float | None:
    return None if value is None else number * value


if __name__ == "__main__":
    sys.exit(main())
