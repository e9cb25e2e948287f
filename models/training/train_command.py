"""``nlbench train``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from nlbench.cli.common import Interrupted, split_names, split_seeds, split_settings
from nlbench.errors import RequestError

__all__ = ["train"]


def train(
    model: Annotated[str, typer.Option(help="A registered model.")],
    out: Annotated[
        Path,
        typer.Option(help="The checkpoint to write (safetensors); for several seeds a folder."),
    ],
    data: Annotated[str, typer.Option(help="A registered dataset.")] = "digits",
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
    epochs: Annotated[
        int | None, typer.Option(help="Instead of the recipe's number.", min=1)
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="sgd, adam or adamw, instead of the recipe's.")
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Instead of the recipe's.")] = None,
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
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
) -> None:
    """Train a model and write its weights as a checkpoint that --weights takes."""
    if seeds and seed is not None:
        raise RequestError("--seed and --seeds: expected one of them")
    wanted = split_seeds(seeds) if seeds else (seed or 0,)
    files = _files(out, model, wanted)
    chosen = _epochs(checkpoint_epochs)
    options = dataset_options(setting or [], data)
    changes: dict[str, Any] = {
        "epochs": epochs,
        "optimizer": optimizer,
        "learning_rate": learning_rate,
        "batch_size": batch_size,
        "until_train_accuracy": until_train_accuracy,
        "omega": omega,
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    command = shlex.join(["nlbench", *sys.argv[1:]])
    from nlbench.progress import Bar

    results = []
    with Bar() as bar:
        bar.say("loading")
        from .train import TrainingRequest, recipe_of, run_training, suited_recipe

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
        for file, request in requests.items():
            bar.begin(most)

            def step(epoch: Any, seed: int = request.seed) -> None:
                bar.step(
                    f"{model} seed {seed}: loss {epoch.loss:.3f}, "
                    f"test accuracy {epoch.test_accuracy:.1%}"
                )

            try:
                results.append(
                    run_training(
                        request,
                        file,
                        resume=resume,
                        keep_epochs=chosen,
                        keep_every=checkpoint_every,
                        progress=step,
                        command=command,
                    )
                )
            except KeyboardInterrupt:
                folder = file.with_suffix(".training")
                kept = (
                    f"the epochs that were finished are in {folder}"
                    if (folder / "state").exists()
                    else f"no epoch of {file.name} was finished"
                )
                again = command if resume else f"{command} --resume"
                raise Interrupted(f"interrupted; {kept}", f"go on with: {again}") from None
    short = False
    print(f"recipe          {recipe}")
    for result in results:
        print(f"train accuracy  {result.train_accuracy:.2%}")
        print(f"test accuracy   {result.test_accuracy:.2%}")
        for name, value in result.scores.items():
            if ":" not in name:
                print(f"{name.ljust(15)} {value:.4g}")
        print(f"weights         {result.file}")
        if not result.is_reached:
            short = True
            print(f"not reached: after {result.epochs} epochs training is short of its threshold")
    if short:
        raise typer.Exit(1)


def dataset_options(given: list[str], data: str) -> tuple[tuple[str, str], ...]:
    """Read ``--set DATASET.OPTION=VALUE``; nothing else can be set here."""
    options = {}
    for key, value in split_settings(given).items():
        owner, _, option = key.partition(".")
        if owner != data or not option:
            raise RequestError(f"--set {key}: expected {data}.OPTION=VALUE")
        options[option] = value
    return tuple(sorted(options.items()))


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
