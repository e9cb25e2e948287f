"""``nlbench report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nlbench import registry

__all__ = ["report"]


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.", metavar="RUN...")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
) -> None:
    """Write one self-contained page for one or several runs."""
    from nlbench.store.run_folder import load_run

    page = registry.load("reports", "html")([load_run(path) for path in runs], output)
    print(page)
