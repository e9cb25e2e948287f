"""Errors, and helpers for their messages.

Every error that a user can cause derives from `NlbenchError`. Its message is one line that states
what was received, what was expected and, if available, the nearest valid name.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Sequence


class NlbenchError(Exception):
    """Base class for all errors that nlbench raises."""


class RequestError(NlbenchError, ValueError):
    """Invalid request: an unknown name, an invalid option, an unusable file."""


class PluginError(NlbenchError):
    """Unusable plugin: its import fails, or two plugins claim the same name."""


class Undefined(NlbenchError, ValueError):
    """The value doesn't exist.

    The message is the reason. A measure raises this error for a place or for a whole subject. It is
    not a failure: the status of the result becomes ``undefined``.
    """


class Unobservable(RequestError, Undefined):
    """A model that can't be observed or copied: a wrong argument, or an undefined result."""


class UnsupportedOperation(Undefined):
    """A probe doesn't support an operation of the model.

    Attributes
    ----------
    operation : str
        PyTorch's name for the operation.
    place : str
        The module that calls it.
    """

    def __init__(self, operation: str, place: str, reason: str) -> None:
        super().__init__(f"{operation} at {place}: {reason}")
        self.operation = operation
        self.place = place
        self.reason = reason

    def __reduce__(self) -> tuple[type[UnsupportedOperation], tuple[str, str, str]]:
        return type(self), (self.operation, self.place, self.reason)


class NotFinite(NlbenchError, ValueError):
    """NaN or infinity instead of a finite number."""


def one_line(text: object, limit: int = 2000) -> str:
    r"""Convert untrusted text to one line of at most `limit` characters.

    Control characters are removed: terminals execute escape sequences, and direction marks
    reverse the text after them.

    Examples
    --------
    >>> one_line("two\nlines \x1b[31mred")
    'two lines [31mred'
    """
    words = strip_controls(" ".join(str(text)[: 4 * limit].split()))
    plain = " ".join(words.split())  # again, since removing controls may leave empty words
    return plain if len(plain) <= limit else f"{plain[: limit - 1]}…"


def strip_controls(text: str) -> str:
    r"""Remove control characters from untrusted text, except line ends and tabs.

    Examples
    --------
    >>> strip_controls("two\nlines \x1b[31mred")
    'two\nlines [31mred'
    """
    # Joiners, which scripts and emoji use, are harmless control characters.
    return "".join(c for c in text if c in "\n\t\u200c\u200d" or unicodedata.category(c)[0] != "C")


def error_text(error: BaseException) -> str:
    """Return an error's message on one line, with its class unless it is an `NlbenchError`.

    Examples
    --------
    >>> error_text(RequestError("no model")), error_text(KeyError("size"))
    ('no model', "KeyError: 'size'")
    """
    message = one_line(error_message(error))
    return message if isinstance(error, NlbenchError) else f"{type(error).__name__}: {message}"


def error_message(error: BaseException) -> str:
    """Return the text of an error, or a replacement if its own ``__str__`` fails."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as failure:
        return f"its message can't be printed ({type(failure).__name__})"


def first_line(error: BaseException) -> str:
    r"""Return the first line of an error's message, or its class if the message is empty.

    Examples
    --------
    >>> first_line(RuntimeError("no room\nfor this")), first_line(KeyError())
    ('no room', 'KeyError')
    """
    return (error_message(error).splitlines() or [type(error).__name__])[0]


def system_text(error: Exception) -> str:
    """Return the message of an OSError without its number and file name."""
    message = getattr(error, "strerror", None)
    return str(message or error_message(error)) or type(error).__name__


def shorten(value: object, limit: int = 80) -> str:
    """Format an invalid value as one short line, for a message.

    Examples
    --------
    >>> shorten("x" * 100, 10), shorten(10**5000)
    ('xxxxxxxxx…', 'an int')
    """
    try:
        text = str(value)
    except (ValueError, RecursionError):
        # Integers of thousands of digits, and lists nested thousands deep.
        kind = type(value).__name__
        return f"an {kind}" if kind[:1] in "aeiou" else f"a {kind}"
    return one_line(text, limit)


def enumerate_names(names: Sequence[str], limit: int = 6) -> str:
    """Join names by commas, and count those beyond a limit.

    Examples
    --------
    >>> enumerate_names(["a", "b"]), enumerate_names(["a", "b", "c"], 2)
    ('a, b', 'a, b and 1 more')
    """
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def nearest(name: object, names: Iterable[str], prefix: str = "") -> str:
    """Suggest the valid name that is nearest to an unknown one.

    The text is ``"; did you mean 'x'?"``, or the list of valid names if none is similar. A prefix,
    such as a family's ``torchvision/``, is added to each name.

    Examples
    --------
    >>> nearest("afinity", ["affinity", "absdev"])
    "; did you mean 'affinity'?"
    >>> nearest("Relu", ["RNNCell", "ReLU"])
    "; did you mean 'ReLU'?"
    """
    valid = sorted(names)
    # The time of a comparison is proportional to the product of both lengths.
    by_lower_case = {each.lower(): each for each in valid}
    close = difflib.get_close_matches(str(name)[:200].lower(), by_lower_case, n=1)
    if close:
        return f"; did you mean '{prefix}{by_lower_case[close[0]]}'?"
    if valid:
        first = ", ".join(prefix + name for name in valid[:12])
        return f"; available: {first}{', …' if len(valid) > 12 else ''}"
    return "; none available"
