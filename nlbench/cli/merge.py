"""``nlbench merge``."""

from pathlib import Path
from typing import Annotated

import typer

from .common import parse_folder


def merge(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    out: Annotated[str, typer.Option("--out", "-o", help="Folder for the new run.")],
) -> None:
    """Merge the cells of several runs into a new run, leaving the originals unchanged."""
    from nlbench.store.run import merge_runs

    result = merge_runs(runs, parse_folder(out))
    counts = ", ".join(f"{n} {status}" for status, n in result.manifest["cells"].items())
    print(f"run     {result.path}\ncells   {counts or 'none'}")
