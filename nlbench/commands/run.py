"""``nlbench run``."""

from __future__ import annotations

import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nlbench import registry
from nlbench.errors import RequestError

from .common import Interrupted, split_names, split_seeds, split_settings

if TYPE_CHECKING:
    from nlbench.records import Run

__all__ = ["run"]


def run(
    measures: Annotated[
        list[str] | None, typer.Option(help="Names or globs, with commas. [affinity,absdev]")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Names or globs, with commas. [vgg8]")
    ] = None,
    weights: Annotated[
        str,
        typer.Option(help="trained, init, or a checkpoint's path; auto: trained where it ships."),
    ] = "auto",
    data: Annotated[list[str] | None, typer.Option(help="Datasets, with commas. [digits]")] = None,
    seeds: Annotated[
        list[str] | None,
        typer.Option(help="Seeds of the initialisation and the sample, with commas. [0]"),
    ] = None,
    samples: Annotated[int, typer.Option(help="Samples to look at; 0: the whole split.")] = 512,
    split: Annotated[str, typer.Option(help="test or train.")] = "test",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="OWNER.OPTION=VALUE",
            help="Option of a measure or a probe, repeatable: affinity.shrinkage=none.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; by default runs/MODEL-TIME.")
    ] = None,
    report: Annotated[bool, typer.Option(help="Write report.html into the run's folder.")] = True,
) -> None:
    """Measure models and write a run: board, records, tidy table, report."""
    from nlbench.progress import Bar

    # Misspelt names are found before anything slow is imported.
    names: dict[str, Any] = {
        "measures": split_names(measures or ["affinity,absdev"], "--measures", "measures"),
        "models": split_names(model or ["vgg8"], "--model", "models"),
        "data": split_names(data or ["digits"], "--data", "datasets"),
        "seeds": split_seeds(seeds or ["0"]),
    }
    settings = split_settings(setting or [])
    if not weights:
        raise RequestError("--weights: expected trained, init, auto or a checkpoint's path, got ''")
    folder = _default_folder(names["models"]) if out is None else out
    if out == Path():
        raise RequestError("--out: expected a folder's name, got ''")
    command = shlex.join(["nlbench", *sys.argv[1:]])
    with Bar() as bar:
        bar.say("loading")
        from nlbench.plan import Request
        from nlbench.runner import run as run_request

        request = Request(
            **names,
            weights=weights,
            samples=samples,
            split=split,
            device=device,
            settings=settings,
        )
        try:
            result = run_request(request, folder, progress=bar, command=command)
        except KeyboardInterrupt:
            raise Interrupted(
                f"interrupted; what was finished is in {folder}",
                f"go on with: {_resume_command(command, folder, out)}",
            ) from None
    _show(result, report)


def _show(result: Run, report: bool) -> None:
    from rich.console import Console

    assert result.path is not None
    # The page first: what is printed may have no reader.
    page = result.report(result.path / "report.html") if report else None
    registry.load("reports", "terminal")(result, Console())
    print(f"\nrun     {result.path}")
    print(f"table   {result.path / 'scores.csv'}")
    if page:
        print(f"report  {page}")
    if result.failed:
        raise typer.Exit(1)


def _default_folder(models: tuple[str, ...]) -> Path:
    name = "".join(c if c.isalnum() or c in "-_" else "-" for c in models[0]).strip("-") or "run"
    stem = f"{name[:40]}-{datetime.now():%Y%m%d-%H%M%S}"
    folder, count = Path("runs", stem), 1
    while folder.exists():
        count += 1
        folder = Path("runs", f"{stem}-{count}")
    return folder


def _resume_command(command: str, folder: Path, out: Path | None) -> str:
    return command if out else f"{command} --out {shlex.quote(str(folder))}"
