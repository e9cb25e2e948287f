"""``nlbench report``."""

from pathlib import Path
from typing import Annotated

import typer

from nlbench import registry

__all__ = ["report"]


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs, or one of several.", metavar="RUN...")
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="The page; a folder, for a site with one page a run."),
    ] = Path("report.html"),
) -> None:
    """Write one self-contained page for one or several runs, or a site of them."""
    from nlbench.store.run_folder import load_run

    loaded = [load_run(path) for given in runs for path in _expanded(given)]
    writer = "site" if output.is_dir() or not output.suffix else "html"
    print(registry.load("reports", writer)(loaded, output))


def _expanded(path: Path) -> list[Path]:
    """Give a run's folder as it is, and the runs inside a folder that is none."""
    if (path / "manifest.json").is_file() or not path.is_dir():
        return [path]
    return sorted(file.parent for file in path.glob("*/manifest.json")) or [path]
