"""``nlbench similarity``."""

from pathlib import Path
from typing import Annotated

import typer

from nlbench.errors import RequestError, shorten

from .common import numbered
from .parameters import Device


def similarity(
    run: Annotated[Path, typer.Argument(help="Run folder.", metavar="RUN")],
    other: Annotated[
        Path | None, typer.Argument(help="Run folder to compare with.", metavar="[RUN]")
    ] = None,
    subject: Annotated[
        str | None, typer.Option(help="Network in the first run, by its label or its weights.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="Network to compare with, in the second run or else in the first."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help=r"New file, .html or .csv. \[default: similarity.html in the run's folder]",
        ),
    ] = None,
    device: Device = "auto",
) -> None:
    """Compare the outputs of all activations of a network, or of two networks, by CKA.

    The networks are loaded again, which runs their code.
    """
    if output is not None and output.suffix not in (".html", ".csv"):
        raise RequestError(
            f"--output: expected a name ending in .html or .csv, got '{shorten(str(output))}'"
        )
    if output is not None and output.exists():
        raise RequestError(f"--output: {output} already exists; choose another name")

    from nlbench.representations import similarity as compute
    from nlbench.store.run import load_run

    runs = [None if path is None else load_run(path) for path in (run, other)]
    assert runs[0] is not None
    matrix = compute(runs[0], runs[1], subject=subject, against=against, device=device)
    print(matrix.write(output or numbered(run / "similarity.html")))
