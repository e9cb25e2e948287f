"""``nlbench linearize``."""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nlbench import registry
from nlbench.cli.common import Interrupted, split_names, split_seeds, split_settings
from nlbench.errors import RequestError

if TYPE_CHECKING:
    from nlbench.store.run_folder import Run

__all__ = ["linearize"]


def linearize(
    model: Annotated[str, typer.Option(help="A registered model that calls ReLU.")],
    out: Annotated[Path, typer.Option(help="The run's folder; its checkpoints lie there too.")],
    data: Annotated[str, typer.Option(help="A registered dataset.")] = "digits",
    weights: Annotated[
        str,
        typer.Option(
            help="trained or a checkpoint's path; auto: trained where it ships, else trained "
            "first, once a seed."
        ),
    ] = "auto",
    omega: Annotated[
        str, typer.Option(help="Weights of the penalty, with commas.")
    ] = "0,0.0003,0.001,0.003,0.01",
    seeds: Annotated[
        list[str] | None, typer.Option(help="Seeds of the training, with commas. [0]")
    ] = None,
    from_start: Annotated[
        bool,
        typer.Option(
            "--from-start/--post-training",
            help="Under the penalty from the initialisation on, or on trained weights.",
        ),
    ] = False,
    control: Annotated[
        str,
        typer.Option(help="random: as many units again, drawn at random, linear and trained on."),
    ] = "",
    layerwise: Annotated[
        bool, typer.Option("--layerwise", help="One slope a layer instead of one a channel.")
    ] = False,
    base_recipe: Annotated[
        str,
        typer.Option(
            help="The recipe of networks that are trained first; auto: the one that suits them."
        ),
    ] = "auto",
    epochs: Annotated[
        int | None, typer.Option(help="Instead of the recipe's number.", min=1)
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Instead of the recipe's.")] = None,
    slope_rate: Annotated[
        float | None, typer.Option(help="Factor of the learning rate for the slopes.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="OWNER.OPTION=VALUE",
            help="Option of the dataset or of pathlength, repeatable.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    report: Annotated[bool, typer.Option(help="Write report.html into the run's folder.")] = True,
) -> None:
    """Make a network's units linear under a sparsity prior; record what depth is left.

    The same command goes on where it was interrupted.
    """
    if control not in ("", "random"):
        raise RequestError(f"--control: expected random, got '{control}'")
    if out == Path():
        raise RequestError("--out: expected a folder's name, got ''")
    given = split_settings(setting or [])
    options = tuple(
        sorted((k.partition(".")[2], v) for k, v in given.items() if k.startswith(f"{data}."))
    )
    settings = {k: v for k, v in given.items() if not k.startswith(f"{data}.")}
    changes: dict[str, Any] = {
        "epochs": epochs,
        "learning_rate": learning_rate,
        "slope_rate": slope_rate,
    }
    names: dict[str, Any] = {
        "model": model,
        "data": data,
        "weights": weights,
        "base_recipe": base_recipe,
        "measure": "pathlength",
        "omegas": _numbers(omega),
        "seeds": split_seeds(seeds or ["0"]),
        "mode": "from-start" if from_start else "post-training",
        "control": bool(control),
        "layerwise": layerwise,
        "changes": {name: value for name, value in changes.items() if value is not None},
        "options": options,
        "device": device,
    }
    for group, name in (("models", model), ("datasets", data), ("recipes", base_recipe)):
        if (group, name) != ("recipes", "auto"):
            registry.expand(group, [name])
    command = shlex.join(["nlbench", *sys.argv[1:]])
    from nlbench.progress import Bar

    with Bar() as bar:
        bar.say("loading")
        from .linearise import LinearisingRequest, linearise
        from .train import suited_recipe

        names["base_recipe"] = suited_recipe(model, base_recipe)

        try:
            run = linearise(
                LinearisingRequest(**names),
                out,
                settings=settings,
                progress=bar,
                command=command,
            )
        except KeyboardInterrupt:
            is_begun = (out / "manifest.json").is_file()
            kept = f"what was finished is in {out}" if is_begun else "nothing was made yet"
            raise Interrupted(f"interrupted; {kept}", f"go on with: {command}") from None
    _show(run, report)


def _numbers(text: str) -> tuple[float, ...]:
    numbers = []
    for part in split_names([text], "--omega"):
        try:
            number = float(part)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and number >= 0):
            raise RequestError(
                f"--omega: expected numbers of at least 0, with commas, got '{part}'"
            )
        numbers.append(number)
    return tuple(dict.fromkeys(numbers))


def _show(run: Run, report: bool) -> None:
    from rich.console import Console

    assert run.path is not None
    page = run.report(run.path / "report.html") if report else None
    registry.load("reports", "terminal")(run, Console())
    print(f"\nrun          {run.path}")
    print(f"checkpoints  {run.path / 'checkpoints'}")
    print(f"table        {run.path / 'scores.csv'}")
    if page:
        print(f"report       {page}")
    if run.failed:
        raise typer.Exit(1)
