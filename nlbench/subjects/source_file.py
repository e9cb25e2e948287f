"""Python files of the user, analysed without running them.

A run is planned from what their source says: which names a file defines, which arguments a class or
a function takes, and which modules it imports from its own folder.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

from nlbench.errors import RequestError, nearest, one_line, shorten
from nlbench.options import Option
from nlbench.parsers import unique
from nlbench.registry import find_source
from nlbench.serialization.files import check_is_file
from nlbench.serialization.hashing import content_key

MAX_SOURCE_BYTES = 2**24
FORMS = "FILE.py:NAME or package.module:NAME"

SHARED_PACKAGES = frozenset({"nlbench", "numpy", "scipy", "torch", "torchvision"})
"""Packages that nlbench itself imports, which are the same for all files."""

_MODULE_CLASSES = frozenset({"Module", "Sequential", "LightningModule", "PreTrainedModel"})
_BUILDER_PREFIXES = ("make_", "build_", "create_", "get_")


def split_reference(text: str) -> tuple[str, str]:
    r"""Split a reference into the file or module and the name in it, which may be empty.

    Examples
    --------
    >>> split_reference("my_net.py:Net"), split_reference("my_net.py")
    (('my_net.py', 'Net'), ('my_net.py', ''))
    >>> split_reference("C:\\nets\\my_net.py")
    ('C:\\nets\\my_net.py', '')
    """
    source, colon, name = text.rpartition(":")
    is_name = not name or all(part.isidentifier() for part in name.split("."))
    if not colon or not source or not is_name or (name.endswith(".py") and _is_file(text)):
        return text, ""
    return source, name


def is_reference(text: str) -> bool:
    """Return True for the form of a reference: ``FILE.py``, ``FILE.py:NAME`` or ``MODULE:NAME``.

    Examples
    --------
    >>> is_reference("nets/my_net.py"), is_reference("package.module:Net"), is_reference("vgg8")
    (True, True, False)
    """
    source, name = split_reference(text)
    is_module = all(part.isidentifier() for part in source.split("."))
    return source.lower().endswith(".py") or (bool(name) and is_module) or _is_package(source)


def _is_file(path: str) -> bool:
    return os.path.isfile(path)  # noqa: PTH113 (returns False for an invalid name)


def _is_package(source: str) -> bool:
    return _is_file(os.path.join(source, "__init__.py"))  # noqa: PTH118


class Definition(NamedTuple):
    """A name that a file defines at its top level. `node` is None if it comes from elsewhere."""

    node: ast.AST | None
    file: Path


class Parameters(NamedTuple):
    """The keyword arguments of a class or function, None if unknown, and those without default."""

    options: Mapping[str, Option] | None = None
    required: tuple[str, ...] = ()


@dataclass(frozen=True)
class SourceFile:
    """A Python file and its place in a package."""

    file: Path  # absolute path
    label: str  # the file or module as the user wrote it, for messages
    # Name of a module that Python finds by itself; empty for a file outside its search path.
    installed: str = ""

    @classmethod
    def find(cls, source: str) -> SourceFile:
        """Find a file, or a module in the current folder or on Python's search path."""
        path = Path(os.path.expanduser(source))  # noqa: PTH111 - Path.expanduser raises for unknown users
        if _is_package(str(path)):
            path = path / "__init__.py"
        is_module = not source.endswith(".py") and all(p.isidentifier() for p in source.split("."))
        if not is_module or path.name == "__init__.py":
            check_is_file(path, MAX_SOURCE_BYTES)
            if path.suffix != ".py":
                raise RequestError(f"{shorten(source)}: expected {FORMS}")
            return cls(Path(os.path.abspath(path)), source)  # noqa: PTH100 (keeps links)
        found = _module_files(Path.cwd(), source.split("."))
        if found and len(found) >= source.count("."):
            last = found[-1]
            name = last.parent.name if last.name == "__init__.py" else last.stem
            if name == source.rpartition(".")[2]:
                return cls(last, source)
        spec = find_source(source)
        origin = spec.origin if spec else None
        if origin is None or not origin.endswith(".py"):
            raise RequestError(
                f"there is no module '{shorten(source)}' in this folder or on Python's path, "
                f"expected {FORMS}"
            )
        return cls(Path(origin), source, installed=source)

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed source. An error if it isn't valid Python."""
        try:
            return _parse(_read(self.file))
        except (SyntaxError, ValueError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            where = f"{self.label}, line {line}" if line else self.label
            message = getattr(error, "msg", None) or one_line(error)
            raise RequestError(f"{where}: {type(error).__name__}: {message}") from error

    @cached_property
    def package(self) -> tuple[str, ...]:
        """Names of the packages around the file, outermost first."""
        names: list[str] = []
        folder = self.file.parent
        while (folder / "__init__.py").is_file():
            names.insert(0, folder.name)
            folder = folder.parent
        return tuple(names)

    @property
    def base(self) -> Path:
        """The folder that contains the outermost package, or the file."""
        return self.file.parents[len(self.package)]

    @property
    def roots(self) -> tuple[Path, ...]:
        """Folders from which the file imports its own modules."""
        if self.installed or self.base == self.file.parent:
            return (self.base,)
        return self.file.parent, self.base

    def own_files(self) -> list[Path]:
        """Return the file and the modules that it imports from its own folder, recursively."""
        pending = [self.file]
        pending += [self.file.parents[i] / "__init__.py" for i in range(len(self.package))]
        files: set[Path] = set()
        while pending:
            file = pending.pop()
            if file not in files:
                files.add(file)
                pending += self._imported_files(file) if file.suffix == ".py" else []
        return sorted(files)

    def named_files(self) -> set[str]:
        """Return the absolute paths of files that strings in the own files name.

        They are looked up next to the file with the string, and in the current folder. Files of
        runs, which change with every run, don't count.
        """
        files: set[str] = set()
        for file in self.own_files():
            folders = unique((file.parent, Path.cwd()))
            for text in _texts(_read(file)) if file.suffix == ".py" else ():
                for folder in folders:
                    path = os.path.abspath(folder / os.path.expanduser(text))  # noqa: PTH100, PTH111
                    if _is_file(path) and not any(map(_is_run, Path(path).parents)):
                        files.add(path)
        return files

    def fingerprint(self) -> str:
        """Return a hash of the own files. It doesn't depend on where their folder lies."""
        digests = {
            os.path.relpath(file, self.base): hashlib.sha256(_read(file)).hexdigest()
            for file in self.own_files()
        }
        return content_key(digests)

    def relative_levels(self) -> int:
        """Return the largest number of dots in the relative imports of the file."""
        imports = (n for n in ast.walk(self.tree) if isinstance(n, ast.ImportFrom))
        return max((node.level for node in imports), default=0)

    def _imported_files(self, file: Path) -> list[Path]:
        try:
            tree = _parse(_read(file))
        except (SyntaxError, ValueError, RecursionError, RequestError):
            return []  # Python reports it when the file is imported.
        files: list[Path] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    files += self._module_files(alias.name.split("."))
            elif isinstance(node, ast.ImportFrom):
                module = node.module.split(".") if node.module else []
                for parts in (module, *([*module, alias.name] for alias in node.names)):
                    files += self._module_files(parts, node.level, file)
        return files

    def _module_files(
        self, parts: Sequence[str], level: int = 0, file: Path | None = None
    ) -> list[Path]:
        """Return the own files that an import runs, in a file if it is relative."""
        if level:
            return _module_files((file or self.file).parents[level - 1], parts)
        if not parts or parts[0] in SHARED_PACKAGES:
            return []
        if self.installed and parts[0] != self.installed.partition(".")[0]:
            return []
        found = (_module_files(root, parts) for root in self.roots)
        return next(filter(None, found), [])

    def definitions(self) -> dict[str, Definition]:
        """Return the names that the file defines at its top level."""
        names: dict[str, Definition] = {}
        for node in _top_level(self.tree.body):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names[node.name] = Definition(node, self.file)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in itertools.chain.from_iterable(map(ast.walk, targets)):
                    if isinstance(name, ast.Name):
                        names[name.id] = Definition(node.value, self.file)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    local = alias.asname or alias.name.partition(".")[0]
                    names[local] = self._imported(node, alias.name)
        return names

    def _imported(self, node: ast.Import | ast.ImportFrom, name: str) -> Definition:
        """Return the definition in another own file, if that is where a name comes from."""
        if isinstance(node, ast.ImportFrom) and node.module:
            files = self._module_files(node.module.split("."), node.level)
            if files and files[-1] != self.file and files[-1].suffix == ".py":
                other = SourceFile(files[-1], self.label, self.installed)
                with contextlib.suppress(RequestError):
                    for each in _top_level(other.tree.body):
                        if not isinstance(each, ast.ClassDef | ast.FunctionDef):
                            continue
                        if each.name == name:
                            return Definition(each, other.file)
        return Definition(None, self.file)

    def check_name(self, name: str) -> None:
        """Raise if the file certainly doesn't define a name."""
        known = self.definitions()
        first = name.partition(".")[0]
        is_open = "*" in known or "__getattr__" in known
        if first not in known and not is_open:
            public = [n for n, d in known.items() if d.node is not None and n[0] != "_"]
            raise RequestError(f"{self.label} has no '{shorten(name)}'{nearest(first, public)}")

    def networks(self) -> list[str]:
        """Return the names of the file's modules and builders, or else of its networks."""
        known = {n: d.node for n, d in self.definitions().items() if d.file == self.file}
        classes = {n: node for n, node in known.items() if isinstance(node, ast.ClassDef)}
        modules = [name for name in classes if _is_module_class(name, classes)]
        public = {name: node for name, node in known.items() if name[0] != "_"}
        builders = [
            name
            for name, node in public.items()
            if isinstance(node, ast.FunctionDef) and _is_builder(node, modules)
        ]
        instances = [name for name, node in public.items() if isinstance(node, ast.Call)]
        return [name for name in modules if name in public] + builders or instances

    def parameters(self, name: str) -> Parameters:
        """Return the arguments of a class or function as far as the source shows them."""
        node, file = self.definitions().get(name, (None, self.file))
        if isinstance(node, ast.ClassDef):
            return _class_parameters(node, SourceFile(file, self.label))
        return _parameters(node, skip=0) if isinstance(node, ast.FunctionDef) else Parameters()


def _read(file: Path) -> bytes:
    check_is_file(file, MAX_SOURCE_BYTES)
    try:
        return file.read_bytes()
    except OSError as error:
        raise RequestError(f"can't read {file}: {error.strerror}") from error


def _is_run(folder: Path) -> bool:
    return (folder / "manifest.json").is_file() and (folder / "cells").is_dir()


@lru_cache(maxsize=256)
def _texts(source: bytes) -> frozenset[str]:
    """Return the strings of a source that may be paths, and those that ``/`` or a call joins."""
    texts = set()
    for node in ast.walk(_parse(source)):
        if isinstance(node, ast.Constant | ast.BinOp | ast.Call):
            inner = [n for n in ast.walk(node) if isinstance(n, ast.Constant)]
            inner.sort(key=lambda n: (n.lineno, n.col_offset))
            texts.add("/".join(n.value for n in inner if isinstance(n.value, str)))
    is_path = re.compile(r"[^\0\n]{1,255}")
    return frozenset(text for text in texts if is_path.fullmatch(text))


@lru_cache(maxsize=256)
def _parse(source: bytes) -> ast.Module:
    return ast.parse(source)


def _module_files(folder: Path, parts: Sequence[str]) -> list[Path]:
    """Return the files that an import of a module below a folder runs."""
    files: list[Path] = []
    for part in parts:
        package = folder / part / "__init__.py"
        module = folder / f"{part}.py"
        if package.is_file():
            files.append(package)
        elif module.is_file():
            return [*files, module]
        elif not (folder / part).is_dir():
            compiled = [p for p in folder.glob(f"{part}.*") if p.suffix in (".so", ".pyd")]
            return files + compiled
        folder = folder / part
    return files


def _top_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, including those in conditions and ``try`` blocks."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
            yield from _top_level(node.body)
            for handler in getattr(node, "handlers", []):
                yield from _top_level(handler.body)
            yield from _top_level(getattr(node, "orelse", []))


def _last_name(node: ast.expr | None) -> str:
    """Return the last part of a dotted name, such as ``Module`` of ``nn.Module``."""
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.rpartition(".")[2]
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_module_class(
    name: str, classes: Mapping[str, ast.ClassDef], seen: frozenset[str] = frozenset()
) -> bool:
    node = classes[name]
    has_forward = any(isinstance(n, ast.FunctionDef) and n.name == "forward" for n in node.body)
    for base in map(_last_name, node.bases):
        if base in classes and base not in seen | {name}:
            if _is_module_class(base, classes, seen | {name}):
                return True
        elif base in _MODULE_CLASSES or (has_forward and base != "Function"):
            return True
    return False


def _is_builder(node: ast.FunctionDef, modules: Sequence[str]) -> bool:
    """Return True for a function that seems to return a network."""
    kinds = {*modules, *_MODULE_CLASSES}
    if node.returns is not None:
        return _last_name(node.returns) in kinds
    made = set()
    for inner in ast.walk(node):
        value = inner.value if isinstance(inner, ast.Assign) else None
        if isinstance(value, ast.Call) and _last_name(value.func) in kinds:
            made |= {_last_name(target) for target in inner.targets}  # type: ignore[attr-defined]
    for inner in ast.walk(node):
        if isinstance(inner, ast.Return) and inner.value is not None:
            value = inner.value
            name = _last_name(value.func if isinstance(value, ast.Call) else value)
            if name in kinds | made:
                return True
            if isinstance(value, ast.Call) and node.name.startswith(_BUILDER_PREFIXES):
                return not node.name.startswith("get_") or "model" in node.name
    return False


def _class_parameters(node: ast.ClassDef, source: SourceFile) -> Parameters:
    definitions = source.definitions()
    visited = set()
    while node.name not in visited and not node.decorator_list:
        visited.add(node.name)
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
                return _parameters(inner, skip=1)
        base = _last_name(node.bases[0]) if len(node.bases) == 1 else ""
        parent = definitions[base].node if base in definitions else None
        if not isinstance(parent, ast.ClassDef):
            return Parameters({} if base == "Module" else None)
        node = parent
    return Parameters()


def _parameters(node: ast.FunctionDef, skip: int) -> Parameters:
    arguments = node.args
    if node.decorator_list or arguments.kwarg is not None:
        return Parameters()
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    defaults += arguments.defaults
    pairs = list(zip(positional, defaults, strict=True))[skip:]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    options = {argument.arg: _option(argument, default) for argument, default in pairs}
    return Parameters(options, tuple(argument.arg for argument, d in pairs if d is None))


_KINDS = {"int": "integer", "float": "number", "bool": "boolean", "str": "text"}


def _option(argument: ast.arg, default: ast.expr | None) -> Option:
    try:
        value = ast.literal_eval(default) if default is not None else None
    except ValueError:
        value = None
    annotation = argument.annotation
    named = _last_name(annotation) if isinstance(annotation, ast.Name | ast.Constant) else ""
    kind = _KINDS.get(named) or ("" if annotation else _KINDS.get(type(value).__name__))
    if not kind and annotation and re.search(r"\bstr\b", ast.unparse(annotation)):
        kind = "text"  # Text such as 007 is no number.
    is_none = isinstance(default, ast.Constant) and default.value is None
    if is_none and kind != "text":
        kind = "literal"  # It takes None, whatever its annotation says.
    return Option(value, kind=kind or "literal")
