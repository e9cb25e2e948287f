"""Process-wide settings that overlapping passes share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


class SharedSetting:
    """A process-wide setting that several passes use at the same time.

    The first pass to enter sets it and the last one to exit restores it. If each pass restored the
    value that it found, one could change the setting during another, or leave it changed.

    Examples
    --------
    >>> from contextlib import nullcontext
    >>> shared = SharedSetting(nullcontext)
    >>> with shared(), shared():
    ...     pass
    """

    def __init__(self, change: Callable[[], AbstractContextManager[Any]]) -> None:
        self._change = change
        self._lock = threading.Lock()
        self._users = 0
        self._active: AbstractContextManager[Any] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Return a context in which the setting applies."""
        with self._lock:
            if self._users == 0:
                self._active = self._change()
                self._active.__enter__()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0 and self._active is not None:
                    self._active.__exit__(None, None, None)
