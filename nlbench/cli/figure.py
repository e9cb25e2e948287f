"""``nlbench figure``."""

from pathlib import Path
from typing import Annotated

import typer

from nlbench.errors import RequestError, shorten

FORMATS = ("pdf", "svg", "png")


def figure(
    run: Annotated[Path, typer.Argument(help="Run folder.", metavar="RUN")],
    form: Annotated[
        str, typer.Argument(help="strip, signature, board, compare or path.", metavar="FORM")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help=r"A .pdf, .svg or .png file. \[default: FORM.pdf]"),
    ] = None,
    measure: Annotated[
        str | None, typer.Option("--measure", help="Measure to draw.", metavar="NAME")
    ] = None,
    subject: Annotated[
        list[str] | None,
        typer.Option(
            "--subject",
            help="Label, model or glob of a network to draw; repeatable.",
            metavar="NAME",
        ),
    ] = None,
    other: Annotated[
        Path | None,
        typer.Option("--with", help="compare: the run of the second network.", metavar="RUN"),
    ] = None,
    width: Annotated[
        str, typer.Option("--width", help="column (3.25 in), text (6.75 in) or a number of inches.")
    ] = "column",
) -> None:
    """Draw a figure for a paper, in its final size: text of 8 points, colour-blind safe."""
    from nlbench.lazy import load_reports
    from nlbench.serialization.files import make_folder, write_atomically
    from nlbench.store.run import load_run

    path = Path(f"{form}.pdf") if output is None else output
    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        expected = "expected a name ending in .pdf, .svg or .png"
        raise RequestError(f"--output: {expected}, got '{shorten(str(path))}'")
    try:
        inches: str | float = float(width)
    except ValueError:
        inches = width
    drawn = load_reports().paper_figure(
        load_run(run),
        form,
        measure=measure,
        subject=subject or None,
        other=None if other is None else load_run(other),
        width=inches,
        format=kind,
    )
    make_folder(path.parent)
    write_atomically(path, drawn.to_bytes())
    print(path)
