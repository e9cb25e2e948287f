"""Say in ten minutes whether nlbench is right on a GPU, and what it costs there.

``make gpu`` runs all of it; each part is timed, fails alone, and is left out once the minutes
are spent. Prints a table and writes it as JSON beside this file. Ratios are what counts: each
compares two things measured in turn in this run.

On a machine without a GPU ``--device cpu --quick`` runs the same parts on small networks, to see
that they work; nothing is written then.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

import nlbench
from nlbench.execution.numerics import exact_arithmetic
from nlbench.probes.lines import trace_segments
from nlbench.probes.lines.refined import estimate_segment

SITE_MEASURES = ("affinity", "r2", "cka", "norm", "sparsity", "entropy")
MINUTES = 10.0

Found = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """Where the parts run, and how large.

    Parameters
    ----------
    device : torch.device
    quick : bool
        Whether small networks stand for large ones.
    """

    device: torch.device
    quick: bool

    @property
    def pixels(self) -> int:
        """Edge of ImageNet's images."""
        return 64 if self.quick else 224

    def network(self) -> nn.Module:
        """One for what is asked many times; the same weights at each call."""
        torch.manual_seed(0)
        if self.quick:
            layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10)
            return nn.Sequential(*layers).eval().to(self.device)
        return torchvision.models.resnet18(weights=None).eval().to(self.device)

    @property
    def small(self) -> Tensor:
        """Images for what is asked many times."""
        count, edge = (16, 16) if self.quick else (64, 64)
        return torch.randn(count, 3, edge, edge, device=self.device)

    @property
    def batch(self) -> int:
        """Samples a batch."""
        return 8 if self.quick else 128


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """Give the median of some runs, after one that warms up."""
    call()
    taken = []
    for _ in range(repeats):
        wait(device)
        begin = time.perf_counter()
        call()
        wait(device)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def waits(call: Callable[[], object], device: torch.device) -> int:
    """Count how often a call makes the host wait for the device."""
    if device.type != "cuda":
        return 0
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in said)


def machine(setting: Setting) -> Found:
    """What the numbers were made on."""
    found: Found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "cores": os.cpu_count(),
    }
    if setting.device.type == "cuda":
        properties = torch.cuda.get_device_properties(setting.device)
        found |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return found


def tests(setting: Setting) -> Found:
    """Those marked ``gpu``."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    environment = {**os.environ, "OMP_NUM_THREADS": "4"}
    done = subprocess.run(
        [*command, str(Path(__file__).parent.parent / "tests")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
    )
    lines = done.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"status": done.returncode, "summary": lines[-1] if lines else "", "failed": failed}


@contextlib.contextmanager
def flags(matmul: bool, cudnn: bool, precision: str) -> Iterator[None]:
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


def older_flags() -> tuple[bool, bool]:
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
NEWER = ((), ("all",), ("matmul",), ("conv", "rnn"), ("all", "matmul", "conv", "rnn"))


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


def short_cuts(setting: Setting) -> Found:
    """TF32: the numbers are the same whatever flags a user has set, and the flags stay."""
    model, inputs = setting.network(), setting.small
    found = {}

    def look(name: str, settings: Callable[[], object]) -> None:
        asked = settings()
        run = nlbench.evaluate(model, inputs, ["norm", "nlc"])
        values = [run[name].summary["value"] for name in ("norm", "nlc")]
        found[name] = {"values": values, "kept": asked == settings()}

    # First the newer ones: the older change what convolutions inherit, for good.
    for settings in NEWER if hasattr(torch.backends, "fp32_precision") else ():
        with newer_flags(settings):
            look(" ".join(settings), lambda: [read() for _, read, _ in NEWER_FLAGS])
    for matmul, cudnn, precision in itertools.product(
        (False, True), (False, True), ("highest", "high")
    ):
        with flags(matmul, cudnn, precision):
            look(f"{matmul} {cudnn} {precision}", older_flags)
    values = [tuple(one["values"]) for one in found.values()]
    spread = max(abs(a / b - 1) for one in values for a, b in zip(one, values[0], strict=True))
    return {"largest_difference": spread, "kept": all(one["kept"] for one in found.values())}


def linear_algebra(setting: Setting) -> Found:
    """Double-precision decompositions: seconds on the CPU over seconds on the device."""
    found = {}
    for size in (64, 128) if setting.quick else (128, 512, 1024, 2048):
        matrix = torch.randn(size, 2 * size, dtype=torch.float64)
        here = matrix @ matrix.T / size
        there = here.to(setting.device)
        for name in ("eigh", "cholesky"):
            call = getattr(torch.linalg, name)
            cpu = seconds(lambda call=call, here=here: call(here), torch.device("cpu"))
            gpu = seconds(lambda call=call, there=there: call(there), setting.device)
            found[f"{name} {size}"] = {"cpu": cpu, "device": gpu, "ratio": cpu / gpu}
    return found


def convolutions(setting: Setting) -> Found:
    """What a convolution costs in double precision, against single."""
    taken = {}
    for dtype in (torch.float32, torch.float64):
        layer = nn.Conv2d(64, 64, 3, padding=1).to(setting.device, dtype)
        given = torch.randn(setting.batch, 64, 28, 28, device=setting.device, dtype=dtype)

        def call(layer: nn.Module = layer, given: Tensor = given) -> None:
            with torch.no_grad(), exact_arithmetic():
                layer(given)

        taken[dtype] = seconds(call, setting.device)
    return {
        "float32": taken[torch.float32],
        "float64": taken[torch.float64],
        "ratio": taken[torch.float64] / taken[torch.float32],
    }


def site_measures(setting: Setting) -> Found:
    """ResNet50 with each site measure and with all, against its forward pass; and its waits."""
    torch.manual_seed(0)
    build = torchvision.models.resnet18 if setting.quick else torchvision.models.resnet50
    model = build(weights=None).eval().to(setting.device)
    shape = (2 * setting.batch, 3, setting.pixels, setting.pixels)
    inputs = torch.randn(shape, device=setting.device)
    options = {"sites.batch": setting.batch}

    def forward() -> None:
        with torch.no_grad(), exact_arithmetic():
            for batch in torch.split(inputs, setting.batch):
                model(batch)

    bare = seconds(forward, setting.device)
    found: Found = {"forward_a_batch": bare / 2}
    for measures in (*((name,) for name in SITE_MEASURES), SITE_MEASURES):
        name = measures[0] if len(measures) == 1 else "all"

        def call(measures: tuple[str, ...] = measures) -> None:
            run = nlbench.evaluate(model, inputs, list(measures), settings=options)
            failed = [record.result.reason for record in run.failed]
            if failed:
                raise RuntimeError(failed[0])

        taken = seconds(call, setting.device, repeats=1)
        found[name] = {"a_batch": taken / 2, "of_forward": taken / bare}
    found["waits_a_batch"] = waits(call, setting.device) / 2
    return found


def closed_path(setting: Setting) -> Found:
    """A closed path of the trained VGG8 on digits: exact and refined, counts and seconds."""
    found: Found = {}
    for method in ("exact", "refined"):
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable, "-m", "nlbench.cli.app", "run", "--measures", "density,absdev",
                "--model", "vgg8", "--device", str(setting.device), "--no-report", "--out",
                f"{folder}/run", "--set", f"lines.method={method}", "--set", "lines.number=1",
            ]  # fmt: skip
            if setting.quick:
                command += ["--set", "lines.anchors=2"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=240)
            if done.returncode:
                raise RuntimeError(done.stderr.strip().splitlines()[-1])
            run = nlbench.load_run(f"{folder}/run")
        found[method] = {
            "density": run["density"].summary["value"],
            "absdev": run["absdev"].summary["value"],
            "seconds": run.records[0].costs["wall_seconds"],
        }
    return found


def exact_against_the_cpu(setting: Setting) -> Found:
    """Segments of a residual network: the same regions and values as on the CPU."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(8 * 64, 64), nn.ReLU(), nn.Linear(64, 10),
    ).eval()  # fmt: skip
    starts, ends = torch.rand(2, 4, 3, 16, 16)
    here = list(trace_segments(model, starts, ends))
    there = list(
        trace_segments(
            copy.deepcopy(model).to(setting.device),
            starts.to(setting.device),
            ends.to(setting.device),
        )
    )
    return {
        "regions_here": [trace.regions for trace in here],
        "regions_there": [trace.regions for trace in there],
        "largest_difference": max(
            float((a.values[[0, -1]] - b.values.cpu()[[0, -1]]).abs().max())
            for a, b in zip(here, there, strict=True)
        ),
    }


def refined_segments(setting: Setting) -> Found:
    """Estimates at ImageNet's size: seconds a segment, an image and itself moved by a pixel."""
    found = {}
    for name in ("resnet18",) if setting.quick else ("resnet18", "vgg16", "resnet50"):
        torch.manual_seed(0)
        model = torchvision.models.get_model(name, weights=None).eval().to(setting.device)
        start = torch.rand(3, setting.pixels, setting.pixels, device=setting.device)
        end = start.roll(1, 2)
        tolerance = 1e-2 if setting.quick else 1e-3
        first = estimate_segment(model, start, end, tolerance=tolerance)
        begin = time.perf_counter()
        done = 0
        while done < 100 and time.perf_counter() - begin < (1 if setting.quick else 20):
            moved = torch.rand_like(start)
            estimate_segment(model, moved, moved.roll(1, 2), tolerance=tolerance)
            done += 1
        found[name] = {
            "crossings": float(first.crossings),
            "at_least": int(first.at_least),
            "error": float(first.error),
            "evaluations": int(first.evaluations),
            "segments": done,
            "seconds_a_segment": (time.perf_counter() - begin) / max(done, 1),
        }
    return found


def little_memory(setting: Setting) -> Found:
    """A twentieth of the card: batches are halved, and the numbers are those of whole ones."""
    if setting.device.type != "cuda":
        return {"left_out": "needs a GPU"}
    torch.manual_seed(0)
    model = torchvision.models.resnet50(weights=None).eval().to(setting.device)
    inputs = torch.randn(512, 3, 224, 224)
    options = {"sites.batch": 512, "sites.select": "every:8"}
    whole = nlbench.evaluate(model, inputs, ["norm", "cka"], settings=options)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.05, setting.device)
    try:
        parts = nlbench.evaluate(model, inputs, ["norm", "cka"], settings=options)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, setting.device)
    return {
        name: {
            "status": parts[name].status,
            "reason": parts[name].reason,
            "difference": abs(
                parts[name].summary.get("value", float("nan")) / whole[name].summary["value"] - 1
            ),
        }
        for name in ("norm", "cka")
    }


def command_line(folder: str, setting: Setting, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "nlbench.cli.app", "run", "--measures", "affinity,cka,norm",
        "--model", "vgg8,resnet18-w4", "--weights", "init", "--seeds", "0,1", "--no-report",
        "--device", str(setting.device), "--out", folder, *more,
    ]  # fmt: skip


def workers(setting: Setting) -> Found:
    """Two workers, one of which is killed: nothing is lost, and the table is the serial one's."""
    with tempfile.TemporaryDirectory() as folder:
        serial, beside = f"{folder}/serial", f"{folder}/beside"
        subprocess.run(command_line(serial, setting), capture_output=True, check=True, timeout=200)
        options = ("--executor", "processes", "--workers", "2")
        with subprocess.Popen(
            command_line(beside, setting, *options),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as running:
            killed = _kill_a_child(running.pid, 30.0)
            status = running.wait(timeout=200)
        again = subprocess.run(command_line(beside, setting, *options), capture_output=True)
        tables = [(Path(run) / "scores.csv").read_text() for run in (serial, beside)]
    return {
        "killed": killed,
        "status": status,
        "status_again": again.returncode,
        "same_table": tables[0] == tables[1],
    }


def _kill_a_child(parent: int, patience: float) -> bool:
    import psutil

    end = time.monotonic() + patience
    while time.monotonic() < end:
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(parent).children()
            if children:
                time.sleep(2.0)
                children[-1].send_signal(signal.SIGKILL)
                return True
        time.sleep(0.1)
    return False


def repeated(setting: Setting) -> Found:
    """The same twice: whether it is identical to the last digit."""
    model, inputs = setting.network(), setting.small
    names = [*SITE_MEASURES, "nlc"]
    one, two = (nlbench.evaluate(model, inputs, names) for _ in range(2))
    return {name: one[name].summary == two[name].summary for name in names}


def interrupted_training(setting: Setting) -> Found:
    """A training that Ctrl-C ends, and the same command again."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "nlbench.cli.app", "train", "--model", "vgg8", "--device",
            str(setting.device), "--epochs", "3", "--out", f"{folder}/weights.safetensors",
        ]  # fmt: skip
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(12.0)
            if running.poll() is None:
                running.send_signal(signal.SIGINT)
            status = running.wait(60)
        again = subprocess.run(command, capture_output=True, text=True, timeout=200)
        exists = Path(folder, "weights.safetensors").is_file()
    return {"status": status, "status_again": again.returncode, "weights": exists}


PARTS: dict[str, Callable[[Setting], Found]] = {
    "machine": machine,
    "exact_against_the_cpu": exact_against_the_cpu,
    "short_cuts": short_cuts,
    "repeated": repeated,
    "site_measures": site_measures,
    "closed_path": closed_path,
    "refined_segments": refined_segments,
    "linear_algebra": linear_algebra,
    "convolutions": convolutions,
    "little_memory": little_memory,
    "workers": workers,
    "interrupted_training": interrupted_training,
    "tests": tests,
}
"""In the order of what would be missed most if time runs out."""


def shown(found: Found, indent: str = "  ") -> Iterator[str]:
    """Give a part's lines."""
    for key, value in found.items():
        if isinstance(value, dict):
            yield f"{indent}{key}"
            yield from shown(value, indent + "  ")
        else:
            text = f"{value:.4g}" if isinstance(value, float) else value
            yield f"{indent}{key}: {text}"


def main() -> int:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--device", default="cuda:0")
    given.add_argument("--quick", action="store_true")
    given.add_argument("--parts", default=",".join(PARTS))
    given.add_argument("--minutes", type=float, default=MINUTES)
    asked = given.parse_args()
    device = torch.device(asked.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here; --device cpu --quick tries the parts without one")
        return 2
    setting = Setting(device, asked.quick)
    begin = time.monotonic()
    results: Found = {}
    file = Path(__file__).with_suffix(".json")
    signal.signal(signal.SIGALRM, _out_of_time)
    for name in asked.parts.split(","):
        started = time.monotonic()
        left = 60 * asked.minutes - (started - begin)
        if left <= 0:
            results[name] = {"left_out": "no time left"}
            continue
        try:
            signal.setitimer(signal.ITIMER_REAL, left)
            found = PARTS[name](setting)
        except OutOfTime:
            found = {"left_out": "no time left to end it"}
        except Exception as error:
            # One part's failure is a finding, and the others go on.
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {error}"}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        results[name] = {**found, "seconds": round(time.monotonic() - started, 1)}
        print(f"{name} ({results[name]['seconds']} s)", *shown(found), sep="\n", flush=True)
        if device.type == "cuda":
            # Part by part: what was found is there if the machine isn't any more.
            file.write_text(json.dumps(results, indent=1) + "\n")
            torch.cuda.empty_cache()
    print("", *table(results), sep="\n")
    if device.type == "cuda":
        print(f"written to {file.name}")
    return int(any("failed" in found for found in results.values()))


class OutOfTime(BaseException):
    """The minutes are spent; whatever is at work ends, and takes it for no error of its own."""


def _out_of_time(number: int, frame: object) -> None:
    raise OutOfTime


def table(results: Found) -> Iterator[str]:
    """Give the results as a table in Markdown, for README."""
    about = results.get("machine", {})
    yield f"Measured on {about.get('gpu', 'a CPU')}, PyTorch {about.get('torch', '?')}."
    yield ""
    yield "| what | result |"
    yield "| --- | --- |"
    for name, found in results.items():
        if name == "machine":
            continue
        told = [f"{key} {value}" for key, value in _flat(found) if key != "seconds"]
        yield f"| {name.replace('_', ' ')} ({found.get('seconds', 0)} s) | {'; '.join(told)} |"


def _flat(found: Found, above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in found.items():
        name = f"{above} {key}".strip().replace("_", " ")
        if isinstance(value, dict):
            yield from _flat(value, name)
        else:
            yield name, f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
