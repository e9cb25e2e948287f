"""Whether a plan made earlier still holds, found out without importing a plugin.

A plan depends on the request, on the plugins that it names and on files. It is kept in the
run's folder with stamps of all three; while they match, a finished run is taken up again in
a moment.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Container, Iterable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nlbench import registry
from nlbench.data import dataset_info
from nlbench.errors import NlbenchError
from nlbench.files import write_atomically
from nlbench.model import model_info
from nlbench.plan import Plan
from nlbench.registry import find_source
from nlbench.request import Request

__all__ = ["PLAN", "keep_plan", "kept_plan"]

PLAN = "plan.json"
FORMAT = 2

Stamp = list[int] | None


def keep_plan(folder: Path, request: Request, plan: Plan) -> None:
    """Write a plan with its stamps into a run's folder."""
    content = {
        "format": FORMAT,
        "request": _request(request),
        "here": _here(),
        "plugins": _plugins(request),
        "files": {path: _stamp(path) for path in _files(plan)},
        "prints": _prints(plan, {target.spec.data for target in plan.targets}),
        "plan": plan.to_dict(),
    }
    text = json.dumps(content) + "\n"
    file = folder / PLAN
    # Left alone where nothing has changed: the folder may be read-only.
    if not file.is_file() or file.read_text(encoding="utf-8") != text:
        write_atomically(file, text)


def kept_plan(folder: Path, request: Request) -> Plan | None:
    """Give the plan kept for a request; None if there is none or something has changed."""
    try:
        content = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        if content["format"] != FORMAT or content["request"] != _request(request):
            return None
        if content["here"] != _here() or content["plugins"] != _plugins(request):
            return None
        if any(_stamp(path) != stamp for path, stamp in content["files"].items()):
            return None
        plan = Plan.of(content["plan"])
        return plan if content["prints"] == _prints(plan, content["prints"]) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, NlbenchError):
        # Damaged, of another version, or about plugins that are gone: a new plan is made.
        return None


def _request(request: Request) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(asdict(request), sort_keys=True))
    return plain


def _here() -> dict[str, Any]:
    """What decides which device ``auto`` means, and what plugins may look at."""
    return {
        "python": platform.python_version(),
        "torch": _version("torch"),
        "nlbench": _version("nlbench"),
        "core": _sources(Path(__file__).parent, "**/*.py"),
        "nvidia": Path("/dev/nvidiactl").exists(),
        "node": platform.node(),
        "variables": {
            name: os.environ.get(name)
            for name in (
                "CUDA_VISIBLE_DEVICES",
                "NLBENCH_DATA",
                "TORCH_HOME",
                "HF_HOME",
                "XDG_CACHE_HOME",
            )
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _plugins(request: Request) -> dict[str, dict[str, Any]]:
    """Who provides each name, and the state of the source files beside it."""
    names = {"measures": request.measures, "models": request.models, "datasets": request.data}
    sources: dict[str, list[list[Any]]] = {}
    found: dict[str, dict[str, Any]] = {}
    for group, patterns in names.items():
        known = registry.entries(group)
        found[group] = {}
        for name in registry.expand(group, patterns):
            entry = known[name]
            found[group][name] = [list(entry.providers), [p.value for p in entry.claims]]
            for point in entry.claims:
                for module in (point.module, point.module.partition(".")[0]):
                    if module not in sources:
                        sources[module] = _sources_of(module)
    return {**found, "sources": sources}


def _sources_of(module: str) -> list[list[Any]]:
    """State of the files that a module may use: its package's, or those beside it."""
    spec = find_source(module)
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        folders = [Path(place) for place in spec.submodule_search_locations]
        return [row for folder in folders for row in _sources(folder, "**/*.py")]
    if spec.origin is None:
        return []
    # The module's own file may be a compiled one.
    own = [spec.origin, *(_stamp(spec.origin) or [])]
    return [own, *_sources(Path(spec.origin).parent, "*.py")]


def _sources(folder: Path, pattern: str) -> list[list[Any]]:
    return [[str(file), *(_stamp(str(file)) or [])] for file in sorted(folder.glob(pattern))]


def _stamp(path: str) -> Stamp:
    try:
        state = Path(path).stat()
    except OSError:
        return None
    # A copy may keep the time of its original; its number and time of change are its own.
    return [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]


def _files(plan: Plan) -> Iterable[str]:
    """Checkpoints that the plan's weights came from, or would come from if they were there."""
    for target in plan.targets:
        spec = target.spec
        if spec.weights in ("auto", "trained"):
            trained = model_info(registry.load("models", spec.model)).trained
            if spec.data in trained:
                yield str(Path(trained[spec.data]).absolute())
        elif spec.weights != "init":
            yield str(Path(spec.weights).absolute())


def _prints(plan: Plan, names: Container[str]) -> dict[str, Any]:
    """Fingerprints of those of the named datasets that have any; the others aren't imported."""
    prints: dict[str, Any] = {}
    for target in plan.targets:
        spec = target.spec
        if spec.data in names and spec.data not in prints:
            of = dataset_info(registry.load("datasets", spec.data)).fingerprint
            if of is not None:
                try:
                    prints[spec.data] = str(of(**dict(spec.options)))
                except (Exception, SystemExit) as error:
                    prints[spec.data] = f"none: {error}"
    return prints
