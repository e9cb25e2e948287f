"""Training requests and the recipes that they refer to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from nlbench import registry
from nlbench.errors import PluginError, RequestError, nearest
from nlbench.options import OptionValue
from nlbench.subjects.model import model_info
from nlbench.subjects.spec import SubjectSpec

from .label_noise import check_seed
from .recipes import Recipe


@dataclass(frozen=True)
class TrainingRequest:
    """A request to train a network.

    Parameters
    ----------
    model, data, recipe : str
        Registered names.
    seed : int
        Determines the initialisation, the order of the samples and the noise.
    weights : str
        Initial weights: ``init``, ``trained`` or a checkpoint's path.
    label_noise : float or None
        Fraction of training labels to corrupt; None: the recipe's.
    changes : mapping of str to value
        Fields of the recipe to replace.
    options, arguments : tuple of (str, value)
        Options of the dataset, and keyword arguments of the model.
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
    arguments: tuple[tuple[str, OptionValue | str], ...] = ()

    def __post_init__(self) -> None:
        check_seed(self.seed)

    @property
    def subject(self) -> SubjectSpec:
        """The initial network and its training samples."""
        return SubjectSpec(
            self.model,
            self.weights,
            self.data,
            self.seed,
            split="train",
            options=self.options,
            arguments=self.arguments,
        )


def resolve_recipe(model: str, recipe: str = "auto") -> str:
    """Return a recipe's name, resolving ``auto`` to the model's default.

    Examples
    --------
    >>> resolve_recipe("vgg8"), resolve_recipe("resnet18-w8"), resolve_recipe("vgg8", "augmented")
    ('vanilla', 'adam', 'augmented')
    """
    return model_info(registry.load("models", model)).recipe if recipe == "auto" else recipe


def load_recipe(request: TrainingRequest) -> Recipe:
    """Load a request's recipe and apply the request's changes."""
    recipe = registry.load("recipes", request.recipe)
    if not isinstance(recipe, Recipe):
        raise PluginError(
            f"recipe '{request.recipe}' is a {type(recipe).__name__}, expected "
            "nlbench.models.training.recipes.Recipe or a subclass"
        )
    changes = dict(request.changes)
    if request.label_noise is not None:
        changes["label_noise"] = request.label_noise
    names = {entry.name for entry in fields(recipe)}
    for name in changes:
        if name not in names:
            raise RequestError(
                f"recipe '{request.recipe}' has no setting '{name}'{nearest(name, names)}"
            )
    return replace(recipe, **changes) if changes else recipe
