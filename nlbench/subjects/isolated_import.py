"""Execution of a user's Python file as if Python ran in its folder, without leaving traces."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from nlbench.errors import NlbenchError, RequestError, error_text
from nlbench.signals import raise_interruption

from .source_file import SHARED_PACKAGES, SourceFile

T = TypeVar("T")

_LOCK = threading.RLock()


class ImportedFile:
    """A file that has been executed, with the modules that it imported from its own folder."""

    def __init__(self, source: SourceFile) -> None:
        self.source = source
        self._modules: dict[str, ModuleType] = {}
        self.module = self.call(self._import)

    def call(self, function: Callable[[], T]) -> T:
        """Call a function while the file's folder is on the path and its modules are importable.

        What it raises, and an exit, become errors with the line.
        """
        try:
            with _LOCK, self._importable(), contextlib.redirect_stdout(sys.stderr):
                return function()
        except (NlbenchError, MemoryError):
            raise
        except BaseException as error:
            raise_interruption(error)
            where = self._place(error)
            if isinstance(error, SystemExit):
                message = "it exits Python; put its program under if __name__ == '__main__'"
            else:
                message = error_text(error)
            raise RequestError(f"{where}: {message}") from error

    def _place(self, error: BaseException) -> str:
        """Return the file and the last line of it in an error's traceback."""
        folder = str(self.source.base)
        label = self.source.label
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if frame.filename == str(self.source.file):
                return f"{label}, line {frame.lineno}"
            if frame.filename.startswith(folder + os.sep) and "site-packages" not in frame.filename:
                return f"{os.path.relpath(frame.filename, folder)}, line {frame.lineno}"
        return label

    def _import(self) -> ModuleType:
        source = self.source
        if source.installed:
            return importlib.import_module(source.installed)
        parts, folder = self._package()
        is_package = source.file.name == "__init__.py"
        name = ".".join(parts if is_package else (*parts, source.file.stem))
        if parts:
            return importlib.import_module(name)
        if name in sys.modules or name in sys.stdlib_module_names or name in SHARED_PACKAGES:
            name = f"{name}_{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
        spec = importlib.util.spec_from_file_location(name, source.file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    def _package(self) -> tuple[tuple[str, ...], Path]:
        """Return the names of the packages around the file, and the folder that contains them.

        Relative imports may go beyond the folders that are packages. Their outermost package then
        gets a name of its own, since a folder may have the name of an installed package.
        """
        source = self.source
        parts = source.package
        folder = source.base
        missing = source.relative_levels() - len(parts)
        if missing <= 0:
            return parts, folder
        for _ in range(missing - 1):
            parts = (folder.name, *parts)
            folder = folder.parent
        name = f"nlbench_folder_{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
        self._modules[name] = package
        return (name, *parts), folder

    @contextlib.contextmanager
    def _importable(self) -> Iterator[None]:
        if self.source.installed:
            yield
            return
        tops = {self._top_name(file) for file in self.source.own_files()}
        tops -= {*sys.stdlib_module_names, *SHARED_PACKAGES}
        before = dict(sys.modules)
        path = list(sys.path)
        arguments = sys.argv
        hidden = {n: m for n, m in before.items() if n.partition(".")[0] in tops}
        for name in hidden:
            del sys.modules[name]
        sys.modules.update(self._modules)
        sys.path[:0] = map(str, self.source.roots)
        # A file that parses its arguments gets none, instead of those of nlbench.
        sys.argv = [str(self.source.file)]
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.argv = arguments
            roots = list(map(str, self.source.roots))
            new = {n: m for n, m in list(sys.modules.items()) if before.get(n) is not m}
            # Found before any is removed: the path of a namespace package depends on its parent.
            own = {n: m for n, m in new.items() if n in self._modules or _is_own(m, roots, path)}
            self._modules |= own
            for name in own:
                del sys.modules[name]
            sys.modules.update(hidden)
            sys.path[:] = path

    def _top_name(self, file: Path) -> str:
        for root in self.source.roots:
            if file.is_relative_to(root):
                return file.relative_to(root).parts[0].removesuffix(".py").partition(".")[0]
        return ""


def _is_own(module: ModuleType, roots: list[str], path: list[str]) -> bool:
    """Return True for a module below the file's folders, or outside of Python's search path."""
    origin = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), None)
    if not isinstance(origin, str) or "site-packages" in Path(origin).parts:
        return False
    if any(origin.startswith(root + os.sep) for root in roots):
        return True
    return not any(entry and origin.startswith(entry.rstrip(os.sep) + os.sep) for entry in path)
