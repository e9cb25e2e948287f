"""Build registered models for a dataset."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nlbench import registry
from nlbench.errors import PluginError, RequestError
from nlbench.options import OptionValue

from .data import Data
from .own import OwnModel

if TYPE_CHECKING:
    from torch import nn


def build_model(
    name: str, dataset: Data, seed: int, settings: Mapping[str, OptionValue | str] | None = None
) -> nn.Module:
    """Build a registered model for a dataset, initialised from a seed.

    The builder is called with `settings` and those of the arguments ``in_channels``,
    ``num_classes``, ``image_size``, ``resolution`` and ``input_shape`` that it accepts. The global
    random state is restored.

    Raises
    ------
    nlbench.NlbenchError
        If there is no such model, or it can't be built for this dataset.
    """
    import torch

    from nlbench.introspection.random_state import seeded
    from nlbench.introspection.wrappers import remove_wrappers

    build = registry.load("models", name)
    if isinstance(build, OwnModel):
        build = build.builder(seed)
    accepted = set()
    with contextlib.suppress(TypeError, ValueError):
        accepted = set(inspect.signature(build).parameters)
    settings = settings or {}
    arguments = {**_arguments(name, dataset, accepted - settings.keys()), **settings}
    with seeded(seed):
        try:
            model = build(**arguments)
        except RequestError as error:
            raise RequestError(f"{name} for {dataset.name}: {error}") from error
        if not isinstance(model, torch.nn.Module):
            raise PluginError(
                f"model '{name}' returns a {type(model).__name__}, expected torch.nn.Module"
            )
        model = remove_wrappers(model)
        _initialize_lazy(model, dataset)
    return model


def _initialize_lazy(model: nn.Module, dataset: Data) -> None:
    """Initialise lazy parameters with a forward pass."""
    import torch
    from torch.nn.parameter import is_lazy

    if not any(is_lazy(t) for t in (*model.parameters(), *model.buffers())):
        return
    was_training = {module: module.training for module in model.modules()}
    with torch.no_grad():
        model.eval()(dataset.sample(2).inputs)
    for module in model.modules():
        module.training = was_training.get(module, module.training)


def _arguments(name: str, dataset: Data, accepted: set[str]) -> dict[str, Any]:
    """Return the builder's arguments; raise if the model is incompatible with the data."""
    shape = tuple(dataset.shape)
    arguments: dict[str, Any] = {"input_shape": shape, "num_classes": dataset.classes or None}
    if len(shape) == 3:
        side = shape[1] if shape[1] == shape[2] else shape[1:]
        arguments |= {"in_channels": shape[0], "image_size": shape[1], "resolution": side}
        if "image_size" in accepted and "input_shape" not in accepted and shape[1] != shape[2]:
            raise RequestError(
                f"{name} takes square images, but those in {dataset.name} are {shape[1]}x{shape[2]}"
            )
    elif "input_shape" not in accepted and accepted & {"in_channels", "image_size"}:
        raise RequestError(f"{name} takes images, but inputs in {dataset.name} have shape {shape}")
    return {key: v for key, v in arguments.items() if key in accepted and v is not None}
