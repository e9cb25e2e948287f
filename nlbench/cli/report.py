"""``nlbench report``."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from nlbench.errors import RequestError, shorten

from .common import note


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run folders, or a folder that contains several.", metavar="RUN..."),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Output file, or a folder for an index and a page per run."
        ),
    ] = Path("report.html"),
    is_opened: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write a self-contained page for one or more runs, or a folder with a page for each."""
    is_site = output.is_dir() or not output.suffix
    if not is_site and output.suffix.lower() not in (".html", ".htm"):
        expected = "a name ending in .html, or a folder"
        raise RequestError(f"--output: expected {expected}, got '{shorten(str(output))}'")

    from nlbench.lazy import load_reports
    from nlbench.store.run import load_run

    loaded = [load_run(path) for folder in runs for path in _expand(folder)]
    reports = load_reports()
    if not is_site:
        reports.check_page(output)
    page = (reports.write_site if is_site else reports.write_page)(loaded, output)
    print(page)
    if is_opened and not webbrowser.open(page.resolve().as_uri()):
        note("no browser to open the page with")


def _expand(path: Path) -> list[Path]:
    """Return a run's folder, or the folders of the runs in a folder."""
    if (path / "manifest.json").is_file() or not path.is_dir():
        return [path]
    return sorted(file.parent for file in path.glob("*/manifest.json")) or [path]
