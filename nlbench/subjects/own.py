"""Models and data in the user's own Python files: ``my_net.py:Net``, ``package.module:Net``.

Planning reads the source; the file runs only when a network is built or data are opened.
"""

from __future__ import annotations

import ast
import contextlib
import glob
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import threading
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from functools import cached_property, lru_cache
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union

from nlbench.errors import NlbenchError, RequestError, error_text, first_line, nearest, shorten
from nlbench.introspection.opened_files import OpenedFiles, add_opened, opened_files
from nlbench.options import Option, OptionValue
from nlbench.registry import Family
from nlbench.serialization.versions import changed_files, describe_files
from nlbench.signals import raise_interruption

from .data import DatasetInfo
from .model import ModelInfo, check_arguments
from .source_file import (
    FORMS,
    SHARED_PACKAGES,
    Parameters,
    SourceFile,
    is_reference,
    split_reference,
)

if TYPE_CHECKING:
    from .data import Dataset


T = TypeVar("T")

_LOCK = threading.RLock()


class ImportedFile:
    """A file that has been executed, with the modules that it imported from its own folder."""

    def __init__(self, source: SourceFile) -> None:
        self.source = source
        self._modules: dict[str, ModuleType] = {}
        self.opened = OpenedFiles()  # by the calls
        self._versions: dict[str, str] = {}
        self.module = self.call(self._import)

    @property
    def is_outdated(self) -> bool:
        """True if a file that it read has changed since."""
        return bool(changed_files(self._versions))

    def call(self, function: Callable[[], T]) -> T:
        """Call a function while the file's folder is on the path and its modules are importable.

        What it raises, and an exit, become errors with the line.
        """
        try:
            with _LOCK, self._importable(), contextlib.redirect_stdout(sys.stderr):
                with opened_files() as opened:
                    value = function()
                self.opened.merge(opened)
                files = self.opened.inputs(self.source.roots)
                self._versions = describe_files(files) | self._versions
                return value
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
        # Python takes bytecode for that of a source of the same size and second.
        writes_none = sys.dont_write_bytecode
        sys.dont_write_bytecode = True
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.argv = arguments
            sys.dont_write_bytecode = writes_none
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


DATA_FORMS = "a Dataset, a DataLoader, a tensor, a tuple of tensors or a function of those"


class OwnModels(Family):
    """Networks in Python files. Their names are references, without the family's name."""

    description = f"{FORMS}: your own network, a class, a function or an instance"
    claimed_form = FORMS

    def claim(self, name: str) -> str:
        """Return the complete reference: a file alone gets the name of its only network."""
        if not name.endswith(".py") and os.path.isfile(name):  # noqa: PTH113
            raise RequestError(
                f"{shorten(name)} is no Python file; name the network, {FORMS}, and if this file "
                "holds its weights, add --weights"
            )
        if not is_reference(name) and not name.startswith(("./", "../", "/", "~")):
            return ""
        source, attribute = split_reference(name)
        if attribute or not Path(source).exists():
            return name
        try:
            names = SourceFile.find(source).networks()
        except NlbenchError:
            return name  # Reported when the file is needed; other models can be measured.
        if len(names) != 1:
            found = f"several networks: {', '.join(names)}" if names else "no nn.Module or builder"
            example = names[0] if names else "NAME"
            raise RequestError(f"{source} defines {found}; name one, as in {source}:{example}")
        return f"{source}:{names[0]}"

    def matches(self, pattern: str) -> Sequence[str]:
        """Return the networks of the files that a glob names, or those with a name."""
        source, name = split_reference(pattern)
        files = []
        if source.endswith(".py"):
            # A path may contain brackets.
            files = [source] if Path(source).exists() else sorted(glob.glob(source))  # noqa: PTH207
        return tuple(
            f"{file}:{each}"
            for file in files
            for each in ([name] if name else SourceFile.find(file).networks())
        )

    def describe(self, name: str) -> str:
        """Return the first line of a network's docstring, read from its source."""
        with contextlib.suppress(NlbenchError):
            code = OwnCode(name)
            if isinstance(code.definition, ast.ClassDef | ast.FunctionDef):
                return (ast.get_docstring(code.definition) or "").partition("\n")[0]
        return ""

    def load(self, name: str) -> OwnModel:
        """Return the model of a reference, without running its file."""
        return OwnModel(name)


class OwnCode:
    """An object in a Python file, ``FILE.py:NAME`` or ``package.module:NAME``."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._source, self.name = split_reference(text)

    @cached_property
    def file(self) -> SourceFile:
        """The file, found but not executed."""
        file = SourceFile.find(self._source)
        _ = file.tree  # A syntax error is reported before a missing name.
        if not self.name:
            raise RequestError(f"{self.text}: expected {FORMS}")
        file.check_name(self.name)
        return file

    def fingerprint(self, **_: Any) -> str:
        """Return a hash of the file and of the modules that it imports from its own folder."""
        return self.file.fingerprint()

    @property
    def definition(self) -> ast.AST | None:
        """The class, function or expression that defines the object. None if it is imported."""
        return self.file.definitions().get(self.name, (None, None))[0]

    @property
    def parameters(self) -> Parameters:
        """The keyword arguments, as the source shows them."""
        try:
            return self.file.parameters(self.name)
        except NlbenchError:
            return Parameters()  # The file's problem is reported when its hash is needed.

    def load(self, imported: ImportedFile) -> Any:
        """Return the object from an executed file."""
        value: Any = imported.module
        for part in self.name.split("."):
            if not hasattr(value, part):
                names = (
                    [n for n in vars(value) if n[0] != "_"] if hasattr(value, "__dict__") else []
                )
                raise RequestError(f"{self._source} has no '{part}'{nearest(part, names)}")
            value = getattr(value, part)
        return value

    def bind(
        self, function: Callable[..., Any], imported: ImportedFile, owner: str
    ) -> Callable[..., Any]:
        """Return a class or function of an executed file as a function of keyword arguments.

        Its calls find the file's modules. Wrong arguments are named as settings of `owner`.
        """
        signature = _signature(function)
        parameters = signature.parameters
        variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        names = [name for name, p in parameters.items() if p.kind not in variadic]
        is_open = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

        def call(**arguments: Any) -> Any:
            values = {
                name: _converted(value, parameters.get(name), f"{owner}.{name}")
                for name, value in arguments.items()
            }
            required = [n for n in names if parameters[n].default is inspect.Parameter.empty]
            check_arguments(self.text, values, None if is_open else names, required, owner)
            only = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_ONLY]
            positional = [values.pop(name) for name in only if name in values]
            return imported.call(lambda: function(*positional, **values))

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call


class OwnModel(OwnCode):
    """A network in a Python file: its class, a function that builds it, or an instance.

    Examples
    --------
    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "my_net.py")
    >>> _ = file.write_text("def net(width: int = 8): ...")
    >>> list(OwnModel(f"{file}:net").__nlbench_model__.options)
    ['width']
    """

    @property
    def __nlbench_model__(self) -> ModelInfo:
        parameters = self.parameters
        return ModelInfo(
            fingerprint=self.fingerprint, options=parameters.options, required=parameters.required
        )

    def builder(self, seed: int) -> Callable[..., Any]:
        """Run the file and return the function that builds the network.

        A network that the file builds when it is imported is built anew for each seed.
        """
        import torch

        from nlbench.introspection.model_copy import rebound_copy
        from nlbench.introspection.random_state import RandomStream, seeded

        with RandomStream(f"own model {seed}").active(), seeded(seed):
            is_value = isinstance(self.definition, ast.expr)
            imported = ImportedFile(self.file) if is_value else self._imported()
            value = self.load(imported)
            if isinstance(value, torch.nn.Module):
                if not is_value and not self.file.installed:
                    value = self.load(ImportedFile(self.file))
                return lambda: rebound_copy(value)
        if not callable(value):
            raise RequestError(
                f"{self.text} is a {type(value).__name__}, expected a network, its class or a "
                "function that builds it"
            )
        return self.bind(value, imported, "model")

    def _imported(self) -> ImportedFile:
        """Run the file unless it has been. What it draws doesn't depend on the seed."""
        from nlbench.introspection.random_state import RandomStream

        with RandomStream("own file").active():
            return _import(self.file, self.fingerprint())


def _import(file: SourceFile, fingerprint: str) -> ImportedFile:
    """Run a file once for each version of it, and of the files that it reads."""
    imported = _cached_import(file, fingerprint)
    if imported.is_outdated:
        _cached_import.cache_clear()
        imported = _cached_import(file, fingerprint)
    add_opened(imported.opened)
    return imported


@lru_cache(maxsize=8)
def _cached_import(file: SourceFile, fingerprint: str) -> ImportedFile:
    del fingerprint
    return ImportedFile(file)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return a signature, with the annotations' values if they have any."""
    for evaluate in (True, False):
        with contextlib.suppress(Exception):  # An annotation may be any expression.
            return inspect.signature(function, eval_str=evaluate)
    return inspect.Signature()


def _converted(value: Any, parameter: inspect.Parameter | None, label: str) -> Any:
    """Convert a setting to the type of an argument, and return any other value as it is."""
    if not isinstance(value, OptionValue):
        return value
    if value == "None" and parameter is not None and parameter.default is None:
        return None  # Whatever the annotation says.
    return _typed(value, _kind(parameter), label)


def _kind(parameter: inspect.Parameter | None) -> Any:
    """Return the type of an argument: its annotation, or that of its default."""
    if parameter is None:
        return None
    kind = parameter.annotation
    default = parameter.default
    if kind is parameter.empty:
        is_typed = isinstance(default, str | Enum) or is_dataclass(default)
        return type(default) if is_typed else None
    names = {plain.__name__: plain for plain in _PLAIN}
    return names.get(kind) if isinstance(kind, str) else kind


_PLAIN = (int, float, bool, str)


def _typed(value: OptionValue | str, kind: Any, label: str) -> Any:
    """Convert a setting to an annotated type, or to a Python literal if the type isn't known.

    Examples
    --------
    >>> _typed("5", int | str, "width"), _typed("None", float | None, "drop")
    (5, None)
    """
    origin = typing.get_origin(kind)
    if origin is Annotated:
        return _typed(value, typing.get_args(kind)[0], label)
    wrong = RequestError(f"{label}: expected {_kind_text(kind)}, got '{shorten(value)}'")
    if origin in (Union, UnionType):
        # A number is one, although it is also text.
        for member in sorted(typing.get_args(kind), key=lambda kind: (kind is str, kind is bool)):
            with contextlib.suppress(RequestError):
                return _typed(value, member, label)
        raise wrong
    if kind is NoneType:
        if value != "None":
            raise wrong
        return None
    if origin is Literal or (isinstance(kind, type) and issubclass(kind, Enum)):
        members = {str(member): member for member in typing.get_args(kind)}
        if origin is None:
            members = {str(member.value): member for member in kind} | dict(kind.__members__)
        if str(value) not in members:
            raise RequestError(f"{label}: unknown '{shorten(value)}'{nearest(str(value), members)}")
        return members[str(value)]
    if kind in _PLAIN:
        return Option(kind()).parse(value, label)
    literal = _literal(value) if isinstance(value, str) else value
    has_fields = is_dataclass(kind)
    if not has_fields:
        return literal
    if not isinstance(literal, dict):
        raise wrong
    try:
        return kind(**literal)
    except TypeError as error:
        raise RequestError(f"{label}: {first_line(error)}") from error


def _kind_text(kind: Any) -> str:
    has_fields = is_dataclass(kind)
    if has_fields:
        return f"a dictionary, the fields of {kind.__name__}"
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def _literal(text: str) -> Any:
    """Convert text to a Python literal if it is one."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def output_function(choice: str) -> Callable[[Any], Any] | None:
    """Return the function that a choice of the model's output refers to, or None for a name."""
    if not is_reference(choice):
        return None
    code = OwnCode(choice)
    imported = _import(code.file, code.fingerprint())
    function = code.load(imported)
    if not callable(function):
        kind = type(function).__name__
        raise RequestError(f"model.output: {choice} is a {kind}, expected a function")
    return function


def output_version(choice: object) -> str:
    """Return the hash of the file that a choice of the model's output refers to, if any."""
    is_function = isinstance(choice, str) and is_reference(choice)
    return OwnCode(str(choice)).fingerprint() if is_function else ""


class OwnDatasets(Family):
    """Data in Python files. Their names are references, without the family's name."""

    description = f"{FORMS}: {DATA_FORMS}"
    claimed_form = FORMS

    def claim(self, name: str) -> str:
        """Return the name if it is a reference."""
        return name if is_reference(name) else ""

    def load(self, name: str) -> OwnDataset:
        """Return the function that opens the data, without running the file."""
        return OwnDataset(name)


class OwnDataset(OwnCode):
    """Data in a Python file. The call opens them."""

    @property
    def __nlbench_dataset__(self) -> DatasetInfo:
        parameters = self.parameters
        # An argument without a plain default is left to the function unless it is set.
        options = {
            name: option if isinstance(option.default, OptionValue) else Option("", kind="literal")
            for name, option in (parameters.options or {}).items()
        }
        return DatasetInfo(options, fingerprint=self.fingerprint, owner="data")

    def __call__(self, **options: Any) -> Dataset:
        """Run the file and open the data, with the same random numbers for all subjects."""
        from nlbench.introspection.random_state import RandomStream

        from .own_data import as_dataset

        with RandomStream("own data").active():
            imported = ImportedFile(self.file)
            value = self.load(imported)
            is_source = hasattr(value, "__getitem__") or hasattr(value, "__iter__")
            if isinstance(value, type) or (callable(value) and not is_source):
                value = self.bind(value, imported, "data")(**self._changed(options))
            return imported.call(lambda: as_dataset(self.text, value))

    def _changed(self, options: Mapping[str, OptionValue | str]) -> dict[str, Any]:
        """Return the options that differ from the defaults, which the source may not show."""
        defaults = self.__nlbench_dataset__.options
        return {
            name: value
            for name, value in options.items()
            if name not in defaults or value != defaults[name].default
        }
