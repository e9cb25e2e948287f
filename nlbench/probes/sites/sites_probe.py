"""The probe `sites`, its options and their parsers, without PyTorch."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nlbench.errors import RequestError, nearest, shorten
from nlbench.options import Option
from nlbench.parsers import parse_index
from nlbench.probes import LazyProbe, ProbeOptions

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

    def takes_all(self, name: str, kind: str | None) -> bool:
        """Return True if every site of this name and kind meets the conditions."""
        is_decided = not self.roles and (kind is not None or not self.kinds)
        return is_decided and self.may_take(name, kind)

    def meets(self, site: Site) -> bool:
        return self.may_take(site.name, site.kind) and all(role == site.role for role in self.roles)


@dataclass(frozen=True)
class Selection:
    """A selection of sites.

    Examples
    --------
    >>> selection = Selection.parse("layer1.*, kind:gelu+every:2")
    >>> selection.may_take("layer1.0.relu", "relu"), selection.may_take("act", "relu")
    (True, False)
    """

    # Alternatives; a site has to match one of them. If empty, all sites are selected.
    choices: tuple[_Alternative, ...] = ()
    # A site must match none of these.
    excluded: tuple[_Alternative, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Selection:
        """Parse comma-separated alternatives, each consisting of conditions joined by ``+``.

        A condition is a glob over names, ``kind:GLOB``, ``role:ROLE`` or ``every:K``. The last one
        selects every k-th of the sites that meet the other conditions, starting with the first. An
        alternative that begins with ``!`` excludes its sites from the others.
        """
        parts = [part.strip() for part in text.split(",") if part.strip()]
        excluded = tuple(_parse(part[1:]) for part in parts if part.startswith("!"))
        if any(choice.every > 1 for choice in excluded):
            raise RequestError(f"sites.select: '{text}', expected names, kinds or roles after '!'")
        chosen = (part for part in parts if part != "*" and not part.startswith("!"))
        return cls(tuple(map(_parse, chosen)), excluded)

    def may_take(self, name: str, kind: str | None) -> bool:
        """Return True if a site may be selected. The kind is None if not yet known."""
        if any(choice.takes_all(name, kind) for choice in self.excluded):
            return False
        return not self.choices or any(choice.may_take(name, kind) for choice in self.choices)

    def check(self, sites: Iterable[Site]) -> None:
        """Raise `nlbench.RequestError` if an alternative or all of them match none of the sites."""
        known = list(sites)
        for choice in self.choices + self.excluded:
            if known and not any(choice.meets(site) for site in known):
                near = _nearest(choice, known)
                raise RequestError(
                    f"sites.select: '{choice.text}' matches none of the {len(known)} sites{near}"
                )
        picker = Picker(self)
        if known and not any(map(picker.takes, known)):
            raise RequestError(f"sites.select excludes all of the {len(known)} sites")


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
        self._excluded = selection.excluded
        self._met: Counter[int] = Counter()

    def takes(self, site: Site) -> bool:
        """Return True if the next site is selected."""
        if any(choice.meets(site) for choice in self._excluded):
            return False
        is_selected = not self._choices
        for index, choice in enumerate(self._choices):
            if choice.meets(site):
                is_selected |= self._met[index] % choice.every == 0
                self._met[index] += 1
        return is_selected


def _parse(text: str) -> _Alternative:
    names = []
    kinds = []
    roles = []
    every = 1
    for condition in (part.strip() for part in text.split("+")):
        attribute, colon, value = condition.partition(":")
        # The name of a site's second call also contains a colon: `relu:1`.
        is_name = "=" not in condition and (
            not colon or value.isdigit() or any(mark in value for mark in "*?[")
        )
        if attribute == "every":
            step = parse_index(value)
            if not step:
                raise RequestError(
                    f"sites.select: '{shorten(condition)}', expected every:K with K ≥ 1"
                )
            every = step
        elif attribute == "kind" and value:
            kinds.append(value)
        elif attribute == "role" and value in ROLES:
            roles.append(value)
        elif attribute == "role" and colon:
            hint = nearest(value, ROLES)
            raise RequestError(f"sites.select: unknown role '{shorten(value)}'{hint}")
        elif condition and is_name:
            names.append(condition)
        else:
            raise RequestError(
                f"sites.select: invalid condition '{shorten(condition or text)}', expected a glob, "
                f"kind:KIND, role:ROLE or every:K{nearest(attribute, _ATTRIBUTES) if colon else ''}"
            )
    return _Alternative(text, tuple(names), tuple(kinds), tuple(roles), every)


PLACES = ("activations", "blocks", "mlp", "attention", "spans:L", "modules:GLOB")
"""Values of ``sites.of``."""

ROWS = ("auto", "samples", "tokens", "tokens:K", "last", "nodes")
"""Values of ``sites.rows``."""


def parse_places(of: str) -> tuple[str, ...]:
    """Parse the value of ``sites.of``: comma-separated names from `PLACES`."""
    names = tuple(name.strip() for name in of.split(",") if name.strip())
    for name in names:
        if name.startswith("spans:"):
            parse_lengths(name)
        elif name not in PLACES[:-2] and not (name.startswith("modules:") and name[8:]):
            raise RequestError(f"sites.of: unknown '{shorten(name)}'{nearest(name, PLACES)}")
    if not names or ("activations" in names and len(names) > 1):
        others = ", ".join(PLACES[1:])
        raise RequestError(
            f"sites.of: '{shorten(of)}', expected activations alone, or some of {others}"
        )
    return names


def parse_lengths(spans: str) -> range:
    """Parse the lengths of spans, in blocks, from ``spans:L`` or ``spans:A..B``.

    Examples
    --------
    >>> list(parse_lengths("spans:4")), list(parse_lengths("spans:2..4"))
    ([4], [2, 3, 4])
    """
    first, dots, last = spans.removeprefix("spans:").partition("..")
    shortest = parse_index(first)
    longest = parse_index(last) if dots else shortest
    if not shortest or longest is None or shortest > longest:
        raise RequestError(
            f"sites.of: '{shorten(spans)}', expected a number of blocks as in spans:4 or spans:2..8"
        )
    return range(shortest, longest + 1)


@dataclass(frozen=True)
class RowPolicy:
    """Selection of the rows of an activation."""

    # True if each row is one position of a sample; otherwise each row is a sample.
    tokens: bool = False
    count: int | None = None  # number of positions to draw from each sample; None for all
    last: bool = False  # use only the last position of each sample
    skip: int = 0  # number of leading positions to omit
    # True if each row is an entry of the first axis, as in a graph, however many there are.
    nodes: bool = False

    @classmethod
    def parse(cls, rows: str, skip: int, of: str) -> RowPolicy:
        """Parse ``sites.rows``. With ``auto``, activations and modules have one row per sample.

        Examples
        --------
        >>> RowPolicy.parse("tokens:32", 1, "blocks")
        RowPolicy(tokens=True, count=32, last=False, skip=1, nodes=False)
        >>> [RowPolicy.parse("auto", 0, of).tokens for of in ("activations", "mlp")]
        [False, True]
        """
        if rows == "auto":
            rows = "samples" if of.startswith(("activations", "modules:")) else "tokens"
        if rows == "nodes":
            if skip:
                raise RequestError("sites.skip omits positions of a sample, and nodes have none")
            return cls(nodes=True)
        kind, colon, number = rows.partition(":")
        positions = parse_index(number) if kind == "tokens" else None
        if kind not in ("samples", "tokens", "last") or (colon and not positions):
            raise RequestError(
                f"sites.rows: unknown '{shorten(rows)}', expected one of {', '.join(ROWS)}"
            )
        return cls(kind != "samples", positions, kind == "last", skip)

    @property
    def takes_any_rows(self) -> bool:
        """True if rows are used even where the sample of each is unknown."""
        return self.nodes or (self.tokens and not (self.count or self.last or self.skip))

    @property
    def description(self) -> str:
        """Description of the rows. Empty if each is the mean over all positions of a sample."""
        if self.nodes:
            return "rows are nodes"
        if not self.tokens:
            return f"without the first {self.skip} positions" if self.skip else ""
        number = f"{self.count} tokens of each sequence" if self.count else "tokens, not sequences"
        rows = f"computed over {'last tokens' if self.last else number}"
        return rows + (f", without the first {self.skip} positions" if self.skip else "")


COMPARED_SAMPLES = 4
"""Number of samples that are run first, to test whether float32 is precise enough."""


class Sites(LazyProbe):
    """The probe `sites`."""

    name = "sites"
    description = "input and output of every activation call, block or other module"
    home = "nlbench.probes.sites.listeners"
    shows_on_cpu = True
    checks_samples = True
    options: ClassVar[Mapping[str, Option]] = {
        "of": Option(
            "activations",
            "places to observe: activations, or blocks, mlp, attention, spans:L, modules:GLOB, "
            "joined by commas",
        ),
        "rows": Option(
            "auto",
            "rows (n, d) of a place: samples, tokens, tokens:K drawn from each sample, last, or "
            "nodes of a graph; auto: tokens for blocks, mlp and attention, else samples",
        ),
        "skip": Option(0, "leading positions to omit from each sample", minimum=0, maximum=1e9),
        "reduction": Option(
            "spatial",
            "reduction of a site's tensor to (n, d)",
            choices=("spatial", "flatten", "published"),
        ),
        "batch": Option(
            128, "samples per batch; scores are computed per batch", minimum=1, maximum=1e9
        ),
        "select": Option(
            "*",
            "sites to observe: globs over names, kind:KIND, role:ROLE, every:K; + means and, "
            "a comma means or, ! excludes",
        ),
        "attention": Option(False, "include the softmaxes of attention"),
    }

    def steps(self, samples: int, options: ProbeOptions) -> int:
        """Return the number of batches."""
        return -(-samples // int(options["batch"]))

    def check(self, samples: int | None, options: ProbeOptions) -> None:
        """Validate ``sites.select``, ``sites.of`` and ``sites.rows``."""
        Selection.parse(str(options["select"]))
        parse_places(str(options["of"]))
        RowPolicy.parse(str(options["rows"]), int(options["skip"]), str(options["of"]))

    def stored_samples(self, options: ProbeOptions) -> int:
        """Return the number of samples to run before all samples are run in batches."""
        return COMPARED_SAMPLES


SITES = Sites()
"""The registered instance."""
