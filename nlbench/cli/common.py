"""What commands share, those of plugins too: names and settings, tables, interruptions."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlbench import registry
from nlbench.errors import RequestError, one_line, shown
from nlbench.request import parse_names, parse_settings

if TYPE_CHECKING:
    from nlbench.store.run_folder import Run

__all__ = [
    "Interrupted",
    "command_line",
    "completed",
    "note",
    "print_table",
    "show_run",
    "split_dataset_options",
    "split_names",
]


def split_names(texts: list[str], option: str) -> tuple[str, ...]:
    """Read names with commas."""
    names = tuple(dict.fromkeys(name for text in texts for name in parse_names(text)))
    if not names:
        raise RequestError(f"{option}: expected at least one name, got '{shown(','.join(texts))}'")
    return names


def split_dataset_options(
    given: Iterable[str], data: str
) -> tuple[tuple[tuple[str, str], ...], dict[str, str]]:
    """Sort ``--set OWNER.OPTION=VALUE`` into options of the dataset and the rest.

    Examples
    --------
    >>> split_dataset_options(["synthetic.size=9", "absdev.normalize=range"], "synthetic")
    ((('size', '9'),), {'absdev.normalize': 'range'})
    """
    settings = parse_settings(given, "--set")
    own = {key: value for key, value in settings.items() if key.startswith(f"{data}.")}
    options = tuple(sorted((key.removeprefix(f"{data}."), value) for key, value in own.items()))
    return options, {key: value for key, value in settings.items() if key not in own}


def completed(group: str) -> Callable[[str], list[str]]:
    """Give what completes a name of a group, also the last of several with commas.

    Examples
    --------
    >>> completed("measures")("affinity,aff")
    ['affinity,affinity']
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{n}" for n in registry.entries(group) if n.startswith(last)]

    return complete


def print_table(rows: list[dict[str, Any]], as_json: bool, *, has_head: bool = False) -> None:
    """Print rows of equal keys as columns, under their names if they don't speak for themselves."""
    if as_json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    if not rows:
        print("(none)")
        return
    if has_head:
        rows = [{key: key for key in rows[0]}, *rows]
    lines = [{key: one_line(value) for key, value in row.items()} for row in rows]
    widths = {key: max(len(row[key]) for row in lines) for key in lines[0]}
    for row in lines:
        print("  ".join(value.ljust(widths[key]) for key, value in row.items()).rstrip())


def command_line() -> str:
    """Give the command as it was typed, to be recorded, or typed again."""
    return shlex.join(["nlbench", *sys.argv[1:]])


def show_run(run: Run, report: bool, **beside: Path) -> None:
    """Print a run's leaderboard and where its files are, after the page was written.

    Parameters
    ----------
    run : Run
        In a folder.
    report : bool
        Whether there is to be a page; one that is newer than the run stays.
    **beside : Path
        What else is there, by what it is called.
    """
    from rich.console import Console

    assert run.path is not None
    page = run.path / "report.html"
    # The page first: what is printed may have no reader.
    if report and not _is_newer(page, run.path / "manifest.json"):
        page = run.report(page)
    registry.load("reports", "terminal")(run, Console())
    files = {"run": run.path, **beside, "table": run.path / "scores.csv"}
    files |= {"report": page} if report else {}
    width = max(map(len, ("report", *files))) + 2
    print("", *(f"{name:<{width}}{file}" for name, file in files.items()), sep="\n")


def _is_newer(file: Path, other: Path) -> bool:
    try:
        return file.stat().st_mtime_ns > other.stat().st_mtime_ns
    except OSError:
        return False


class Interrupted(Exception):
    """The user stopped what can be taken up again; its arguments are lines to print.

    Parameters
    ----------
    kept : str
        What there is.
    command : str
        That goes on with it.
    """

    def __init__(self, kept: str, command: str) -> None:
        super().__init__(f"interrupted; {kept}", f"go on with: {command}")


def note(message: str) -> None:
    """Say one line on standard error."""
    print(f"nlbench: {one_line(message)}", file=sys.stderr)
