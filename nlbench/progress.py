"""Progress of a run: a bar on a terminal, lines in a log, or nothing."""

from __future__ import annotations

import math
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

from nlbench.errors import RequestError, one_line


class Progress(Protocol):
    """Receiver of a run's progress."""

    def begin(self, steps: int) -> None:
        """Set the number of steps and start counting them."""

    def step(self, text: str) -> None:
        """Count one step."""

    def warn(self, message: str) -> None:
        """Show a one-line warning."""


class ProgressMonitor:
    """Receiver of events during a measurement, which forwards progress to another receiver."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress
        self._warnings: set[str] = set()
        self.has_single_subject = False

    def begin(self, steps: int) -> None:
        """Set the number of steps and start counting them."""
        if self._progress:
            self._progress.begin(steps)

    def step(self, text: str) -> None:
        """Count one step."""
        if self._progress:
            self._progress.step(text)

    def warn(self, message: str) -> None:
        """Forward a one-line warning, unless it has been forwarded before."""
        if self._progress and message not in self._warnings:
            self._warnings.add(message)
            self._progress.warn(message)

    def unloadable(self, reason: str) -> None:
        """Handle a subject that can't be loaded, and raise if there is no other.

        `reason` is empty if its worker crashed.
        """
        if reason and self.has_single_subject:
            raise RequestError(reason)

    def loading(self) -> None:
        """Handle the start of loading a subject."""

    def observing(self, probe: str) -> None:
        """Handle the start of a probe's observation."""

    def enter(self, measure: str) -> None:
        """Handle the start of a call to a measure."""

    def leave(self) -> None:
        """Handle the end of the call. Raise if the measure took too long."""


def create_progress(style: str) -> Bar | PlainProgress:
    """Create a progress display: a bar, a line every 30 seconds or none.

    ``auto`` is a bar if standard error is a terminal.
    """
    if style == "plain":
        return PlainProgress()
    if style == "auto" and not sys.stderr.isatty():
        return PlainProgress(30.0, is_quiet=True)
    return Bar(style != "none")


class _Rate(ProgressColumn):
    """Steps per second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f}/s" if task.speed else "")


class Bar:
    """A progress bar on standard error for a ``with`` block."""

    def __init__(self, visible: bool) -> None:
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
            disable=not visible,
        )
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Remove the bar."""
        self._progress.stop()

    def show_status(self, text: str) -> None:
        """Show the current activity without counting a step."""
        self._progress.update(self._task, description=one_line(text))

    def begin(self, steps: int) -> None:
        """Set the number of steps and start counting them."""
        # The description is that of the last activity, such as planning, until the first step.
        self._progress.reset(self._task, total=steps, description="starting")

    def step(self, text: str) -> None:
        """Count one step."""
        self._progress.update(self._task, advance=1, description=one_line(text))

    def warn(self, message: str) -> None:
        """Show a one-line warning."""
        self._progress.console.print(
            f"nlbench: {one_line(message)}", markup=False, highlight=False, soft_wrap=True
        )


class PlainProgress:
    """Progress lines for a log on standard error, at least `interval` seconds apart.

    If `is_quiet`, only steps and warnings are printed, and no steps during the first interval.
    """

    def __init__(self, interval: float = 5.0, *, is_quiet: bool = False) -> None:
        self._interval = interval
        self._is_quiet = is_quiet
        self._printed = time.monotonic() if is_quiet else -math.inf
        self._total = self._count = 0
        self._start = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Print the number of finished steps."""
        if self._count and not self._is_quiet:
            self._print(f"{self._count} of {self._total} steps done")
        self._count = 0

    def show_status(self, text: str) -> None:
        """Show the current activity without counting a step."""
        if not self._is_quiet:
            self._print(text)

    def begin(self, steps: int) -> None:
        """Set the number of steps and start counting them."""
        self._total, self._count, self._start = steps, 0, time.monotonic()

    def step(self, text: str) -> None:
        """Count one step."""
        self._count += 1
        now = time.monotonic()
        is_last = self._is_quiet and self._count == self._total
        # A dataset of unknown size may take more steps than were expected.
        self._total = max(self._total, self._count)
        if is_last or now - self._printed < self._interval:
            return
        self._printed = now
        rate = self._count / max(now - self._start, 1e-9)
        remaining = (self._total - self._count) / rate
        self._print(
            f"{self._count}/{self._total} steps, {rate:.1f}/s, {remaining:.0f} s left: {text}"
        )

    def warn(self, message: str) -> None:
        """Show a one-line warning."""
        self._print(message)

    def _print(self, text: str) -> None:
        print(f"nlbench: {one_line(text)}", file=sys.stderr, flush=True)
