"""``nlbench train`` and ``nlbench linearize``."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nlbench import registry
from nlbench.cli.common import (
    Interrupted,
    command_line,
    note,
    show_run,
    split_dataset_options,
    split_names,
)
from nlbench.errors import NotFinite, RequestError
from nlbench.request import parse_seeds

if TYPE_CHECKING:
    from .train import Trained, TrainingRequest

__all__ = ["linearize", "train"]


Data = Annotated[str, typer.Option(help="A registered dataset.")]
Epochs = Annotated[int | None, typer.Option(help="Instead of the recipe's number.", min=1)]
Rate = Annotated[float | None, typer.Option(help="Instead of the recipe's.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]


def train(
    model: Annotated[str, typer.Option(help="A registered model.")],
    out: Annotated[
        Path,
        typer.Option(help="The checkpoint to write (safetensors); for several seeds a folder."),
    ],
    data: Data = "digits",
    recipe: Annotated[
        str, typer.Option(help="A registered recipe; auto: the one that suits the model.")
    ] = "auto",
    weights: Annotated[
        str, typer.Option(help="Where to start: init, trained or a checkpoint's path.")
    ] = "init",
    seed: Annotated[
        int | None, typer.Option(help="Of the initialisation and the order. [0]")
    ] = None,
    seeds: Annotated[
        list[str] | None, typer.Option(help="Several seeds, with commas, one checkpoint each.")
    ] = None,
    label_noise: Annotated[
        float | None,
        typer.Option(help="Share of training labels changed to another class.", min=0, max=1),
    ] = None,
    epochs: Epochs = None,
    optimizer: Annotated[
        str | None, typer.Option(help="sgd, adam or adamw, instead of the recipe's.")
    ] = None,
    learning_rate: Rate = None,
    batch_size: Annotated[int | None, typer.Option(help="Instead of the recipe's.", min=1)] = None,
    until_train_accuracy: Annotated[
        float | None,
        typer.Option(help="End after the first epoch that reaches it.", min=0, max=1),
    ] = None,
    omega: Annotated[
        float | None,
        typer.Option(help="Of the recipes post-training and from-start: weight of the penalty."),
    ] = None,
    checkpoint_every: Annotated[
        int, typer.Option(help="Keep a checkpoint after every so many epochs; 0: none.", min=0)
    ] = 0,
    checkpoint_epochs: Annotated[
        str, typer.Option(help="Keep checkpoints after these epochs, with commas.")
    ] = "",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a training that was interrupted.")
    ] = False,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="DATASET.OPTION=VALUE", help="Option of the dataset."),
    ] = None,
    device: Device = "auto",
) -> None:
    """Train a model and write its weights as a checkpoint that --weights takes."""
    if seeds and seed is not None:
        raise RequestError("--seed and --seeds: expected one of them")
    wanted = parse_seeds(seeds) if seeds else (seed or 0,)
    files = _files(out, model, wanted)
    chosen = _epochs(checkpoint_epochs)
    options, others = split_dataset_options(setting or [], data)
    if others:
        raise RequestError(f"--set {next(iter(others))}: expected {data}.OPTION=VALUE")
    changes = _given(
        epochs=epochs,
        optimizer=optimizer,
        learning_rate=learning_rate,
        batch_size=batch_size,
        until_train_accuracy=until_train_accuracy,
        omega=omega,
    )
    command = command_line()
    from nlbench.progress import Bar

    results: list[Trained | None] = []
    with Bar() as bar:
        bar.say("loading")
        from .train import TrainingRequest, recipe_of, suited_recipe

        recipe = suited_recipe(model, recipe)
        # All of them before the first is trained, so that nothing is refused hours later.
        requests = {
            file: TrainingRequest(
                model, data, recipe, one, weights, label_noise, changes, options, device
            )
            for one, file in files.items()
        }
        most = max(recipe_of(request).epochs for request in requests.values())
        if late := [epoch for epoch in sorted(chosen) if epoch > most]:
            raise RequestError(f"--checkpoint-epochs: {late[0]} is beyond the last epoch, {most}")
        keep = {"keep_epochs": chosen, "keep_every": checkpoint_every}
        for file, request in requests.items():
            bar.begin(most)
            results.append(_trained(request, file, bar, command, resume=resume, **keep))
    print(f"recipe          {recipe}")
    for result in results:
        if result is not None:
            _print_result(result)
    if not all(result is not None and result.is_reached for result in results):
        raise typer.Exit(1)


def _given(**changes: Any) -> dict[str, Any]:
    """What a recipe is to have otherwise."""
    return {name: value for name, value in changes.items() if value is not None}


def _trained(
    request: "TrainingRequest", file: Path, bar: Any, command: str, *, resume: bool, **keep: Any
) -> "Trained | None":
    """Train one network; None, with a remark, if its numbers ceased to be numbers."""
    from .train import run_training

    def step(epoch: Any) -> None:
        bar.step(
            f"{request.model} seed {request.seed}: loss {epoch.loss:.3f}, "
            f"test accuracy {epoch.test_accuracy:.1%}"
        )

    try:
        return run_training(request, file, resume=resume, progress=step, command=command, **keep)
    except NotFinite as error:
        bar.stop()
        note(f"{file.name}: {error}")
        return None
    except KeyboardInterrupt:
        from nlbench.subjects.weights import training_folder

        folder = training_folder(file)
        kept = (
            f"the epochs that were finished are in {folder}"
            if (folder / "state").exists()
            else f"no epoch of {file.name} was finished"
        )
        again = command if resume else f"{command} --resume"
        raise Interrupted(kept, again) from None


def _print_result(result: "Trained") -> None:
    print(f"train accuracy  {result.train_accuracy:.2%}")
    print(f"test accuracy   {result.test_accuracy:.2%}")
    for name, value in result.scores.items():
        print(f"{name.ljust(15)} {value:.4g}")
    print(f"weights         {result.file}")
    if not result.is_reached:
        print(f"not reached: after {result.epochs} epochs training is short of its threshold")


def _files(out: Path, model: str, seeds: tuple[int, ...]) -> dict[int, Path]:
    if len(seeds) == 1 and out.suffix == ".safetensors":
        return {seeds[0]: out}
    if len(seeds) == 1:
        raise RequestError(f"--out: expected a name that ends in .safetensors, got '{out}'")
    if out.suffix == ".safetensors":
        raise RequestError(f"--out: expected a folder for {len(seeds)} seeds, got '{out}'")
    return {seed: out / f"{model.replace('/', '-')}-seed{seed}.safetensors" for seed in seeds}


def _epochs(text: str) -> frozenset[int]:
    if not text:
        return frozenset()
    parts = split_names([text], "--checkpoint-epochs")
    for part in parts:
        if not (part.isascii() and part.isdecimal() and int(part)):
            raise RequestError(
                f"--checkpoint-epochs: expected whole numbers from 1, with commas, got '{part}'"
            )
    return frozenset(int(part) for part in parts)


def linearize(
    model: Annotated[str, typer.Option(help="A registered model that calls ReLU.")],
    out: Annotated[Path, typer.Option(help="The run's folder; its checkpoints lie there too.")],
    data: Data = "digits",
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
    epochs: Epochs = None,
    learning_rate: Rate = None,
    slope_rate: Annotated[
        float | None, typer.Option(help="Factor of the learning rate for the slopes.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="OWNER.OPTION=VALUE",
            help="Option of the dataset or a measure, repeatable.",
        ),
    ] = None,
    device: Device = "auto",
    report: Annotated[bool, typer.Option(help="Write report.html into the run's folder.")] = True,
) -> None:
    """Make a network's units linear under a sparsity prior; record what depth is left.

    The same command goes on where it was interrupted.
    """
    if control not in ("", "random"):
        raise RequestError(f"--control: expected random, got '{control}'")
    if out == Path():
        raise RequestError("--out: expected a folder's name, got ''")
    options, settings = split_dataset_options(setting or [], data)
    changes = _given(epochs=epochs, learning_rate=learning_rate, slope_rate=slope_rate)
    omegas, wanted = _numbers(omega), parse_seeds(seeds or ["0"])
    for group, name in (("models", model), ("datasets", data), ("recipes", base_recipe)):
        if (group, name) != ("recipes", "auto"):
            registry.expand(group, [name])
    command = command_line()
    from nlbench.progress import Bar

    with Bar() as bar:
        bar.say("loading")
        from .linearisation import LinearisingRequest, linearise
        from .train import suited_recipe

        request = LinearisingRequest(
            model,
            data,
            mode="from-start" if from_start else "post-training",
            base_recipe=suited_recipe(model, base_recipe),
            omegas=omegas,
            seeds=wanted,
            weights=weights,
            control=bool(control),
            layerwise=layerwise,
            changes=changes,
            options=options,
            device=device,
        )
        try:
            run = linearise(request, out, settings=settings, progress=bar, command=command)
        except NotFinite as error:
            note(str(error))
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            is_begun = (out / "checkpoints").is_dir()
            kept = f"what was finished is in {out}" if is_begun else "nothing was made yet"
            raise Interrupted(kept, command) from None
    show_run(run, report, checkpoints=out / "checkpoints")
    # What couldn't be trained can't be measured.
    if run.failed or any(record.result.status == "skipped" for record in run.records):
        raise typer.Exit(1)


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
