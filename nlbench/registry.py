"""Names to objects, through entry points, without importing what is not asked for.

The groups are ``nlbench.measures``, ``nlbench.models``, ``nlbench.datasets``,
``nlbench.studies``, ``nlbench.recipes`` and ``nlbench.reports``. What ships with
nlbench comes through the same door as anybody's plugin.
"""

from __future__ import annotations

import ast
import fnmatch
import itertools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from nlbench.errors import NlbenchError, PluginError, RequestError, nearest

__all__ = ["GROUPS", "Entry", "describe", "entries", "expand", "load"]

GROUPS: Mapping[str, str] = {
    "measures": "measure",
    "models": "model",
    "datasets": "dataset",
    "studies": "study",
    "recipes": "recipe",
    "reports": "report",
}


@dataclass(frozen=True)
class Entry:
    """One registered name and who provides it.

    Parameters
    ----------
    group : str
        ``measures``, ``models``, ``datasets``, ….
    name : str
    claims : tuple of EntryPoint
        Usually one; several when plugins claim the same name.
    """

    group: str
    name: str
    claims: tuple[EntryPoint, ...]

    @property
    def providers(self) -> tuple[str, ...]:
        """Who provides the name: distribution and version."""
        return tuple(
            f"{point.dist.name} {point.dist.version}" if point.dist else point.value
            for point in self.claims
        )

    @property
    def conflict(self) -> str:
        """What is wrong when several plugins claim the name; else empty."""
        if len(self.claims) == 1:
            return ""
        claims = " and ".join(
            f"{who} ({point.value})" for who, point in zip(self.providers, self.claims, strict=True)
        )
        return f"{GROUPS[self.group]} '{self.name}' is claimed by {claims}; uninstall one of them"


def entries(group: str) -> dict[str, Entry]:
    """List what is registered in a group, by name. Nothing is imported.

    Parameters
    ----------
    group : str
        ``measures``, ``models``, ``datasets``, ``studies``, ``recipes`` or ``reports``.

    Examples
    --------
    >>> "affinity" in entries("measures")
    True
    """
    if group not in GROUPS:
        raise RequestError(f"there is no group '{group}'{nearest(group, GROUPS)}")
    claims: dict[str, dict[tuple[str, str], EntryPoint]] = {}
    for point in entry_points(group=f"nlbench.{group}"):
        # The same distribution is found twice where it lies on the path twice.
        owner = point.dist.name if point.dist else ""
        claims.setdefault(point.name, {}).setdefault((owner, point.value), point)
    return {name: Entry(group, name, tuple(claims[name].values())) for name in sorted(claims)}


def load(group: str, name: str) -> Any:
    """Import what a name stands for.

    Parameters
    ----------
    group : str
        See `entries`.
    name : str
        A registered name.

    Raises
    ------
    nlbench.RequestError
        If nothing of that name is registered; the message suggests the nearest.
    nlbench.PluginError
        If two plugins claim it, or its import fails.
    """
    known = entries(group)
    if name not in known:
        kind = GROUPS.get(group, group)
        raise RequestError(f"there is no {kind} '{name}'{nearest(name, known)}")
    entry = known[name]
    if entry.conflict:
        raise PluginError(entry.conflict)
    try:
        return entry.claims[0].load()
    except NlbenchError:
        raise
    except (Exception, SystemExit) as error:
        # A plugin's import can fail in any way; whichever way, it is named and stays alone.
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        where = f"{entry.providers[0]}, {entry.claims[0].value}"
        raise PluginError(f"{GROUPS[group]} '{name}' ({where}) can't be loaded: {what}") from error


def expand(group: str, patterns: Iterable[str]) -> list[str]:
    """Names that match the given names and globs, in the order given, each once.

    Raises
    ------
    nlbench.RequestError
        If a name is not registered or a glob matches nothing.

    Examples
    --------
    >>> expand("measures", ["r2", "a*"])
    ['r2', 'absdev', 'affinity']
    """
    known = entries(group)
    found: dict[str, None] = {}
    for pattern in patterns:
        matches = fnmatch.filter(known, pattern) if any(c in pattern for c in "*?[") else [pattern]
        if not matches:
            raise RequestError(f"no {GROUPS[group]} matches '{pattern}'{nearest(pattern, known)}")
        for name in matches:
            if name not in known:
                raise RequestError(f"there is no {GROUPS[group]} '{name}'{nearest(name, known)}")
            found.setdefault(name)
    return list(found)


def describe(entry: Entry) -> str:
    """First line of the docstring, read from the source file without importing it.

    Empty where there is no source to read.
    """
    point = entry.claims[0]
    try:
        spec = _find_spec(point.module)
        if spec is None or spec.origin is None:
            return ""
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError, ImportError):
        return ""
    name = point.attr.split(".")[0]
    for node, following in itertools.pairwise([*tree.body, ast.Pass()]):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return (ast.get_docstring(node) or "").partition("\n")[0]
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return _text_of(following).partition("\n")[0]
    return ""


def _text_of(node: ast.stmt) -> str:
    """Text that stands by itself, as the docstring of the constant above it does."""
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return str(node.value.value) if is_constant else ""  # type: ignore[attr-defined]


def _find_spec(module: str) -> ModuleSpec | None:
    """Find a module's file; unlike importlib's `find_spec`, import no parent package."""
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        locations = spec.submodule_search_locations if spec else None
        name = ".".join(parts[:depth])
        found = (finder.find_spec(name, locations) for finder in sys.meta_path)
        spec = next((candidate for candidate in found if candidate is not None), None)
        if spec is None:
            return None
    return spec
