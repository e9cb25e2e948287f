"""The registry, which maps names to objects through entry points and imports them on demand.

The groups are ``nlbench.measures``, ``nlbench.probes``, ``nlbench.models``, ``nlbench.datasets``,
``nlbench.studies``, ``nlbench.recipes``, ``nlbench.reports``, ``nlbench.transforms``,
``nlbench.commands`` and ``nlbench.ops``. Built-in plugins are registered like third-party ones.

An entry point whose name ends in ``/*`` is a family: one object that provides many names, such as
the models of another library. Its members are named ``family/member``.
"""

from __future__ import annotations

import ast
import contextlib
import fnmatch
import itertools
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    shorten,
    system_text,
)
from nlbench.parsers import unique
from nlbench.signals import raise_interruption


class Family(ABC):
    """Base class for families: many names behind one entry point ``NAME/*``.

    The entry point refers to the class. It is imported whenever its group is listed, so its module
    must import only the standard library and nlbench until a member is loaded.
    """

    description: str = ""  # one-line description for listings
    # True if `names` imports the library. It is then called only for a glob that names the family,
    # and to list all members.
    costly: bool = False
    # Form of the names that `claim` accepts, for messages; empty if there are none.
    claimed_form: str = ""

    def names(self) -> Sequence[str]:
        """Return the members' names without the family's.

        There are none if they can't be enumerated.
        """
        return ()

    @abstractmethod
    def load(self, name: str) -> Any:
        """Load a member."""

    def matches(self, pattern: str) -> Sequence[str]:
        """Return the members that match a glob of paths, used if it matches none of `names`."""
        return ()

    def claim(self, name: str) -> str:
        """Return the full name of a member without the family's name, such as a path, or ``""``.

        Called only for names that are not registered.
        """
        return ""

    def describe(self, name: str) -> str:
        """Describe a member in one line, without importing anything."""
        return ""

    def providers(self) -> tuple[str, ...]:
        """Return the libraries that provide the members, with their versions."""
        return ()


GROUPS: Mapping[str, str] = {
    "measures": "measure",
    "probes": "probe",
    "models": "model",
    "datasets": "dataset",
    "studies": "study",
    "recipes": "recipe",
    "transforms": "transform",
    "questions": "question",
}


@dataclass(frozen=True)
class Entry:
    """A registered name and its providers."""

    group: str
    name: str
    claims: tuple[EntryPoint, ...]  # usually one; several if plugins claim the same name
    family: Family | None = None
    # True if the name is a member's without the name of its family; see `Family.claim`.
    is_claimed: bool = False

    @property
    def providers(self) -> tuple[str, ...]:
        """Distributions that provide the name, with their versions."""
        return tuple(map(_provider, self.claims)) + (self.family.providers() if self.family else ())

    @property
    def member(self) -> str:
        """Name of a member within its family."""
        return self.name if self.is_claimed else self.name.partition("/")[2]

    @property
    def conflict(self) -> str:
        """Description of a malformed entry point or of conflicting claims.

        It is empty if there are none.
        """
        if len(self.claims) == 1:
            (point,) = self.claims
            if is_readable(point):
                return ""
            return (
                f"{GROUPS[self.group]} '{self.name}' of {self.providers[0]} has the malformed "
                f"entry point '{point.value}', expected MODULE:OBJECT"
            )
        claims = " and ".join(
            f"{provider} ({point.value})"
            for provider, point in zip(self.providers, self.claims, strict=False)
        )
        return f"{GROUPS[self.group]} '{self.name}' is claimed by {claims}; uninstall one of them"


def entries(group: str) -> dict[str, Entry]:
    """Return the entries of a group, keyed by name, without importing plugins except families.

    Members of costly families are not included, but can be found with `find`.

    Examples
    --------
    >>> "affinity" in entries("measures"), "torchvision/resnet18" in entries("models")
    (True, True)
    """
    points = _points(group)
    listed = {name: claims for name, claims in points.items() if not name.endswith("/*")}
    known = {name: Entry(group, name, claims) for name, claims in listed.items()}
    for prefix, entry in _families(group, points).items():
        if entry.family is not None and not entry.family.costly:
            for member in entry.family.names():
                name = f"{prefix}/{member}"
                claims = listed.get(name, ()) + entry.claims
                known[name] = Entry(group, name, claims, entry.family)
    return dict(sorted(known.items()))


def families(group: str) -> dict[str, Entry]:
    """Return the families of a group, keyed by the name before the slash.

    A family that can't be imported is included without its members.

    Examples
    --------
    >>> {"timm", "torchvision"} <= set(families("models"))
    True
    """
    return _families(group, _points(group))


def is_listed(group: str, name: str) -> bool:
    """Return True for a registered name and for a member that its family lists by itself.

    Other members of families are paths on this machine, such as ``text//etc/passwd``.

    Examples
    --------
    >>> is_listed("datasets", "text/python"), is_listed("datasets", "text/README.md")
    (True, False)
    """
    prefix, slash, member = name.partition("/")
    entry = families(group).get(prefix) if slash else None
    if entry is None:
        return not name.endswith("/*") and name in _points(group)
    return entry.family is not None and member in entry.family.names()


def find(group: str, name: str) -> Entry:
    """Find a registered name or a member of a family, importing no other plugin."""
    points = _points(group)
    prefix, slash, member = name.partition("/")
    claims = () if name.endswith("/*") else points.get(name, ())
    owner = f"{prefix}/*"
    if slash and member and owner in points:
        entry = _families(group, {owner: points[owner]})[prefix]
        family = entry.family
        if not claims or (family and not family.costly and member in family.names()):
            return Entry(group, name, claims + entry.claims, entry.family)
    if not claims:
        listed = _families(group, points).values()
        owners = [entry for entry in listed if entry.family and entry.family.claimed_form]
        for entry in owners:
            full_name = entry.family.claim(name) if entry.family else ""
            if full_name:
                return Entry(group, full_name, entry.claims, entry.family, is_claimed=True)
        hint = nearest(name, entries(group))
        if owners and not hint.startswith("; did you mean"):
            forms = " or ".join(entry.family.claimed_form for entry in owners if entry.family)
            hint += f"; or give {forms}"
        raise RequestError(f"there is no {GROUPS[group]} '{shorten(name)}'{hint}")
    return Entry(group, name, claims)


def load(group: str, name: str) -> Any:
    """Import the object of a registered name or a member of a family."""
    entry = find(group, name)
    if entry.conflict:
        raise PluginError(entry.conflict)
    try:
        # A family that failed to import is imported again to get its error message.
        loaded = entry.claims[0].load() if entry.family is None else entry.family
        is_family = entry.claims[0].name.endswith("/*")
        return _make_family(loaded).load(entry.member) if is_family else loaded
    except NlbenchError:
        raise
    except BaseException as error:
        raise_interruption(error)
        # The import of a plugin may raise anything.
        where = f"{GROUPS[group]} '{name}' ({entry.providers[0]}, {entry.claims[0].value})"
        raise PluginError(f"{where} can't be loaded: {error_text(error)}") from error


def expand(group: str, patterns: Iterable[str]) -> list[str]:
    """Expand names and globs into registered names, in order and without duplicates.

    A glob without a slash matches no members of families; one that names a family, such as
    ``torchvision/resnet*``, matches only its members. Of measures, ``@NAME`` means those of a
    registered question, and ``@all`` all.

    Examples
    --------
    >>> expand("measures", ["r2", "ab*"])
    ['r2', 'absdev']
    """
    known: dict[str, Entry] | None = None
    expanded: dict[str, None] = {}
    for pattern in _expand_questions(patterns) if group == "measures" else patterns:
        if not any(c in pattern for c in "*?[") or os.path.exists(pattern):  # noqa: PTH110
            expanded.setdefault(find(group, pattern).name)
            continue
        known = entries(group) if known is None else known
        prefix, slash, members = pattern.partition("/")
        entry = families(group).get(prefix) if slash else None
        family = entry.family if entry else None
        listed = family.names() if family else ()
        names = unique([*known, *(f"{prefix}/{member}" for member in listed)])
        matches = [n for n in fnmatch.filter(names, pattern) if n.count("/") == pattern.count("/")]
        if family and not matches:
            matches = [f"{prefix}/{member}" for member in family.matches(members)]
        if not matches and not family:
            claiming = (e.family for e in families(group).values() if e.family)
            matches = [n for f in claiming if f.claimed_form for n in f.matches(pattern)]
        if not matches:
            is_open = family is not None and not family.costly and not listed
            hint = f"; {family.description}" if family and is_open else nearest(pattern, names)
            raise RequestError(f"no {GROUPS[group]} matches '{shorten(pattern)}'{hint}")
        expanded.update(dict.fromkeys(matches))
    return list(expanded)


def _expand_questions(patterns: Iterable[str]) -> Iterator[str]:
    """Replace each ``@NAME`` by the measures of the question, and ``@all`` by a glob."""
    for pattern in patterns:
        name = pattern.removeprefix("@")
        if name == pattern:
            yield pattern
        elif name == "all":
            yield "*"
        elif name in (questions := entries("questions")):
            yield from load("questions", name).measures
        else:
            known = ["@all", *(f"@{question}" for question in questions)]
            raise RequestError(
                f"there is no question '{shorten(pattern)}'{nearest(pattern, known)}"
            )


def entry_points(group: str) -> tuple[EntryPoint, ...]:
    """Return the installed entry points of a group.

    Examples
    --------
    >>> "affinity" in [point.name for point in entry_points("nlbench.measures")]
    True
    """
    return tuple(point for point in installed()[0] if point.group == group)


def find_version(distribution: str) -> str | None:
    """Return the version of a distribution, or None if it isn't installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def installed() -> tuple[tuple[EntryPoint, ...], tuple[str, ...]]:
    """Return the entry points in nlbench's groups, and one line per unreadable distribution.

    They are read again only if the search path or a folder on it has changed, for example after
    an installation.
    """
    return _installed(tuple((path, _modification_time(path)) for path in sys.path))


@lru_cache(maxsize=4)
def _installed(
    _path: tuple[tuple[str, int], ...],
) -> tuple[tuple[EntryPoint, ...], tuple[str, ...]]:
    points: list[EntryPoint] = []
    problems: list[str] = []
    seen: set[str] = set()
    for distribution in metadata.distributions():
        try:
            # Known from the folder, without parsing metadata. Only the first one is imported.
            name = distribution._normalized_name  # type: ignore[attr-defined]
            if name in seen:
                continue
            seen.add(name)
            # Searching the text is faster than parsing it, and few distributions have plugins.
            if "[nlbench." in (distribution.read_text("entry_points.txt") or ""):
                points += [p for p in distribution.entry_points if p.group.startswith("nlbench.")]
        except Exception as error:
            problems.append(
                f"the entry points of {name_and_version(distribution)[0]} can't be read "
                f"({one_line(system_text(error))}); repair its "
                "entry_points.txt or uninstall it"
            )
    return tuple(points), tuple(problems)


@lru_cache(maxsize=1024)
def name_and_version(distribution: metadata.Distribution) -> tuple[str, str]:
    """Return the name and version of a distribution, cached since metadata is slow to parse."""
    try:
        name = distribution.name
        version = distribution.version
    except Exception:
        # If the metadata can't be read, fall back to the folder name.
        name = version = ""
    folder = getattr(distribution, "_path", None)
    return name or str(getattr(folder, "stem", distribution)), version or ""


def _provider(point: EntryPoint) -> str:
    return " ".join(name_and_version(point.dist)).rstrip() if point.dist else point.value


def is_readable(point: EntryPoint) -> bool:
    """Return whether an entry point names a module and an object of it."""
    return point.pattern.match(point.value) is not None


def _modification_time(path: str) -> int:
    try:
        return Path(path or ".").stat().st_mtime_ns
    except OSError:
        return 0


def _points(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Return the entry points of a group, keyed by name. A distribution counts only once."""
    if group not in GROUPS:
        raise RequestError(f"there is no group '{group}'{nearest(group, GROUPS)}")
    claims: dict[str, dict[tuple[str, str], EntryPoint]] = {}
    for point in entry_points(group=f"nlbench.{group}"):
        # A distribution may be on the path twice.
        owner = name_and_version(point.dist)[0] if point.dist else ""
        claims.setdefault(point.name, {}).setdefault((owner, point.value), point)
    return {name: tuple(claims[name].values()) for name in sorted(claims)}


def _families(group: str, points: Mapping[str, tuple[EntryPoint, ...]]) -> dict[str, Entry]:
    families = {}
    for name, claims in points.items():
        if name.endswith("/*"):
            family: Family | None = None
            # A broken family is reported when a member is loaded; listings skip it.
            with contextlib.suppress(Exception, SystemExit):
                family = _make_family(claims[0].load()) if len(claims) == 1 else None
            families[name.removesuffix("/*")] = Entry(group, name, claims, family)
    return families


def _make_family(loaded: object) -> Family:
    family = loaded() if isinstance(loaded, type) else loaded
    if not isinstance(family, Family):
        raise PluginError(
            f"a family is a {type(family).__name__}, expected nlbench.registry.Family"
        )
    return family


def describe(entry: Entry) -> str:
    """Read the first line of an entry's docstring from its source file, without importing it.

    Return an empty string if there is no source. Members are described by their family.
    """
    point = entry.claims[0]
    if not is_readable(point):
        return ""
    if entry.family is not None:
        return "" if entry.name.endswith("/*") else entry.family.describe(entry.member)
    try:
        tree = parse_source(point.module)
    except (OSError, SyntaxError, ValueError, ImportError):
        return ""
    name = point.attr.split(".")[0]
    for node, following in itertools.pairwise([*tree.body, ast.Pass()]):
        text = ""
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            text = ast.get_docstring(node) or ""
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            text = str(following.value.value) if is_text else ""  # type: ignore[attr-defined]
        if text:
            return text.partition("\n")[0]
    return ""


def parse_source(module: str) -> ast.Module:
    """Parse a module's source without importing it. Empty if there is none."""
    spec = find_source(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return ast.Module([], [])
    return _parse(Path(spec.origin), Path(spec.origin).stat().st_mtime_ns)


@lru_cache(maxsize=128)
def _parse(file: Path, changed: int) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def find_source(module: str) -> ModuleSpec | None:
    """Find a module's spec without importing its parent packages.

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
        locations = _locations(spec) if spec else None
        name = ".".join(parts[:depth])
        specs = (finder.find_spec(name, locations) for finder in sys.meta_path)
        spec = next((candidate for candidate in specs if candidate is not None), None)
        if spec is None:
            return None
    return spec


def _locations(package: ModuleSpec) -> Sequence[str] | None:
    # An imported package may have extended its path, as nlbench does in a checkout.
    imported = getattr(sys.modules.get(package.name), "__path__", None)
    return imported or package.submodule_search_locations
