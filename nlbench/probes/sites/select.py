"""Selection of sites by name, kind, role or position in the call order."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nlbench.errors import RequestError, nearest

if TYPE_CHECKING:
    from .site import Site

ROLES = ("activation", "gate", "attention", "softcap", "block", "mlp", "span", "module")
_ATTRIBUTES = ("every", "kind", "role")


@dataclass(frozen=True)
class _Alternative:
    """Conditions that a site must all meet."""

    text: str
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    roles: tuple[str, ...]
    every: int

    def may_take(self, name: str, kind: str | None) -> bool:
        return all(fnmatch.fnmatchcase(name, glob) for glob in self.names) and all(
            kind is None or fnmatch.fnmatchcase(kind, glob) for glob in self.kinds
        )

    def meets(self, site: Site) -> bool:
        return self.may_take(site.name, site.kind) and all(role == site.role for role in self.roles)


@dataclass(frozen=True)
class Selection:
    """A selection of sites.

    Parameters
    ----------
    choices : tuple
        Alternatives; a site has to match one of them. If empty, all sites are selected.

    Examples
    --------
    >>> selection = Selection.parse("layer1.*, kind:gelu+every:2")
    >>> selection.may_take("layer1.0.relu", "relu"), selection.may_take("act", "relu")
    (True, False)
    """

    choices: tuple[_Alternative, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Selection:
        """Parse comma-separated alternatives, each consisting of conditions joined by ``+``.

        A condition is a glob over names, ``kind:GLOB``, ``role:ROLE`` or ``every:K``. The last one
        selects every k-th of the sites that meet the other conditions, starting with the first.

        Raises
        ------
        nlbench.RequestError
            If the text is invalid.
        """
        parts = [part.strip() for part in text.split(",") if part.strip()]
        return cls(tuple(_parse(part) for part in parts if part != "*"))

    def may_take(self, name: str, kind: str | None) -> bool:
        """Return True if a site may be selected; the kind is None if not yet known."""
        return not self.choices or any(choice.may_take(name, kind) for choice in self.choices)

    def check(self, sites: Iterable[Site]) -> None:
        """Raise `nlbench.RequestError` if an alternative matches none of a model's sites."""
        known = list(sites)
        for choice in self.choices:
            if known and not any(choice.meets(site) for site in known):
                near = _nearest(choice, known)
                raise RequestError(
                    f"sites.select: '{choice.text}' matches none of the {len(known)} sites{near}"
                )


def _nearest(choice: _Alternative, sites: list[Site]) -> str:
    if choice.names:
        return nearest(choice.names[0], {site.name for site in sites})
    if choice.kinds:
        return nearest(choice.kinds[0], {site.kind for site in sites})
    if "attention" in choice.roles:
        return "; softmaxes of attention are sites only with sites.attention=true"
    return nearest(choice.roles[0], {site.role for site in sites}) if choice.roles else ""


class Picker:
    """A selection applied to the sites in one forward pass, in call order."""

    def __init__(self, selection: Selection) -> None:
        self._choices = selection.choices
        self._met: Counter[int] = Counter()

    def takes(self, site: Site) -> bool:
        """Return True if the next site is selected."""
        is_selected = not self._choices
        for index, choice in enumerate(self._choices):
            if choice.meets(site):
                is_selected |= self._met[index] % choice.every == 0
                self._met[index] += 1
        return is_selected


def _parse(text: str) -> _Alternative:
    names, kinds, roles, every = [], [], [], 1
    for condition in (part.strip() for part in text.split("+")):
        attribute, colon, value = condition.partition(":")
        # The name of a site's second call also contains a colon: `relu:1`.
        is_name = "=" not in condition and (
            not colon or value.isdigit() or any(mark in value for mark in "*?[")
        )
        if attribute == "every":
            if not value.isdigit() or int(value) < 1:
                raise RequestError(f"sites.select: '{condition}', expected every:K with K ≥ 1")
            every = int(value)
        elif attribute == "kind" and value:
            kinds.append(value)
        elif attribute == "role" and value in ROLES:
            roles.append(value)
        elif attribute == "role" and colon:
            raise RequestError(f"sites.select: unknown role '{value}'{nearest(value, ROLES)}")
        elif condition and is_name:
            names.append(condition)
        else:
            raise RequestError(
                f"sites.select: invalid condition '{condition or text}', expected a glob, "
                f"kind:KIND, role:ROLE or every:K{nearest(attribute, _ATTRIBUTES) if colon else ''}"
            )
    return _Alternative(text, tuple(names), tuple(kinds), tuple(roles), every)
