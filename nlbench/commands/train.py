"""``nlbench train``."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from nlbench import registry
from nlbench.errors import RequestError

__all__ = ["train"]


def train(
    model: Annotated[str, typer.Option(help="A registered model.")],
    out: Annotated[Path, typer.Option(help="The checkpoint to write (safetensors).")],
    data: Annotated[str, typer.Option(help="A registered dataset.")] = "digits",
    recipe: Annotated[str, typer.Option(help="A registered recipe.")] = "vanilla",
    seed: Annotated[int, typer.Option(help="Of the initialisation and the order.")] = 0,
    label_noise: Annotated[
        float, typer.Option(help="Share of training labels changed to another class.", min=0, max=1)
    ] = 0.0,
    epochs: Annotated[
        int | None, typer.Option(help="Instead of the recipe's number.", min=1)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
) -> None:
    """Train a model and write its weights as a checkpoint that --weights takes."""
    from nlbench.progress import Bar

    with Bar() as bar:
        bar.say("loading")
        from nlbench.environment import resolve_device
        from nlbench.files import make_folder
        from nlbench.subject import build_model, load_dataset
        from nlbench.weights import save_weights

        if out.suffix != ".safetensors":
            raise RequestError(f"--out: expected a name that ends in .safetensors, got '{out}'")
        make_folder(out.parent)
        plan = registry.load("recipes", recipe)
        plan = plan if epochs is None else replace(plan, epochs=epochs)
        dataset = load_dataset(data)
        bar.begin(plan.epochs)
        result = plan.train(
            lambda: build_model(model, dataset, seed),
            dataset,
            seed=seed,
            device=resolve_device(device),
            label_noise=label_noise,
            progress=lambda epoch: bar.step(
                f"{model}: loss {epoch.loss:.3f}, test accuracy {epoch.test_accuracy:.1%}"
            ),
        )
        metadata = {
            "nlbench": version("nlbench"),
            "model": model,
            "data": data,
            "recipe": recipe,
            "epochs": str(plan.epochs),
            "seed": str(seed),
            "label_noise": str(label_noise),
            "train_accuracy": f"{result.train_accuracy:.4f}",
            "test_accuracy": f"{result.test_accuracy:.4f}",
            "command": shlex.join(["nlbench", *sys.argv[1:]]),
        }
        save_weights(out, result.model, metadata)
    print(f"train accuracy  {result.train_accuracy:.2%}")
    print(f"test accuracy   {result.test_accuracy:.2%}")
    print(f"weights         {out}")
