"""Progress: a bar for people, lines for logs, nothing where nobody looks."""

from __future__ import annotations

import sys
import time
from typing import Protocol, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress
from rich.text import Text

from nlbench.errors import RequestError, nearest, one_line

__all__ = ["Bar", "Monitor", "Plain", "Progress", "shown_progress"]


class Progress(Protocol):
    """Told how far a run has come."""

    def begin(self, steps: int) -> None:
        """Get ready for that many steps."""

    def step(self, what: str) -> None:
        """Count one step of something."""

    def warn(self, message: str) -> None:
        """Say something that the user should know, in one line."""


class Monitor:
    """Told what goes on while subjects are measured; passes progress on, and else does nothing.

    Parameters
    ----------
    progress : Progress, optional
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self._passed_on = progress
        self._said: set[str] = set()

    def begin(self, steps: int) -> None:
        """Get ready for that many steps."""
        if self._passed_on:
            self._passed_on.begin(steps)

    def step(self, what: str) -> None:
        """Count one step of something."""
        if self._passed_on:
            self._passed_on.step(what)

    def warn(self, message: str) -> None:
        """Say something that the user should know, in one line, and once."""
        if self._passed_on and message not in self._said:
            self._said.add(message)
            self._passed_on.warn(message)

    def loading(self) -> None:
        """A subject is being loaded."""

    def observing(self, probe: str) -> None:
        """A probe's observation begins."""

    def enter(self, measure: str) -> None:
        """A measure begins to compute."""

    def leave(self) -> None:
        """It has stopped; raises if it took too long."""


STYLES = ("auto", "rich", "plain", "none")


def shown_progress(style: str) -> Bar | Plain:
    """Give the progress of a style.

    Parameters
    ----------
    style : {"auto", "rich", "plain", "none"}
        ``auto``: a bar if standard error is a terminal, else nothing.

    Raises
    ------
    nlbench.RequestError
        If there is no such style.
    """
    if style not in STYLES:
        raise RequestError(f"--progress: unknown '{style}'{nearest(style, STYLES)}")
    if style == "plain":
        return Plain()
    return Bar({"auto": None, "rich": True, "none": False}[style])


class _Rate(ProgressColumn):
    """Steps a second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f}/s" if task.speed else "")


class Bar:
    """A progress bar on standard error inside of a ``with``, shown only if that is a terminal.

    Parameters
    ----------
    visible : bool, optional
        Whether it is shown, whatever standard error is.
    """

    def __init__(self, visible: bool | None = None) -> None:
        self._visible = sys.stderr.isatty() if visible is None else visible
        self._progress = RichProgress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            _Rate(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not self._visible,
        )
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the bar away."""
        self._progress.stop()

    def say(self, what: str) -> None:
        """Show what is going on, without counting."""
        self._progress.update(self._task, description=one_line(what))

    def begin(self, steps: int) -> None:
        """Start counting to a number of steps."""
        self._progress.reset(self._task, total=steps)

    def step(self, what: str) -> None:
        """Count one step of something."""
        self._progress.update(self._task, advance=1, description=one_line(what))

    def warn(self, message: str) -> None:
        """Say something that the user should know, in one line."""
        self._progress.console.print(
            f"nlbench: {one_line(message)}", markup=False, highlight=False, soft_wrap=True
        )


class Plain:
    """Lines on standard error for a log: at most one every five seconds."""

    def __init__(self) -> None:
        self._said = 0.0
        self._total = self._count = 0
        self._begin = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Say how far it came."""
        if self._count:
            self._print(f"{self._count} of {self._total} steps done")
            self._count = 0

    def say(self, what: str) -> None:
        """Show what is going on, without counting."""
        self._print(what)

    def begin(self, steps: int) -> None:
        """Start counting to a number of steps."""
        self._total, self._count, self._begin = steps, 0, time.monotonic()

    def step(self, what: str) -> None:
        """Count one step of something."""
        self._count += 1
        now = time.monotonic()
        if now - self._said < 5.0:
            return
        self._said = now
        rate = self._count / max(now - self._begin, 1e-9)
        left = max(self._total - self._count, 0) / rate
        self._print(f"{self._count}/{self._total} steps, {rate:.1f}/s, {left:.0f} s left: {what}")

    def warn(self, message: str) -> None:
        """Say something that the user should know, in one line."""
        self._print(message)

    def _print(self, text: str) -> None:
        print(f"nlbench: {one_line(text)}", file=sys.stderr, flush=True)
