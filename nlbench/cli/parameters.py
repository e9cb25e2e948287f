"""Option declarations shared by several commands."""

from typing import Annotated, Literal

import typer

from .common import name_completer

ModelName = Annotated[
    str,
    typer.Option(
        help="A registered model, or your own: my_net.py:Net.",
        autocompletion=name_completer("models"),
    ),
]
DataName = Annotated[
    str,
    typer.Option(
        help="A registered dataset, a path, or my_net.py:loader.",
        autocompletion=name_completer("datasets"),
    ),
]
DatasetSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="DATASET.OPTION=VALUE", help="Option of the dataset, or model.ARGUMENT."
    ),
]
MeasureSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="OWNER.OPTION=VALUE",
        help="Set an option of the dataset or a measure (repeatable).",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
Seeds = Annotated[list[str] | None, typer.Option(help="Comma-separated seeds or ranges (0-9).")]
ProgressStyle = Annotated[
    Literal["auto", "rich", "plain", "none"],
    typer.Option(help="auto, rich, plain or none; auto: rich on a terminal, else a line per 30 s."),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]
