"""``nlbench merge``."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["merge"]


def merge(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder of the new run.")],
) -> None:
    """Put the cells of several runs into one new run; theirs are left as they are."""
    from nlbench.store.run_folder import merge_runs

    result = merge_runs(runs, out)
    counts = ", ".join(f"{n} {status}" for status, n in result.manifest["cells"].items())
    print(f"run     {result.path}\ncells   {counts or 'none'}")
