"""Parsers of the options ``sites.of`` and ``sites.rows``, without PyTorch.

`probe` declares the options.
"""

from __future__ import annotations

from dataclasses import dataclass

from nlbench.errors import RequestError, nearest

PLACES = ("activations", "blocks", "mlp", "attention", "modules:GLOB")
"""Values of ``sites.of``."""

ROWS = ("auto", "samples", "tokens", "tokens:K", "last")
"""Values of ``sites.rows``."""


def parse_places(of: str) -> tuple[str, ...]:
    """Parse the value of ``sites.of``: names of `PLACES`, separated by commas.

    Raises
    ------
    nlbench.RequestError
        For an unknown name, or activations together with others.
    """
    names = tuple(name.strip() for name in of.split(",") if name.strip())
    for name in names:
        if name not in PLACES[:-1] and not (name.startswith("modules:") and name[8:]):
            raise RequestError(f"sites.of: unknown '{name}'{nearest(name, PLACES)}")
    if not names or ("activations" in names and len(names) > 1):
        raise RequestError(f"sites.of: '{of}', expected activations alone or others of {PLACES}")
    return names


@dataclass(frozen=True)
class RowPolicy:
    """Selection of the rows of an activation.

    Parameters
    ----------
    tokens : bool
        A row is a position of a sample; otherwise it is a sample.
    count : int or None
        Number of positions to draw from each sample; None: all.
    last : bool
        Take the last position of each sample only.
    skip : int
        Number of first positions to leave out.
    """

    tokens: bool = False
    count: int | None = None
    last: bool = False
    skip: int = 0

    @classmethod
    def parse(cls, rows: str, skip: int, of: str) -> RowPolicy:
        """Parse ``sites.rows``; with ``auto``, activations and modules have a row per sample.

        Raises
        ------
        nlbench.RequestError
            For an unknown value.

        Examples
        --------
        >>> RowPolicy.parse("tokens:32", 1, "blocks")
        RowPolicy(tokens=True, count=32, last=False, skip=1)
        >>> [RowPolicy.parse("auto", 0, of).tokens for of in ("activations", "mlp")]
        [False, True]
        """
        if rows == "auto":
            rows = "samples" if of.startswith(("activations", "modules:")) else "tokens"
        kind, colon, number = rows.partition(":")
        is_number = number.isdigit() and int(number) > 0
        if kind not in ("samples", "tokens", "last") or (
            colon and not (kind == "tokens" and is_number)
        ):
            raise RequestError(f"sites.rows: unknown '{rows}', expected one of {', '.join(ROWS)}")
        return cls(kind != "samples", int(number) if colon else None, kind == "last", skip)

    @property
    def description(self) -> str:
        """Description of the rows; empty if each is the mean over all positions of a sample."""
        if not self.tokens:
            return f"without the first {self.skip} positions" if self.skip else ""
        number = f"{self.count} tokens of each sample" if self.count else "tokens"
        rows = f"rows are {'last tokens' if self.last else number}"
        return rows + (f", without the first {self.skip} positions" if self.skip else "")
