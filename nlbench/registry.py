"""Names to objects, through entry points, without importing what is not asked for.

The groups are ``nlbench.measures``, ``nlbench.probes``, ``nlbench.models``, ``nlbench.datasets``,
``nlbench.studies``, ``nlbench.recipes``, ``nlbench.reports``, ``nlbench.transforms``,
``nlbench.commands`` and ``nlbench.ops``.
What ships with nlbench comes through the same door as anybody's plugin.

An entry point whose name ends in ``/*`` is a family: one object that knows many names,
as those of another library. Its members are called ``family/member``.
"""

from __future__ import annotations

import ast
import contextlib
import fnmatch
import itertools
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from nlbench.errors import (
    NlbenchError,
    PluginError,
    RequestError,
    error_text,
    nearest,
    one_line,
    shown,
    system_text,
)

__all__ = [
    "GROUPS",
    "Entry",
    "Family",
    "about",
    "describe",
    "entries",
    "entry_points",
    "expand",
    "families",
    "find",
    "find_source",
    "installed",
    "load",
    "version_of",
]


class Family(ABC):
    """Many names behind one entry point called ``NAME/*``.

    Its class is registered; it is imported whenever its group is listed, so its module
    imports no more than the standard library and nlbench until a member is loaded.

    Attributes
    ----------
    description : str
        One line, for the listing.
    costly : bool
        Whether `names` imports the library. It is then asked only for a glob that names
        the family, and when all members are to be listed.
    """

    description: str = ""
    costly: bool = False

    @abstractmethod
    def names(self) -> Sequence[str]:
        """Names of the members, without the family's; none where they can't be counted."""

    @abstractmethod
    def load(self, name: str) -> Any:
        """Give what a member's name stands for.

        Raises
        ------
        nlbench.RequestError
            If there is no such member, or the library isn't installed.
        """

    def describe(self, name: str) -> str:
        """Say in one line what a member is; nothing is imported for it."""
        return ""

    def providers(self) -> tuple[str, ...]:
        """Libraries, with versions, that decide what a member is."""
        return ()


GROUPS: Mapping[str, str] = {
    "measures": "measure",
    "probes": "probe",
    "models": "model",
    "datasets": "dataset",
    "studies": "study",
    "recipes": "recipe",
    "transforms": "transform",
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
    family : Family or None
        Whose member it is.
    """

    group: str
    name: str
    claims: tuple[EntryPoint, ...]
    family: Family | None = None

    @property
    def providers(self) -> tuple[str, ...]:
        """Who provides the name: distribution and version."""
        return tuple(map(_provider, self.claims)) + (self.family.providers() if self.family else ())

    @property
    def conflict(self) -> str:
        """What is wrong with who claims the name; else empty.

        Several plugins claim it, or the entry point of the one that does can't be read.
        """
        if len(self.claims) == 1:
            (point,) = self.claims
            if _is_readable(point):
                return ""
            return (
                f"{GROUPS[self.group]} '{self.name}' of {self.providers[0]} has the malformed "
                f"entry point '{point.value}', expected MODULE:OBJECT"
            )
        claims = " and ".join(
            f"{who} ({point.value})"
            for who, point in zip(self.providers, self.claims, strict=False)
        )
        return f"{GROUPS[self.group]} '{self.name}' is claimed by {claims}; uninstall one of them"


def entries(group: str) -> dict[str, Entry]:
    """List what is registered in a group, by name. No plugin but a family is imported.

    The members of a costly family aren't listed, though `find` finds them.

    Parameters
    ----------
    group : str
        ``measures``, ``models``, ``datasets``, ``studies``, ``recipes`` or ``reports``.

    Examples
    --------
    >>> "affinity" in entries("measures"), "torchvision/resnet18" in entries("models")
    (True, True)
    """
    points = _points(group)
    listed = {name: claims for name, claims in points.items() if not name.endswith("/*")}
    found = {name: Entry(group, name, claims) for name, claims in listed.items()}
    for prefix, entry in _families(group, points).items():
        if entry.family is not None and not entry.family.costly:
            for member in entry.family.names():
                name = f"{prefix}/{member}"
                claims = listed.get(name, ()) + entry.claims
                found[name] = Entry(group, name, claims, entry.family)
    return dict(sorted(found.items()))


def families(group: str) -> dict[str, Entry]:
    """List the families of a group, by the name before the slash.

    A family that can't be imported is there too, without its members.

    Examples
    --------
    >>> {"timm", "torchvision"} <= set(families("models"))
    True
    """
    return _families(group, _points(group))


def find(group: str, name: str) -> Entry:
    """Find a registered name, or a family's member; no other plugin is imported.

    Raises
    ------
    nlbench.RequestError
        If nothing of that name is registered; the message suggests the nearest.
    """
    points = _points(group)
    prefix, slash, member = name.partition("/")
    claims = () if name.endswith("/*") else points.get(name, ())
    owner = f"{prefix}/*"
    if slash and member and owner in points:
        entry = _families(group, {owner: points[owner]})[prefix]
        if not claims or _lists(entry.family, member):
            return Entry(group, name, claims + entry.claims, entry.family)
    if not claims:
        hint = nearest(name, entries(group))
        raise RequestError(f"there is no {GROUPS[group]} '{shown(name)}'{hint}")
    return Entry(group, name, claims)


def _lists(family: Family | None, member: str) -> bool:
    return family is not None and not family.costly and member in family.names()


def load(group: str, name: str) -> Any:
    """Import what a name stands for.

    Parameters
    ----------
    group : str
        See `entries`.
    name : str
        A registered name, or ``family/member``.

    Raises
    ------
    nlbench.RequestError
        If nothing of that name is registered; the message suggests the nearest.
    nlbench.PluginError
        If two plugins claim it, or its import fails.
    """
    entry = find(group, name)
    if entry.conflict:
        raise PluginError(entry.conflict)
    try:
        # A family that couldn't be imported before fails here, where it can be said.
        loaded = entry.claims[0].load() if entry.family is None else entry.family
        is_family = entry.claims[0].name.endswith("/*")
        return _family_of(loaded).load(name.partition("/")[2]) if is_family else loaded
    except NlbenchError:
        raise
    except (Exception, SystemExit) as error:
        # A plugin's import can fail in any way; whichever way, it is named and stays alone.
        where = f"{GROUPS[group]} '{name}' ({entry.providers[0]}, {entry.claims[0].value})"
        raise PluginError(f"{where} can't be loaded: {error_text(error)}") from error


def expand(group: str, patterns: Iterable[str]) -> list[str]:
    """Names that match the given names and globs, in the order given, each once.

    A glob without a slash matches no family's members; one that names a family, as
    ``torchvision/resnet*``, matches its members only.

    Raises
    ------
    nlbench.RequestError
        If a name is not registered or a glob matches nothing.

    Examples
    --------
    >>> expand("measures", ["r2", "a[bf]*"])
    ['r2', 'absdev', 'affinity']
    """
    known: dict[str, Entry] | None = None
    found: dict[str, None] = {}
    for pattern in patterns:
        if not any(c in pattern for c in "*?["):
            found.setdefault(find(group, pattern).name)
            continue
        known = entries(group) if known is None else known
        names = [*known, *_costly_names(group, pattern)]
        slashes = pattern.count("/")
        matches = [n for n in fnmatch.filter(names, pattern) if n.count("/") == slashes]
        if not matches:
            hint = nearest(pattern, names)
            raise RequestError(f"no {GROUPS[group]} matches '{shown(pattern)}'{hint}")
        found.update(dict.fromkeys(matches))
    return list(found)


def entry_points(group: str) -> tuple[EntryPoint, ...]:
    """List the installed entry points of a group.

    Parameters
    ----------
    group : str
        In full, such as ``nlbench.measures``.

    Examples
    --------
    >>> "affinity" in [point.name for point in entry_points("nlbench.measures")]
    True
    """
    return tuple(point for point in installed()[0] if point.group == group)


def version_of(distribution: str) -> str | None:
    """Version of an installed distribution; None where it isn't installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def installed() -> tuple[tuple[EntryPoint, ...], tuple[str, ...]]:
    """List the entry points of all groups of nlbench, and say a line each of what can't be read.

    Reading what is installed takes milliseconds; it is done again only when the search path has
    changed, or a folder on it, as an installation does.
    """
    return _installed(tuple((path, _changed(path)) for path in sys.path))


@lru_cache(maxsize=4)
def _installed(
    _path: tuple[tuple[str, int], ...],
) -> tuple[tuple[EntryPoint, ...], tuple[str, ...]]:
    found: dict[str, Sequence[EntryPoint]] = {}
    problems = []
    for distribution in metadata.distributions():
        name = _key_of(distribution)
        if name in found:
            continue  # The first one on the path counts.
        found[name] = ()
        try:
            # Most have nothing for nlbench; to look for that is quicker than to parse it.
            if "[nlbench." in (distribution.read_text("entry_points.txt") or ""):
                found[name] = tuple(distribution.entry_points)
        except Exception as error:
            # Whatever is wrong with one file, the others are read without it.
            problems.append(
                f"the entry points of {about(distribution)[0]} can't be read "
                f"({one_line(system_text(error))}); mend its "
                "entry_points.txt or uninstall it"
            )
    points = itertools.chain.from_iterable(found.values())
    return tuple(p for p in points if p.group.startswith("nlbench.")), tuple(problems)


@lru_cache(maxsize=1024)
def about(distribution: metadata.Distribution) -> tuple[str, str]:
    """Name and version of a distribution; its metadata are a mail's headers, slow to parse."""
    try:
        name, version = distribution.name, distribution.version
    except Exception:
        # Without readable metadata the folder's name has to do.
        name = version = ""
    return name or _folder_of(distribution), version or ""


def _key_of(distribution: metadata.Distribution) -> str:
    """What two installations of one distribution share, however its name is spelled."""
    folder = getattr(distribution, "_path", None)
    is_named = getattr(folder, "suffix", "") in (".dist-info", ".egg-info")
    # The folder's name is there without parsing metadata.
    name = _folder_of(distribution).partition("-")[0] if is_named else about(distribution)[0]
    return re.sub(r"[-_.]+", "_", name).lower()


def _folder_of(distribution: metadata.Distribution) -> str:
    """Name of the folder with its metadata: what is known without parsing or even having them."""
    return str(getattr(getattr(distribution, "_path", None), "stem", distribution))


def _provider(point: EntryPoint) -> str:
    return " ".join(about(point.dist)).rstrip() if point.dist else point.value


def _is_readable(point: EntryPoint) -> bool:
    return point.pattern.match(point.value) is not None


def _changed(path: str) -> int:
    try:
        return Path(path or ".").stat().st_mtime_ns
    except OSError:
        return 0


def _points(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Entry points of a group by name, each distribution's claim once."""
    if group not in GROUPS:
        raise RequestError(f"there is no group '{group}'{nearest(group, GROUPS)}")
    claims: dict[str, dict[tuple[str, str], EntryPoint]] = {}
    for point in entry_points(group=f"nlbench.{group}"):
        # The same distribution is found twice where it lies on the path twice.
        owner = about(point.dist)[0] if point.dist else ""
        claims.setdefault(point.name, {}).setdefault((owner, point.value), point)
    return {name: tuple(claims[name].values()) for name in sorted(claims)}


def _families(group: str, points: Mapping[str, tuple[EntryPoint, ...]]) -> dict[str, Entry]:
    found = {}
    for name, claims in points.items():
        if name.endswith("/*"):
            family: Family | None = None
            # A broken one is named when a member of it is loaded; a listing goes on without.
            with contextlib.suppress(Exception, SystemExit):
                family = _family_of(claims[0].load()) if len(claims) == 1 else None
            found[name.removesuffix("/*")] = Entry(group, name, claims, family)
    return found


def _family_of(loaded: object) -> Family:
    family = loaded() if isinstance(loaded, type) else loaded
    if not isinstance(family, Family):
        raise PluginError(
            f"a family is a {type(family).__name__}, expected nlbench.registry.Family"
        )
    return family


def _costly_names(group: str, pattern: str) -> list[str]:
    """Names of the costly family that a glob names."""
    prefix, slash, _ = pattern.partition("/")
    entry = families(group).get(prefix) if slash else None
    if entry is None or entry.family is None or not entry.family.costly:
        return []
    return [f"{prefix}/{member}" for member in entry.family.names()]


def describe(entry: Entry) -> str:
    """First line of the docstring, read from the source file without importing it.

    Empty where there is no source to read. A family's member is described by the family.
    """
    point = entry.claims[0]
    if not _is_readable(point):
        return ""
    if entry.family is not None:
        is_member = not entry.name.endswith("/*")
        return entry.family.describe(entry.name.partition("/")[2]) if is_member else ""
    try:
        spec = find_source(point.module)
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


def find_source(module: str) -> ModuleSpec | None:
    """Find a module's file; unlike importlib's `find_spec`, import no parent package.

    Parameters
    ----------
    module : str
        With dots.

    Returns
    -------
    ModuleSpec or None
        None where there is no such module.

    Examples
    --------
    >>> Path(find_source("nlbench.registry").origin).name
    'registry.py'
    >>> find_source("nlbench.nowhere") is None
    True
    """
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
