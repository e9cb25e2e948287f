"""Parsers for the options ``sites.of`` and ``sites.rows``, without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from nlbench.errors import RequestError, nearest

PLACES = ("activations", "blocks", "mlp", "attention", "spans:L", "modules:GLOB")
"""Values of ``sites.of``."""

ROWS = ("auto", "samples", "tokens", "tokens:K", "last", "nodes")
"""Values of ``sites.rows``."""


def parse_places(of: str) -> tuple[str, ...]:
    """Parse the value of ``sites.of``: comma-separated names from `PLACES`.

    Raises
    ------
    nlbench.RequestError
        If a name is unknown, or if ``activations`` is combined with other names.
    """
    names = tuple(name.strip() for name in of.split(",") if name.strip())
    for name in names:
        if name.startswith("spans:"):
            parse_lengths(name)
        elif name not in PLACES[:-2] and not (name.startswith("modules:") and name[8:]):
            raise RequestError(f"sites.of: unknown '{name}'{nearest(name, PLACES)}")
    if not names or ("activations" in names and len(names) > 1):
        others = ", ".join(PLACES[1:])
        raise RequestError(f"sites.of: '{of}', expected activations alone, or some of {others}")
    return names


def parse_lengths(spans: str) -> range:
    """Parse the lengths of spans, in blocks, from ``spans:L`` or ``spans:A..B``.

    Raises
    ------
    nlbench.RequestError

    Examples
    --------
    >>> list(parse_lengths("spans:4")), list(parse_lengths("spans:2..4"))
    ([4], [2, 3, 4])
    """
    first, dots, last = spans.removeprefix("spans:").partition("..")
    last = last if dots else first
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
        raise RequestError(
            f"sites.of: '{spans}', expected a number of blocks as in spans:4, or spans:2..8"
        )
    return range(int(first), int(last) + 1)


@dataclass(frozen=True)
class RowPolicy:
    """Selection of the rows of an activation.

    Parameters
    ----------
    tokens : bool
        True if each row is one position of a sample; otherwise each row is a sample.
    count : int or None
        Number of positions to draw from each sample; None for all.
    last : bool
        Use only the last position of each sample.
    skip : int
        Number of leading positions to omit.
    nodes : bool
        True if each row is an entry of the first axis, as in a graph, however many there are.
    """

    tokens: bool = False
    count: int | None = None
    last: bool = False
    skip: int = 0
    nodes: bool = False

    @classmethod
    def parse(cls, rows: str, skip: int, of: str) -> RowPolicy:
        """Parse ``sites.rows``; with ``auto``, activations and modules have one row per sample.

        Raises
        ------
        nlbench.RequestError
            If the value is unknown.

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
        is_number = number.isdigit() and int(number) > 0
        if kind not in ("samples", "tokens", "last") or (
            colon and not (kind == "tokens" and is_number)
        ):
            raise RequestError(f"sites.rows: unknown '{rows}', expected one of {', '.join(ROWS)}")
        return cls(kind != "samples", int(number) if colon else None, kind == "last", skip)

    @property
    def takes_any_rows(self) -> bool:
        """True if rows are used even where the sample of each is unknown."""
        return self.nodes or (self.tokens and not (self.count or self.last or self.skip))

    @property
    def description(self) -> str:
        """Description of the rows; empty if each is the mean over all positions of a sample."""
        if self.nodes:
            return "rows are nodes"
        if not self.tokens:
            return f"without the first {self.skip} positions" if self.skip else ""
        number = f"{self.count} tokens of each sequence" if self.count else "tokens, not sequences"
        rows = f"computed over {'last tokens' if self.last else number}"
        return rows + (f", without the first {self.skip} positions" if self.skip else "")
