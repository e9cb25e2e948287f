"""A training by a registered recipe: what it is asked for, and how it is carried out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlbench import registry
from nlbench.environment import exact_arithmetic, resolve_device
from nlbench.errors import NlbenchError, RequestError, nearest
from nlbench.model import model_info
from nlbench.options import OptionValue
from nlbench.subject import SubjectSpec, adapted, build_model, choose_weights, load_dataset
from nlbench.training_log import EpochLike, Trained, TrainingLog
from nlbench.transforms import header_of, transformed
from nlbench.weights import load_weights

if TYPE_CHECKING:
    from torch import nn

    from nlbench.data import Data

__all__ = [
    "Trained",
    "TrainingRequest",
    "recipe_of",
    "run_training",
    "starting_point",
    "suited_recipe",
]

LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True)
class TrainingRequest:
    """What a training is asked for.

    Parameters
    ----------
    model, data, recipe : str
        Registered names.
    seed : int
        From 0 to 2³² - 1; decides the initialisation, the order of the samples and the noise.
    weights : str
        Where training starts: ``init``, ``trained`` or a checkpoint's path.
    label_noise : float or None
        Share of training labels to corrupt; None: the recipe's.
    changes : mapping of str to value
        Fields of the recipe that are to be otherwise.
    options : tuple of (str, value)
        Of the dataset.
    device : str
        ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.

    Raises
    ------
    nlbench.RequestError
        If the seed is out of bounds.
    """

    model: str
    data: str
    recipe: str
    seed: int = 0
    weights: str = "init"
    label_noise: float | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[tuple[str, OptionValue | str], ...] = ()
    device: str = "auto"

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= LARGEST_SEED:
            raise RequestError(f"the seed is {self.seed}, expected 0 to {LARGEST_SEED}")


def suited_recipe(model: str, recipe: str = "auto") -> str:
    """Name the recipe that is followed: the one asked for, or for ``auto`` the model's own.

    Examples
    --------
    >>> suited_recipe("vgg8"), suited_recipe("resnet18-w8"), suited_recipe("vgg8", "augmented")
    ('vanilla', 'adam', 'augmented')
    """
    return model_info(registry.load("models", model)).recipe if recipe == "auto" else recipe


def recipe_of(request: TrainingRequest) -> Any:
    """Load the recipe, with what is to be otherwise.

    Raises
    ------
    nlbench.RequestError
        If there is no such recipe, or it has no such setting.
    """
    recipe = registry.load("recipes", request.recipe)
    changes = dict(request.changes)
    if request.label_noise is not None:
        changes["label_noise"] = request.label_noise
    if changes:
        names = {entry.name for entry in fields(recipe)}
        for name in changes:
            if name not in names:
                raise RequestError(
                    f"recipe '{request.recipe}' has no setting '{name}'{nearest(name, names)}"
                )
        recipe = replace(recipe, **changes)
    return recipe


def run_training(
    request: TrainingRequest,
    out: Path,
    *,
    resume: bool = False,
    keep_epochs: Collection[int] = (),
    keep_every: int = 0,
    progress: Callable[[EpochLike], object] | None = None,
    command: str = "",
) -> Trained:
    """Train a network and write its checkpoint, log and manifest.

    Parameters
    ----------
    request : TrainingRequest
    out : Path
        The checkpoint, ``NAME.safetensors``; the folder ``NAME.training`` is made beside it.
    resume : bool
        Go on where an earlier call was interrupted; a finished training is not repeated.
    keep_epochs : collection of int
        After which epochs a checkpoint is kept.
    keep_every : int
        Keep one after every so many epochs; 0: none.
    progress : callable, optional
        Called after each epoch.
    command : str
        The command line, for the manifest.

    Raises
    ------
    nlbench.RequestError
        If the request can't be carried out; or a checkpoint or an interrupted training lies
        there that is not to be resumed, or is another one.
    """
    if out.suffix != ".safetensors":
        raise RequestError(f"--out: expected a name that ends in .safetensors, got '{out}'")
    recipe = recipe_of(request)
    device = resolve_device(request.device)
    log = TrainingLog(out, request, recipe, command)
    if resume and (done := log.finished()) is not None:
        return done
    log.check(resume=resume)
    dataset, build = starting_point(request)
    if getattr(recipe, "starts_trained", False) and request.weights == "init":
        raise RequestError(
            f"recipe '{request.recipe}' starts from trained weights; give --weights trained or a "
            "checkpoint's path"
        )
    log.open(device)

    def keep(epoch: EpochLike, model: nn.Module, metadata: Mapping[str, str]) -> None:
        if epoch.number in keep_epochs or (keep_every and epoch.number % keep_every == 0):
            log.keep(epoch, model, metadata)

    def note(epoch: EpochLike) -> None:
        log.note(epoch)
        if progress is not None:
            progress(epoch)

    try:
        with exact_arithmetic():
            result = recipe.train(
                build,
                dataset,
                seed=request.seed,
                device=device,
                progress=note,
                state=log.state,
                keep=keep,
            )
    except NlbenchError:
        log.abandon()
        raise
    return log.close(result)


def starting_point(request: TrainingRequest) -> tuple[Data, Callable[[], nn.Module]]:
    """Give the dataset, and what builds the network that training starts from."""
    spec = SubjectSpec(
        request.model, request.weights, request.data, request.seed, options=request.options
    )
    choice = choose_weights(spec)
    info = model_info(registry.load("models", request.model))
    dataset = adapted(load_dataset(request.data, dict(request.options)), info, choice)

    def build() -> nn.Module:
        model = build_model(request.model, dataset, request.seed)
        if choice.file is None:
            return model
        example = dataset.sample(2, split="train", seed=0)
        model = transformed(model, header_of(choice.file), lambda: example.inputs)
        load_weights(model, choice.file, rename=info.rename)
        return model

    return dataset, build
