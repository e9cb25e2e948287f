"""The outcome of one check of a measure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["kept", "broken", "not claimed", "not checked"]


@dataclass(frozen=True)
class Check:
    """The outcome of one check of a measure.

    Parameters
    ----------
    outcome : {"kept", "broken", "not claimed", "not checked"}
        ``not claimed``: the value changes, but the measure doesn't claim to be invariant.
        ``not checked``: the detail gives the reason.
    """

    name: str
    outcome: Outcome
    detail: str = ""


def check_equal(name: str, difference: str, hint: str = "") -> Check:
    """Return a check that is broken if there is a difference; its detail ends with `hint`."""
    return Check(name, "broken" if difference else "kept", difference and difference + hint)
