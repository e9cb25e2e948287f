"""One check of a measure, with its outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["kept", "broken", "not claimed", "not checked"]


@dataclass(frozen=True)
class Check:
    """One check of a measure.

    Parameters
    ----------
    outcome : {"kept", "broken", "not claimed", "not checked"}
        ``not claimed``: the value changes, and the measure doesn't declare that it is
        invariant. ``not checked``: the detail has the reason.
    """

    name: str
    outcome: Outcome
    detail: str = ""


def check_equal(name: str, difference: str, hint: str = "") -> Check:
    """Return a check that is broken if there is a difference; the hint follows in the detail."""
    return Check(name, "broken" if difference else "kept", difference and difference + hint)
