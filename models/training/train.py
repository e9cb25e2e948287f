"""Train one network, with its checkpoint, log and manifest on disk."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nlbench.errors import RequestError
from nlbench.execution.devices import resolve_device
from nlbench.introspection.precision import exact_arithmetic
from nlbench.subjects.load import model_source

from .loop import Epoch, example_of, train
from .training_folder import TrainingFolder, TrainingSummary
from .training_request import TrainingRequest, load_recipe

if TYPE_CHECKING:
    from torch import nn


def run_training(
    request: TrainingRequest,
    out: Path,
    *,
    resume: bool = False,
    keep_epochs: Collection[int] = (),
    keep_every: int = 0,
    progress: Callable[[Epoch], object] | None = None,
    command: str = "",
) -> TrainingSummary:
    """Train a network and write its checkpoint, log and manifest.

    Parameters
    ----------
    out : Path
        The checkpoint, ``NAME.safetensors``; the folder ``NAME.training`` is created next to it.
    resume : bool
        Resume an interrupted training run. A finished one is not repeated.
    keep_epochs, keep_every
        Epochs after which a checkpoint is written, and the number of epochs between others (0:
        none).

    Raises
    ------
    nlbench.RequestError
        If the request can't be carried out, if the checkpoint exists, or if there is an interrupted
        run and it differs or `resume` is False.
    nlbench.NotFinite
        If the loss or a logit is NaN or infinite. The failure is recorded in the manifest.
    """
    if out.suffix != ".safetensors":
        raise RequestError(f"--out: expected a name ending in .safetensors, got '{out}'")
    recipe = load_recipe(request)
    device = resolve_device(request.device)
    folder = TrainingFolder(out, request, recipe, command)
    if resume and (summary := folder.finished()) is not None:
        return summary
    folder.check(resume=resume)
    source = model_source(request.subject)
    if request.weights == "calibrated":
        raise RequestError("--weights calibrated: training sets the statistics; use --weights init")
    if getattr(recipe, "starts_trained", False) and request.weights == "init":
        raise RequestError(
            f"recipe '{request.recipe}' starts from trained weights; use --weights trained or a "
            "checkpoint's path"
        )

    def on_checkpoint(epoch: Epoch, model: nn.Module, metadata: Mapping[str, str]) -> None:
        if epoch.number in keep_epochs or (keep_every and epoch.number % keep_every == 0):
            folder.write_checkpoint(epoch, model, metadata)

    def log(epoch: Epoch) -> None:
        folder.add(epoch)
        if progress is not None:
            progress(epoch)

    with exact_arithmetic(), folder.opened(device):
        result = train(
            lambda: source.build()[0],
            source.dataset,
            recipe,
            seed=request.seed,
            device=device,
            progress=log,
            state=folder.state,
            on_checkpoint=on_checkpoint,
        )
        return folder.finish(result)


def finished_training(request: TrainingRequest, out: Path) -> TrainingSummary | None:
    """Return the summary of a training run.

    None if it is not finished.
    """
    return TrainingFolder(out, request, load_recipe(request), "").finished()


def check_training(request: TrainingRequest) -> str:
    """Check that a recipe applies to its network.

    Return a warning or an empty string.
    """
    source = model_source(replace(request, weights="init").subject)
    return load_recipe(request).check(source.fresh(), example_of(source.dataset))
