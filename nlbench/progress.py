"""Progress on the terminal: a bar for people, nothing where nobody looks."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

__all__ = ["Bar"]


class Bar:
    """A progress bar on standard error, shown only if that is a terminal."""

    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the bar away."""
        self._progress.stop()

    def say(self, what: str) -> None:
        """Show what is going on, without counting."""
        self._progress.update(self._task, description=what)

    def begin(self, steps: int) -> None:
        """Start counting to a number of steps."""
        self._progress.reset(self._task, total=steps)

    def step(self, what: str) -> None:
        """Count one step of something."""
        self._progress.update(self._task, advance=1, description=what)

    def warn(self, message: str) -> None:
        """Say something that the user should know, in one line."""
        self._progress.console.print(
            f"nlbench: {' '.join(message.split())}", markup=False, highlight=False, soft_wrap=True
        )
