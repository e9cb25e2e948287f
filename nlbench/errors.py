"""What can go wrong, and what is said about it.

Every error that a user can cause derives from `NlbenchError`; its message is
one line that says what was wrong, what was expected and, where there is one,
the nearest valid name.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable

__all__ = [
    "NlbenchError",
    "NotFinite",
    "PluginError",
    "RequestError",
    "Undefined",
    "UnsupportedOperation",
    "error_text",
    "first_line",
    "nearest",
    "one_line",
    "shown",
    "system_text",
    "without_controls",
]


class NlbenchError(Exception):
    """Base of every error that nlbench raises on purpose."""


class RequestError(NlbenchError, ValueError):
    """The request is wrong: an unknown name, a bad option, a file that can't be used."""


class PluginError(NlbenchError):
    """A plugin can't be used: it fails at import, or two claim one name."""


class Undefined(NlbenchError, ValueError):
    """There is nothing to measure here; the message is the reason.

    A measure raises it for a place or for a whole subject. It is an answer, not
    a failure: the result's status becomes ``undefined``.
    """


class UnsupportedOperation(Undefined):
    """A probe met an operation that it can't look through exactly.

    Attributes
    ----------
    operation : str
        Name of the operation, as PyTorch calls it.
    place : str
        Where in the model it is called.
    """

    def __init__(self, operation: str, place: str, why: str) -> None:
        super().__init__(f"{operation} at {place}: {why}")
        self.operation = operation
        self.place = place
        self.why = why

    def __reduce__(self) -> tuple[type[UnsupportedOperation], tuple[str, str, str]]:
        return type(self), (self.operation, self.place, self.why)


class NotFinite(NlbenchError, ValueError):
    """NaN or an infinity where a finite number was expected."""


def one_line(text: object, most: int = 2000) -> str:
    r"""Give text from outside as one line: no control characters, and no more than so many.

    Escape sequences would be obeyed by a terminal, and marks of direction turn what follows.

    Examples
    --------
    >>> one_line("two\nlines \x1b[31mred")
    'two lines [31mred'
    """
    words = without_controls(" ".join(str(text)[: 4 * most].split()))
    plain = " ".join(words.split())  # what stood apart by control characters alone
    return plain if len(plain) <= most else f"{plain[: most - 1]}…"


def without_controls(text: str) -> str:
    r"""Give text from outside without control characters, but for the ends of lines and tabs.

    Examples
    --------
    >>> without_controls("two\nlines \x1b[31mred")
    'two\nlines [31mred'
    """
    return "".join(c for c in text if c in _KEPT or unicodedata.category(c)[0] != "C")


# Of the kinds of control, the joiners of scripts and emoji do no harm either.
_KEPT = "\n\t\u200c\u200d"


def error_text(error: BaseException) -> str:
    """Say what an error says in one line, and its kind too unless nlbench raised it on purpose.

    Examples
    --------
    >>> error_text(RequestError("no model")), error_text(KeyError("size"))
    ('no model', "KeyError: 'size'")
    """
    said = one_line(error)
    return said if isinstance(error, NlbenchError) else f"{type(error).__name__}: {said}"


def first_line(error: BaseException) -> str:
    r"""Shorten what an error of somebody else's says to its first line.

    Examples
    --------
    >>> first_line(RuntimeError("no room\nfor this")), first_line(KeyError())
    ('no room', 'KeyError')
    """
    return (str(error).splitlines() or [type(error).__name__])[0]


def system_text(error: Exception) -> str:
    """Say what the system says against a file, without the number of the error and the name.

    The error's kind where it says nothing.
    """
    return str(getattr(error, "strerror", None) or error) or type(error).__name__


def shown(value: object, most: int = 80) -> str:
    """Give a wrong value as a message shows it: in one line, cut.

    Examples
    --------
    >>> shown("x" * 100, 10), shown(10**5000)
    ('xxxxxxxxx…', 'an int')
    """
    try:
        text = str(value)
    except (ValueError, RecursionError):
        # Numbers of thousands of digits, and lists of thousands of lists.
        kind = type(value).__name__
        return f"an {kind}" if kind[:1] in "aeiou" else f"a {kind}"
    return one_line(text, most)


def nearest(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Say which valid name was probably meant.

    Parameters
    ----------
    name : str
        What was given.
    names : iterable of str
        What is valid.
    prefix : str
        What stands before a name that is suggested, such as its family's ``torchvision/``.

    Returns
    -------
    str
        ``"; did you mean 'x'?"``, else the list of valid names, else nothing.

    Examples
    --------
    >>> nearest("afinity", ["affinity", "absdev"])
    "; did you mean 'affinity'?"
    """
    valid = sorted(names)
    # Comparing takes the product of both lengths; nobody means a name by a page of text.
    close = difflib.get_close_matches(name[:200], valid, n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{prefix}{close[0]}'?"
    if valid:
        shown = ", ".join(prefix + one for one in valid[:12]) + (", …" if len(valid) > 12 else "")
        return f"; there are: {shown}"
    return "; there are none"
