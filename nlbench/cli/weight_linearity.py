"""``nlbench weight-linearity``."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from nlbench.errors import RequestError, shorten

from .parameters import Device


def weight_linearity(
    run: Annotated[Path, typer.Argument(help="Run folder.", metavar="RUN")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="New file for the table, .csv.")
    ] = None,
    since: Annotated[
        Literal["previous", "first"],
        typer.Option(help="Compare each checkpoint with the one before, or with the first."),
    ] = "previous",
    directions: Annotated[
        int, typer.Option(help="Random directions that sketch a tangent kernel.", min=8, max=4096)
    ] = 64,
    device: Device = "auto",
) -> None:
    """Compare checkpoints with the linearisation in the weights at an earlier one.

    0: the outputs changed linearly in the weights, as in very wide networks. The networks are
    loaded again, which runs their code.
    """
    if output is not None and (output.suffix != ".csv" or output.exists()):
        raise RequestError(
            f"--output: expected a new file ending in .csv, got '{shorten(str(output))}'"
        )

    from nlbench.serialization.files import make_folder, write_atomically
    from nlbench.store.run import load_run

    frame = load_run(run).weight_linearity(since=since, directions=directions, device=device)
    if output is not None:
        make_folder(output.parent)
        write_atomically(output, frame.to_csv(index=False))
    if not frame.reason.any():
        frame = frame.drop(columns="reason")
    print(frame.to_string(index=False, float_format=lambda number: f"{number:.3g}"))
