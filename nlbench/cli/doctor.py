"""``nlbench doctor``."""

import importlib
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import typer

from nlbench import registry
from nlbench.errors import NlbenchError, PluginError, error_text

from .common import print_table
from .parameters import JsonFlag


def doctor(as_json: JsonFlag = False) -> None:
    """Check the installation, the machine and the data.

    Exit with status 1 if any is broken.
    """
    findings = []
    for finding in diagnose():
        findings.append(finding)
        if not as_json:
            print(f"{finding.state:<8} {finding.what:<20} {finding.detail}", flush=True)
    if as_json:
        print_table([asdict(finding) for finding in findings], as_json)
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(1)


State = Literal["ok", "optional", "broken"]

EXTRAS = {
    "dask": ("dask", "distributed"),
    "timm": ("timm",),
    "translation": ("sacrebleu", "tokenizers"),
}
"""The package's extras and the modules each one installs."""


@dataclass(frozen=True)
class Finding:
    """The state of one part of the installation."""

    what: str
    # ok, optional or broken; what is optional is missing but needed only for some features.
    state: State
    detail: str  # versions and sizes, or how to repair or install the part


def diagnose() -> Iterator[Finding]:
    """Check the installation, the machine, the plugins and the data.

    PyTorch and all plugins are imported; a plugin that fails to import counts as broken.
    """
    yield Finding("python", "ok", f"{platform.python_version()}, {sys.executable}")
    yield from _check_packages()
    yield from _check_devices()
    yield from _check_machine()
    yield from _check_plugins()
    yield from _check_data()


def _check_packages() -> Iterator[Finding]:
    for name in ("nlbench", "torch", "torchvision", "numpy", "scipy", "pandas"):
        try:
            yield Finding(name, "ok", version(name))
        except PackageNotFoundError:
            yield Finding(name, "broken", f"not installed: pip install {name}")
    for extra, modules in EXTRAS.items():
        absent = [name for name in modules if importlib.util.find_spec(name) is None]
        if absent:
            hint = f"no {', '.join(absent)}: pip install 'nlbench[{extra}]'"
            yield Finding(f"extra {extra}", "optional", hint)
        else:
            yield Finding(f"extra {extra}", "ok", ", ".join(modules))


def _check_devices() -> Iterator[Finding]:
    import torch

    from nlbench.introspection.threads import default_threads

    yield Finding(
        "cpu",
        "ok",
        f"{os.cpu_count()} cores, {torch.get_num_threads()} PyTorch threads, "
        f"{default_threads()} per cell",
    )
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            memory = f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free"
            detail = f"{torch.cuda.get_device_name(index)}, {memory}"
            yield Finding(f"cuda:{index}", "ok", detail)
    else:
        has_cuda = torch.version.cuda
        reason = "no device is visible" if has_cuda else "PyTorch was built without CUDA support"
        yield Finding("cuda", "optional", f"{reason}: networks run on the CPU")
    if torch.backends.mps.is_available():
        yield Finding("mps", "ok", "no double precision: most measures require the CPU")


def _check_machine() -> Iterator[Finding]:
    import psutil

    memory = psutil.virtual_memory()
    yield Finding(
        "memory", "ok", f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free"
    )
    folder = Path.cwd()
    state: State = "ok" if os.access(folder, os.W_OK) else "broken"
    free = shutil.disk_usage(folder).free / 1e9
    detail = f"{free:.1f} GB free" if state == "ok" else "not writable: set --out"
    yield Finding("folder", state, f"{folder}: {detail}")


def _check_plugins() -> Iterator[Finding]:
    for problem in registry.installed()[1]:
        yield Finding("entry points", "broken", problem)
    for group, kind in registry.GROUPS.items():
        entries = registry.entries(group)
        families = registry.families(group)
        problems = {e.name: e.conflict for e in (*entries.values(), *families.values())}
        for prefix, entry in families.items():
            if entry.family is None and not entry.conflict:
                problems[entry.name] = _load_problem(registry.load, group, f"{prefix}/*")
        detail = f"{len(entries)} registered"
        if group == "measures":
            from nlbench.measure.contract import load_measure

            problems |= {n: problems[n] or _load_problem(load_measure, n) for n in entries}
            detail += f", {sum(not problems[name] for name in entries)} usable"
        for name, problem in problems.items():
            if problem:
                yield Finding(f"{kind} {name}", "broken", problem)
        yield Finding(group, "ok", detail)


def _load_problem(load: Callable[..., object], *arguments: str) -> str:
    """Return the error that a function raises. Empty if it raises none."""
    try:
        load(*arguments)
    except NlbenchError as error:
        return str(error)
    return ""


def _check_data() -> Iterator[Finding]:
    from nlbench.subjects.data import dataset_info

    root = os.environ.get("NLBENCH_DATA", "")
    if not root:
        yield Finding("NLBENCH_DATA", "optional", "not set: folder with downloaded datasets")
    elif not Path(root).is_dir():
        yield Finding("NLBENCH_DATA", "broken", f"{root} is not a folder")
    else:
        yield Finding("NLBENCH_DATA", "ok", root)
    for name in registry.entries("datasets"):
        try:
            info = dataset_info(registry.load("datasets", name))
            if info.fingerprint is not None:
                info.fingerprint(**{key: option.default for key, option in info.options.items()})
            yield Finding(f"dataset {name}", "ok", "available")
        except Exception as error:
            # A plugin may raise any exception.
            is_absent = isinstance(error, NlbenchError) and not isinstance(error, PluginError)
            yield Finding(
                f"dataset {name}", "optional" if is_absent else "broken", error_text(error)
            )
