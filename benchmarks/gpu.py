"""Check nlbench on a GPU and measure its cost there, in ten minutes.

``make gpu`` runs all parts. Each part runs in its own process, so that a part that fails, hangs or
crashes the GPU is one line of the table, with its results until then, and the others continue. All
results are written after every part as ``gpu.json`` and as the table ``gpu.md`` next to this file,
also after the time limit or Ctrl-C. Compare the ratios: each relates two measurements of this run.

Without a GPU ``--quick --device cpu`` runs the parts on small networks, and ``--quick --device
pretended`` on a simulated CUDA device. Their results are written to ``--out``.
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

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from pretend_cuda import PretendCuda

SITE_MEASURES = ("affinity", "r2", "cka", "norm", "sparsity", "entropy")
LIMIT_MINUTES = 10.0
TESTS = Path(__file__).parents[1] / "tests"

Results = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """Device and size of the parts.

    Parameters
    ----------
    device : str
        ``cuda:N``, ``cpu``, or ``pretended``.
    quick : bool
        True to replace large networks by small ones.
    pretended : PretendCuda, optional
        The simulated device, entered.
    """

    device: str
    quick: bool
    pretended: PretendCuda | None = None

    @property
    def torch_device(self) -> torch.device:
        """Device of the tensors."""
        return torch.device("cuda:0" if self.device == "pretended" else self.device)

    @property
    def pixels(self) -> int:
        """Side of ImageNet's images."""
        return 32 if self.quick else 224

    def network(self) -> nn.Module:
        """Return a network for repeated parts, with the same weights at each call."""
        torch.manual_seed(0)
        if self.quick:
            layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10)
            return nn.Sequential(*layers).eval().to(self.torch_device)
        return torchvision.models.resnet18(weights=None).eval().to(self.torch_device)

    def large(self) -> nn.Module:
        """Return a network for ImageNet."""
        torch.manual_seed(0)
        if self.quick:
            layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.ReLU()
            layers = (*layers, nn.Flatten(), nn.Linear(8 * 14 * 14, 10))
            return nn.Sequential(*layers).eval().to(self.torch_device)
        return torchvision.models.resnet50(weights=None).eval().to(self.torch_device)

    @property
    def small(self) -> Tensor:
        """Images for repeated parts, the same at each call."""
        count, side = (16, 16) if self.quick else (64, 64)
        random = torch.Generator().manual_seed(1)
        return torch.randn(count, 3, side, side, generator=random).to(self.torch_device)

    @property
    def batch(self) -> int:
        """Samples per batch."""
        return 8 if self.quick else 128

    def command(self, *arguments: str) -> list[str]:
        """Return a command line of nlbench on this device."""
        command = [*arguments, "--device", str(self.torch_device)]
        if self.pretended is not None:
            return [sys.executable, __file__, "--pretended", *command]
        return [sys.executable, "-m", "nlbench.cli.app", *command]

    def wait(self) -> None:
        """Wait until the device's queue is finished."""
        if self.torch_device.type == "cuda":
            torch.cuda.synchronize(self.torch_device)

    def seconds(self, call: Callable[[], object], repeats: int = 3, warm_up: bool = True) -> float:
        """Return the median time of several calls, after a warm-up."""
        if warm_up:
            call()
        times = []
        for _ in range(1 if self.quick else repeats):
            self.wait()
            begin = time.perf_counter()
            call()
            self.wait()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    def waits(self, call: Callable[[], object]) -> int:
        """Count the synchronisations of a call, where the host waits for the device."""
        if self.pretended is not None:
            self.pretended.reset()
            call()
            return self.pretended.waits.total()
        if self.torch_device.type != "cuda":
            call()
            return 0
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(warning.message) for warning in caught)

    def driver_calls(self, call: Callable[[], object]) -> Results:
        """Count a call's kernels, copies and synchronisations with PyTorch's profiler."""
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
        kinds_counted = ("Synchronize", "LaunchKernel", "Memcpy")
        return {
            key: counts[key]
            for key in sorted(counts)
            if key.startswith("cu") and any(kind in key for kind in kinds_counted)
        }


# Each part yields its results piece by piece, so that those of an interrupted part are kept.


def machine(setting: Setting) -> Iterator[Results]:
    """Describe the machine, also by the fields of a record."""
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
    names = ("device_name", "capability", "driver", "cudnn", "cuda", "float32", "tf32", "emulation")
    yield {"recorded": {name: facts.get(name) for name in names}}


def tests(setting: Setting) -> Iterator[Results]:
    """Run the tests marked ``gpu``."""
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
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    yield {"status": done.returncode, "summary": lines[-1] if lines else "", "failures": failures}
    if done.returncode:
        raise RuntimeError(
            f"{len(failures)} tests failed: {lines[-1] if lines else done.stderr[-200:]}"
        )


@contextlib.contextmanager
def older_flags(matmul: bool, cudnn: bool, precision: str) -> Iterator[None]:
    """Enable TF32 with PyTorch's older settings."""
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


def read_older_flags() -> tuple[bool, bool]:
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
NEWER_FLAG_SETS = tuple(
    names
    for count in range(5)
    for names in itertools.combinations(("all", "matmul", "conv", "rnn"), count)
)


@contextlib.contextmanager
def newer_flags(settings: tuple[str, ...]) -> Iterator[None]:
    """Enable TF32 with PyTorch's newer settings."""
    flags = [(read, write) for name, read, write in NEWER_FLAGS if name in settings]
    before = [read() for read, _ in flags]
    for _, write in flags:
        write("tf32")
    try:
        yield
    finally:
        for (_, write), value in zip(flags, before, strict=True):
            write(value)


def tf32(setting: Setting) -> Iterator[Results]:
    """Check that numbers don't depend on the user's flags, and that the flags are kept."""
    model, inputs = setting.network(), setting.small
    values: dict[str, list[float]] = {}
    is_kept: dict[str, bool] = {}

    def evaluate(name: str, read_flags: Callable[[], object]) -> None:
        before = read_flags()
        run = nlbench.evaluate(model, inputs, ["norm", "nlc"])
        values[name] = [run[measure].summary["value"] for measure in ("norm", "nlc")]
        is_kept[name] = before == read_flags()

    def summary() -> Results:
        rows = list(values.values())
        pairs = ((a, b) for row in rows for a, b in zip(row, rows[0], strict=True))
        return {
            "settings": len(values),
            "largest_difference": max(abs(a / b - 1) for a, b in pairs),
            "not_kept": [name for name, kept in is_kept.items() if not kept],
        }

    # The newer ones first: the older permanently change the precision that convolutions inherit.
    flag_sets = NEWER_FLAG_SETS[:: 5 if setting.quick else 1]
    for settings in flag_sets if hasattr(torch.backends, "fp32_precision") else ():
        with newer_flags(settings):
            evaluate("new: " + " ".join(settings), lambda: [read() for _, read, _ in NEWER_FLAGS])
    yield summary() if values else {}
    precisions = ("highest", "high", "medium")
    for matmul, cudnn, precision in itertools.product((False, True), (False, True), precisions):
        if setting.quick and (matmul, cudnn) != (True, True):
            continue
        with older_flags(matmul, cudnn, precision):
            evaluate(f"old: {matmul} {cudnn} {precision}", read_older_flags)
    yield summary()
    # The effect that TF32 would have.
    with torch.no_grad():
        with older_flags(True, True, "high"):
            rounded = model(inputs)
        with exact_arithmetic():
            exact = model(inputs)
    yield {"tf32_would_change_outputs_by": float(((rounded - exact).norm() / exact.norm()).cpu())}
    if not all(is_kept.values()) or summary()["largest_difference"] > 0:
        raise RuntimeError("numbers or flags changed with TF32's flags")


def polar_factor(matrix: Tensor, lower_bound: float = 1e-16) -> Tensor:
    """Compute the orthogonal factor U of A = U H, H positive semidefinite, with QDWH.

    The dynamically weighted Halley iteration takes at most six steps with QR factorisations, or
    Cholesky factorisations once the matrix is well conditioned.

    Parameters
    ----------
    matrix : tensor of shape (..., n, n)
        Floating point, of full rank.
    lower_bound : float
        Lower bound of the ratio of the smallest singular value to the Frobenius norm.

    References
    ----------
    Y. Nakatsukasa, N. J. Higham, "Stable and Efficient Spectral Divide and Conquer Algorithms for
    the Symmetric Eigenvalue Decomposition and the SVD", SIAM J. Sci. Comput. 35(3), 2013.
    """
    x = matrix / torch.linalg.matrix_norm(matrix)[..., None, None]
    identity = torch.eye(matrix.shape[-1], dtype=x.dtype, device=x.device).expand_as(x)
    epsilon = torch.finfo(x.dtype).eps
    bound = max(lower_bound, epsilon)
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
    """Return the weights of the next step for singular values from a lower bound to 1."""
    square = bound**2
    d = (4 * (1 - square) / square**2) ** (1 / 3)
    root = math.sqrt(1 + d)
    a = root + math.sqrt(8 - 4 * d + 8 * (2 - square) / (square * root)) / 2
    b = (a - 1) ** 2 / 4
    return a, b, a + b - 1


def map_by_polar(source: Tensor, target: Tensor) -> Tensor:
    """Compute the transport map between definite covariances Σx and Σy with a polar factor.

    With Σx = Lx Lxᵀ and Σy = Ly Lyᵀ it is A = Ly U Lx⁻¹, where U is the factor of Lyᵀ Lx. It does
    not square the condition number, as the eigenvalues of Lxᵀ Σy Lx do.
    """
    x, y = torch.linalg.cholesky(source), torch.linalg.cholesky(target)
    factor = polar_factor(y.mT @ x)
    return torch.linalg.solve_triangular(x.mT, (y @ factor).mT, upper=True).mT


def linear_algebra(setting: Setting) -> Iterator[Results]:
    """Time double-precision decompositions on the CPU and the device, single and batched."""
    sizes = (16, 32) if setting.quick else (128, 256, 512, 1024, 2048, 4096)
    device, cpu = setting.torch_device, Setting("cpu", setting.quick)
    random = torch.Generator().manual_seed(0)
    last_times: dict[str, tuple[int, float]] = {}
    calls: dict[str, Callable[[Tensor, Tensor], object]] = {
        "eigh": lambda x, y: torch.linalg.eigh(x),
        "cholesky": lambda x, y: torch.linalg.cholesky(x),
        "qdwh": lambda x, y: polar_factor(x),
        "map_by_eigh": optimal_map,
        "map_by_qdwh": map_by_polar,
    }
    for size, count in itertools.product(sizes, (1, 32)):
        if count > 1 and size > 512:
            continue
        data = torch.randn(2, count, 2 * size, size, dtype=torch.float64, generator=random)
        source, target = (data.mT @ data / (2 * size)).squeeze(1)
        for name, call in calls.items():
            if count > 1 and name.startswith("map"):
                continue
            row: Results = {}
            for column, place, timer in (("cpu", "cpu", cpu), ("device", device, setting)):
                key = f"{name} {column} {count}"
                last_size, last_time = last_times.get(key, (size, 0.0))
                expected = last_time * (size / last_size) ** 3
                if expected > 4:
                    row[column] = f"left out: about {expected:.0f} s"
                    continue
                x, y = source.to(place), target.to(place)
                row[column] = timer.seconds(lambda: call(x, y), 1 if size > 512 else 3)  # noqa: B023
                last_times[key] = size, row[column]
            if all(isinstance(value, float) for value in row.values()):
                row["cpu_over_device"] = row["cpu"] / row["device"]
            if name.startswith("map"):
                matrix = call(source.to(device), target.to(device))
                assert isinstance(matrix, Tensor)
                mapped = matrix @ source.to(device) @ matrix
                row["residual"] = float(((mapped - target.to(device)).norm() / target.norm()).cpu())
            yield {f"{name}, {size}{f' of {count}' if count > 1 else ''}": row}


def convolutions(setting: Setting) -> Iterator[Results]:
    """Compare the time of a convolution in double and single precision."""
    times = {}
    for dtype in (torch.float32, torch.float64):
        layer = nn.Conv2d(64, 64, 3, padding=1).to(setting.torch_device, dtype)
        images = torch.randn(setting.batch, 64, 28, 28, dtype=dtype).to(setting.torch_device)

        def call(layer: nn.Module = layer, images: Tensor = images) -> None:
            with torch.no_grad(), exact_arithmetic():
                layer(images)

        times[dtype] = setting.seconds(call)
    yield {
        "float32": times[torch.float32],
        "float64": times[torch.float64],
        "ratio": times[torch.float64] / times[torch.float32],
        "double_precision_flops": 2 * setting.batch * 64 * 64 * 9 * 28 * 28 / times[torch.float64],
    }


def site_measures(setting: Setting) -> Iterator[Results]:
    """Compare ResNet50 with site measures to its forward pass, and count synchronisations."""
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
        elapsed = setting.seconds(partial(call, measures), 1, warm_up=name == "all")
        yield {name: {"a_batch": elapsed / batches, "of_forward": elapsed / bare}}
    yield {"waits_a_batch": setting.waits(call) / batches}
    yield {"driver_calls": setting.driver_calls(call)}


def closed_path(setting: Setting) -> Iterator[Results]:
    """Trace a closed path of the trained VGG8 on digits with both methods."""
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
            check_status(subprocess.run(command, capture_output=True, text=True, check=False))
            run = nlbench.load_run(f"{folder}/run")
        yield {
            method: {
                "density": run["density"].summary.get("value"),
                "absdev": run["absdev"].summary.get("value"),
                "seconds": run.records[0].costs["wall_seconds"],
            }
        }


def check_status(done: subprocess.CompletedProcess[str]) -> None:
    """Raise the last line of output of a command that failed."""
    if done.returncode:
        message = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise RuntimeError(f"exit status {done.returncode}: {message}")


def against_the_cpu(setting: Setting) -> Iterator[Results]:
    """Compare segments and activations of small networks with those on the CPU."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(8 * 64, 64), nn.ReLU(), nn.Linear(64, 10),
    ).eval()  # fmt: skip
    starts, ends = torch.rand(2, 2, 3, 16, 16)
    if setting.quick:
        ends = starts + (ends - starts) / 16
    models = ((model, "cpu"), (copy.deepcopy(model).to(setting.torch_device), setting.torch_device))
    paths = torch.stack([starts, ends], 1)
    pairs = [
        list(trace_segments(network, starts.to(place), ends.to(place))) for network, place in models
    ]
    yield {"regions": [[trace.regions for trace in traces] for traces in pairs]}
    yield {
        "largest_difference_of_outputs": max(
            float((a.values[[0, -1]] - b.values.cpu()[[0, -1]]).abs().max())
            for a, b in zip(*pairs, strict=True)
        )
    }
    estimates = [
        [
            segment.trace.crossings
            for segment in observe_paths(network, paths.to(place), method="refined")
        ]
        for network, place in models
    ]
    yield {"estimated_crossings": estimates}
    network, inputs = setting.network(), setting.small
    names = [*SITE_MEASURES, "nlc", "pathlength"]
    on_device = nlbench.evaluate(network, inputs, names)
    on_cpu = nlbench.evaluate(copy.deepcopy(network).cpu(), inputs.cpu(), names)
    yield {"status": {name: on_device[name].status for name in names}}
    if differing := [name for name in names if on_device[name].status != on_cpu[name].status]:
        raise RuntimeError(f"another status than on the CPU: {', '.join(differing)}")
    # r2 is undefined with fewer samples than channels.
    defined = [name for name in names if on_cpu[name].status == "ok"]
    yield {
        "relative_difference": {
            name: abs(on_device[name].summary["value"] / on_cpu[name].summary["value"] - 1)
            for name in defined
        }
    }


def refined_segments(setting: Setting) -> Iterator[Results]:
    """Estimate a hundred segments at ImageNet's size, between images and their shifts."""
    names = ("quick",) if setting.quick else ("resnet18", "vgg16", "resnet50")
    count, together, limit = (3, 3, 5.0) if setting.quick else (100, 10, 20.0)
    random = torch.Generator().manual_seed(0)
    for name in names:
        torch.manual_seed(0)
        model = setting.network() if setting.quick else torchvision.models.get_model(name)
        model = model.eval().to(setting.torch_device)
        side = 16 if setting.quick else setting.pixels
        starts = torch.rand(count, 3, side, side, generator=random)
        paths = torch.stack([starts, starts.roll(1, 3)], 1).to(setting.torch_device)
        begin, traces = time.perf_counter(), []
        for group in paths.split(together):
            traces += [path.trace for path in observe_paths(model, group, method="refined")]
            if time.perf_counter() - begin > limit:
                break
        setting.wait()
        elapsed = time.perf_counter() - begin
        yield {
            name: {
                "segments": len(traces),
                "seconds_a_segment": elapsed / len(traces),
                "crossings": statistics.mean(float(trace.crossings) for trace in traces),
                "error": statistics.mean(float(trace.error) for trace in traces),
                "evaluations": statistics.mean(trace.evaluations for trace in traces),
            }
        }


def little_memory(setting: Setting) -> Iterator[Results]:
    """Check that halved batches in a twentieth of the memory give the same numbers."""
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
        result, expected = parts[name], whole[name].summary["value"]
        difference = result.summary.get("value", math.nan) / expected - 1
        yield {name: {"status": result.status, "reason": result.reason, "difference": difference}}


def memory_between_subjects(setting: Setting) -> Iterator[Results]:
    """Measure the device memory that remains allocated after two subjects."""
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


def workers(setting: Setting) -> Iterator[Results]:
    """Kill one of two workers, and compare the resumed run's table with that of a serial run."""
    if setting.pretended is not None:
        yield {"left_out": "worker processes don't simulate the device"}
        return
    models = ("vgg8",) if setting.quick else ("vgg8", "resnet18-w4")
    arguments = (
        "run", "--measures", "cka,norm" if setting.quick else "affinity,cka,norm", "--model",
        ",".join(models), "--weights", "init", "--seeds", "0,1", "--no-report",
    )  # fmt: skip
    if setting.quick:
        arguments = (*arguments, "--samples", "16")
    with tempfile.TemporaryDirectory() as folder:
        serial, parallel = f"{folder}/serial", f"{folder}/parallel"
        serially = setting.command(*arguments, "--out", serial)
        check_status(subprocess.run(serially, capture_output=True, text=True, check=False))
        yield {"serial": "ended"}
        options = ("--executor", "processes", "--workers", "2")
        in_workers = setting.command(*arguments, "--out", parallel, *options)
        with subprocess.Popen(
            in_workers, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as running:
            try:
                yield {"killed": _kill_worker(running.pid, 60.0)}
                yield {"status": running.wait(timeout=200)}
            finally:
                running.terminate()
        again = subprocess.run(in_workers, capture_output=True, text=True, check=False)
        yield {"status_again": again.returncode}
        check_status(again)
        tables = [(Path(run) / "scores.csv").read_text() for run in (serial, parallel)]
        yield {"same_table": tables[0] == tables[1]}


def _kill_worker(parent: int, timeout: float) -> bool:
    """Kill a worker process, but not the process that describes the GPU."""
    import psutil

    end = time.monotonic() + timeout
    while time.monotonic() < end:
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(parent).children()
            started = [c for c in children if any("execution.worker" in a for a in c.cmdline())]
            if started:
                time.sleep(2.0)
                started[-1].send_signal(signal.SIGKILL)
                return True
        time.sleep(0.05)
    return False


def repeated(setting: Setting) -> Iterator[Results]:
    """Check that repeated measurements are identical to the last digit."""
    model, inputs = setting.network(), setting.small
    names = [*SITE_MEASURES, "nlc", "pathlength"]
    first, second = (nlbench.evaluate(model, inputs, names) for _ in range(2))
    yield {name: first[name].summary == second[name].summary for name in names}
    start, end = inputs[:1], inputs[:1].roll(1, 3)
    traces = [next(trace_segments(model, start, start + (end - start) / 64)) for _ in range(2)]
    yield {"a_traced_segment": bool(torch.equal(traces[0].values.cpu(), traces[1].values.cpu()))}


def interrupted_training(setting: Setting) -> Iterator[Results]:
    """Interrupt a training after its first epoch, resume it, and compare the weights."""
    with tempfile.TemporaryDirectory() as folder:
        file = {name: Path(folder, f"{name}.safetensors") for name in ("whole", "parts")}
        state = Path(folder, "parts.training", "state")
        epochs = "2" if setting.quick else "6"
        command = {
            name: setting.command("train", "--model", "vgg8", "--epochs", epochs, "--out", str(out))
            for name, out in file.items()
        }
        with subprocess.Popen(
            command["parts"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as running:
            try:
                while running.poll() is None and not state.exists():
                    time.sleep(0.02)
                running.send_signal(signal.SIGINT)
                yield {"status": running.wait(60)}
            finally:
                running.terminate()
        rest = [*command["parts"], "--resume"]
        again = subprocess.run(rest, capture_output=True, text=True, check=False)
        yield {"status_again": again.returncode, "weights": file["parts"].is_file()}
        check_status(again)
        check_status(subprocess.run(command["whole"], capture_output=True, text=True, check=False))
        parts, whole = (load_file(file[name]) for name in ("parts", "whole"))
        yield {"same_weights": all(torch.equal(parts[name], whole[name]) for name in whole)}


PARTS: dict[str, Callable[[Setting], Iterator[Results]]] = {
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
"""The most important parts first, in case time runs out."""


def run_part(name: str, setting: Setting, file: Path) -> int:
    """Run a part in this process, and write its results as they arrive."""
    results: Results = {}

    def write_results() -> None:
        temporary = file.with_suffix(".new")
        temporary.write_text(json.dumps(results, default=str))
        temporary.replace(file)

    try:
        for piece in PARTS[name](setting):
            results |= piece
            write_results()
    except Exception as error:
        # A failure is one of the results.
        traceback.print_exc()
        results["failed"] = f"{type(error).__name__}: {error}"
        write_results()
        return 1
    return 0


def run_in_process(name: str, arguments: argparse.Namespace, timeout: float) -> Results:
    """Run a part in a process with a timeout in seconds."""
    command = [sys.executable, __file__, "--part", name, "--device", arguments.device]
    command += ["--quick"] if arguments.quick else []
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "results.json")
        # In a new session, so that all processes of the part can be killed, and Ctrl-C reaches
        # this process only.
        running = subprocess.Popen([*command, "--out", str(file)], start_new_session=True)
        reason, status = "", None
        try:
            status = running.wait(timeout)
        except subprocess.TimeoutExpired:
            reason = "no time left to finish"
        except KeyboardInterrupt:
            reason = "interrupted"
        finally:
            with contextlib.suppress(OSError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        results: Results = json.loads(file.read_text()) if file.exists() else {}
    if reason:
        results["left_out"] = reason
    elif status and "failed" not in results:
        results["failed"] = f"its process ended with status {status}"
    return results | {"seconds": round(time.monotonic() - begin, 1)}


def main() -> int:
    """Run the parts in order and write their results."""
    if "--pretended" in sys.argv[1:2]:
        return run_pretended(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0", help="cuda:N, cpu or pretended")
    parser.add_argument("--quick", action="store_true", help="use small networks")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--minutes", type=float, default=LIMIT_MINUTES)
    parser.add_argument("--out", type=Path, help="the JSON file; the table is written next to it")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        with contextlib.ExitStack() as stack:
            is_pretended = arguments.device == "pretended"
            pretended = stack.enter_context(PretendCuda()) if is_pretended else None
            setting = Setting(arguments.device, arguments.quick, pretended)
            return run_part(arguments.part, setting, arguments.out)
    names = arguments.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"unknown part '{unknown[0]}', expected some of {', '.join(PARTS)}")
    is_gpu = arguments.device.startswith("cuda")
    if is_gpu and not torch.cuda.is_available():
        print("there is no GPU; run the parts without one with --quick --device cpu or pretended")
        return 2
    file = arguments.out or (Path(__file__).with_suffix(".json") if is_gpu else None)
    signal.signal(signal.SIGTERM, _interrupt)
    results: Results = {}
    begin, is_interrupted = time.monotonic(), False
    for name in names:
        left = 60 * arguments.minutes - (time.monotonic() - begin)
        if is_interrupted or left <= 0:
            results[name] = {"left_out": "interrupted" if is_interrupted else "no time left"}
        else:
            results[name] = run_in_process(name, arguments, left)
            is_interrupted = results[name].get("left_out") == "interrupted"
            print(f"{name} ({results[name]['seconds']} s)", *lines_of(results[name]), sep="\n")
            sys.stdout.flush()
        write(results, arguments, file)
    print("", *table(results), "", *([] if arguments.quick else targets(results)), sep="\n")
    if file is not None:
        print(f"written to {file} and {file.with_suffix('.md').name}")
    if is_interrupted:
        return 130
    return int(any("failed" in part for part in results.values()))


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def run_pretended(arguments: list[str]) -> int:
    """Run a command of nlbench on the simulated device."""
    from nlbench.cli.app import main as command

    sys.argv[1:] = arguments
    with PretendCuda():
        command()
    return 0


def write(results: Results, arguments: argparse.Namespace, file: Path | None) -> None:
    """Write the results so far as JSON and as a table."""
    if file is None:
        return
    request = {name: getattr(arguments, name) for name in ("device", "quick", "minutes")}
    content = json.dumps({"asked": request, **results}, indent=1, default=str) + "\n"
    lines = [*table(results), "", *([] if arguments.quick else targets(results))]
    for path, text in ((file, content), (file.with_suffix(".md"), "\n".join(lines) + "\n")):
        temporary = path.with_name(path.name + ".new")
        temporary.write_text(text)
        shutil.move(temporary, path)


def lines_of(results: Results, indent: str = "  ") -> Iterator[str]:
    """Yield the lines that show a part's results."""
    for key, value in results.items():
        if isinstance(value, dict):
            yield f"{indent}{key}"
            yield from lines_of(value, indent + "  ")
        else:
            text = f"{value:.4g}" if isinstance(value, float) else value
            yield f"{indent}{key}: {text}"


def table(results: Results) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    facts = results.get("machine", {})
    device = facts.get("gpu") or facts.get("recorded", {}).get("device_name") or "?"
    yield f"Measured on {device}, PyTorch {facts.get('torch', '?')}."
    yield ""
    yield "| part | status | results |"
    yield "| --- | --- | --- |"
    for name, part in results.items():
        if name == "machine":
            continue
        status = next((word for word in ("failed", "left_out") if word in part), "ran")
        entries = [f"{key} {value}" for key, value in _flat(part) if key != "seconds"]
        text = "; ".join(entries).replace("|", "/").replace("\n", " ")
        title = f"{name.replace('_', ' ')} ({part.get('seconds', 0)} s)"
        yield f"| {title} | {status.replace('_', ' ')} | {text} |"


def _flat(results: Results, prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in results.items():
        name = f"{prefix} {key}".strip().replace("_", " ")
        if isinstance(value, dict):
            yield from _flat(value, name)
        else:
            yield name, f"{value:.4g}" if isinstance(value, float) else str(value)


def targets(results: Results) -> Iterator[str]:
    """Yield the lines of a table that compares results with targets for a large GPU."""
    sites, paths = results.get("site_measures", {}), results.get("closed_path", {})
    cpu, together = results.get("against_the_cpu", {}), sites.get("all", {})
    refined = results.get("refined_segments", {}).get("resnet18", {})
    exact = paths.get("exact", {})
    regions = cpu.get("regions")
    region_errors = [abs(b / a - 1) for a, b in zip(*regions, strict=True)] if regions else []
    value_errors = cpu.get("relative_difference", {}).values()
    identical = [v for v in results.get("repeated", {}).values() if isinstance(v, bool)]
    segment_seconds = refined.get("seconds_a_segment")
    limits: list[tuple[str, float | None, float]] = [
        ("six site measures on ResNet50, seconds per batch of 128", together.get("a_batch"), 0.1),
        ("six site measures on ResNet50, in forward passes", together.get("of_forward"), 2.0),
        ("closed path of VGG8, exact, seconds", exact.get("seconds"), 0.5),
        ("100 segments of ResNet18, seconds", segment_seconds and 100 * segment_seconds, 60.0),
        ("regions, relative difference from the CPU", max(region_errors, default=None), 1e-3),
        ("site values, relative difference from the CPU", max(value_errors, default=None), 1e-4),
        ("measures that a repetition changes", identical.count(False) if identical else None, 0),
    ]
    known = [(name, value, limit) for name, value, limit in limits if value is not None]
    if known:
        yield "| limit | result | |"
        yield "| --- | --- | --- |"
    for name, value, limit in known:
        yield f"| {name}: {limit:g} | {value:.3g} | {'reached' if value <= limit else 'missed'} |"


if __name__ == "__main__":
    sys.exit(main())
