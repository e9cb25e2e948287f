"""Distributions with entry points, as files and as objects."""

import sys
from importlib.metadata import EntryPoint
from types import ModuleType

from nlbench import registry

METADATA = "Metadata-Version: 2.1\nName: {}\nVersion: 1.0\n"


class Distribution:
    """The part of a distribution that the registry reads."""

    version = "1.0"

    def __init__(self, name):
        self.name = name


def entry_point(name, value, distribution, group="measures"):
    """Return an entry point of a distribution that need not exist."""
    return EntryPoint(name, value, f"nlbench.{group}")._for(Distribution(distribution))


def add_entry_point(monkeypatch, name, registered, group="measures"):
    """Register an object as a plugin does, for the rest of a test."""
    module = ModuleType(f"a_strangers_{name}")
    module.registered = registered
    monkeypatch.setitem(sys.modules, module.__name__, module)
    own = entry_point(name, f"{module.__name__}:registered", "theirs", group)
    listed = registry.entry_points
    monkeypatch.setattr(
        registry,
        "entry_points",
        lambda group: [*listed(group=group), *([own] if group == own.group else [])],
    )


def write_distribution(folder, name, entry_points, metadata=METADATA):
    """Write a distribution to a folder, which must be on the Python path.

    Parameters
    ----------
    entry_points : str, bytes, or dict of str to sequence of str
        The file's content, or lines such as ``"mine = my_module:mine"`` by group.
    """
    if isinstance(entry_points, dict):
        sections = (
            "\n".join([f"[nlbench.{group}]", *lines, ""]) for group, lines in entry_points.items()
        )
        entry_points = "".join(sections)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    if metadata:
        (info / "METADATA").write_text(metadata.format(name))
    content = entry_points if isinstance(entry_points, bytes) else entry_points.encode()
    (info / "entry_points.txt").write_bytes(content)
