"""``nlbench compare``."""

from pathlib import Path
from typing import Annotated

import typer

from nlbench.errors import one_line


def compare(
    first: Annotated[Path, typer.Argument(help="Folder of the first run.", metavar="RUN")],
    second: Annotated[Path, typer.Argument(help="Folder of the second run.", metavar="RUN")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write a .html, .csv or .md file instead of printing."),
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-if",
            help="Exit with status 1 if a measure changed by more than this, beyond its error: "
            "'absdev.relative > 5%', 'affinity > 0.01', 'density > +10%' (increase), "
            "'r2 < -0.1' (decrease), 'affinity@* > 0.05' (any place), "
            "'affinity@features.13 > 5%' (one place). Repeatable.",
        ),
    ] = None,
) -> None:
    """Show the differences between two runs, layer by layer, and what could explain them."""
    from rich.console import Console

    from nlbench.lazy import load_reports
    from nlbench.store.run import load_run

    reports = load_reports()
    if output is not None:
        reports.check_comparison_file(output)
    comparison = reports.compare_runs(load_run(first), load_run(second))
    broken = comparison.broken(fail_if or [])
    if output is None:
        comparison.print(Console())
    else:
        print(comparison.write(output))
    for line in broken:
        print(f"failed: {one_line(line)}")
    if broken:
        raise typer.Exit(1)
