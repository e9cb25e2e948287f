"""``nlbench compare``."""

from pathlib import Path
from typing import Annotated

import typer

from nlbench import registry
from nlbench.errors import one_line

__all__ = ["compare"]


def compare(
    first: Annotated[Path, typer.Argument(help="Folder of a run.", metavar="RUN")],
    second: Annotated[Path, typer.Argument(help="Folder of another.", metavar="RUN")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write .html, .csv or .md in place of printing."),
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-if",
            help="Exit with 1 where a measure changed by more: 'absdev > 5%', 'affinity > 0.01', "
            "'density > +10%' (rose), 'r2 < -0.1' (fell). Repeatable.",
        ),
    ] = None,
) -> None:
    """Say what differs between two runs, cell by cell, and what could explain it."""
    from rich.console import Console

    from nlbench.store.run_folder import load_run

    comparison = registry.load("reports", "compare")(load_run(first), load_run(second))
    broken = comparison.broken(fail_if or [])
    if output is None:
        comparison.print(Console())
    else:
        print(comparison.write(output))
    for line in broken:
        print(f"failed: {one_line(line)}")
    if broken:
        raise typer.Exit(1)
