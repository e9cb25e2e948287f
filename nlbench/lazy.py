"""Imports on first use, and without garbage collection."""

from __future__ import annotations

import ast
import gc
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module, util
from types import ModuleType
from typing import Any


def lazy_imports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Create ``__getattr__``, ``__dir__`` and ``__all__`` for a package.

    Its exports are the names that its ``__init__.py`` imports only for type checkers, in the form
    ``from module import name as name`` below ``if TYPE_CHECKING:``.

    Examples
    --------
    >>> find, names, _ = lazy_imports("nlbench")
    >>> find("Option").__name__, "Option" in names()
    ('Option', True)
    """
    modules = _exported_names(package)

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        # A module may draw random numbers when it is imported, as rich does.
        state = random.getstate()
        try:
            return getattr(import_module(modules[name], package), name)
        finally:
            random.setstate(state)

    def names() -> list[str]:
        contents = vars(sys.modules[package])
        submodules = {name for name, value in contents.items() if isinstance(value, ModuleType)}
        return sorted({*modules, *submodules, *(n for n in contents if n.startswith("__"))})

    return find, names, sorted(modules)


def _exported_names(package: str) -> dict[str, str]:
    spec = util.find_spec(package)
    source = spec.loader.get_source(package) if spec and spec.loader else ""  # type: ignore[attr-defined]
    blocks = (node for node in ast.parse(source).body if isinstance(node, ast.If))
    imports = (node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom))
    return {
        alias.asname: "." * node.level + str(node.module)
        for node in imports
        for alias in node.names
        if alias.asname
    }


def load_reports() -> Any:
    """Import ``nlbench.reports`` when a report is requested, since it imports pandas.

    The core uses it only through its exports.
    """
    return import_module("nlbench.reports")


@contextmanager
def fast_imports() -> Iterator[None]:
    """Import without garbage collection, and exclude all existing objects from later collections.

    Imported modules never become garbage. Collecting would take up a fifth of ``nlbench --help``
    and 0.3 s of a command that imports PyTorch.
    """
    gc.disable()
    try:
        yield
    finally:
        # Excluded objects aren't freed at exit, and Triton's bindings warn of each one of theirs.
        # `torch.compile` and some derivatives load Triton.
        if "triton" not in sys.modules:
            gc.freeze()
        gc.enable()
