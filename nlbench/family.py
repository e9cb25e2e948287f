"""What a family of plugins is: many names behind one entry point."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

__all__ = ["Family"]


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
        """Names of the members, without the family's."""

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
