"""Small networks trained on digits, which the studies of signatures share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlbench.request import Request

if TYPE_CHECKING:
    from nlbench.store.run_folder import Run

    from .study import Context

__all__ = ["DATA", "measured_networks", "seeds_of_each", "small_network", "trained_network"]


DATA = "digits"

# With batch norm they bear a higher rate than vanilla's: 96 % of the digits after eight epochs.
_NORMALISED: Mapping[str, Any] = {"learning_rate": 0.05, "warmup_steps": 20, "schedule": "cosine"}


def trained_network(context: Context, model: str, seed: int, data: str = DATA) -> Path:
    """Ask for a trained network, which all studies share; give its checkpoint.

    VGG8 follows the recipe of the shipped checkpoint; networks with batch norm a shorter one of
    a higher rate. Quick studies train for fewer epochs.

    Parameters
    ----------
    context : Context
    model : str
    seed : int
    data : str
    """
    if model == "vgg8":
        if not context.quick:
            return context.trained(model, data, "vanilla", seed)
        return context.trained(model, data, "adam", seed, name="short", epochs=6, warmup_steps=20)
    name, epochs, batch = ("short", 3, 64) if context.quick else ("fast", 8, 128)
    return context.trained(
        model, data, "vanilla", seed, name=name, epochs=epochs, batch_size=batch, **_NORMALISED
    )


def seeds_of_each(context: Context, of_vgg8: int = 3) -> dict[str, tuple[int, ...]]:
    """Give the seeds of the trainings of vgg8, resnet20 and plain20: a third in quick studies.

    Parameters
    ----------
    context : Context
    of_vgg8 : int
        How many of vgg8, which is trained soonest; three of the others.
    """
    number = {"vgg8": of_vgg8, "resnet20": 3, "plain20": 3}
    return {model: context.seeds_or(full, quick=full // 3) for model, full in number.items()}


def small_network(context: Context) -> tuple[str, str]:
    """Give the dataset and the weights of a trained vgg8: shipped for digits, else trained.

    Parameters
    ----------
    context : Context

    Returns
    -------
    tuple of str
    """
    data = context.data or DATA
    weights = "trained" if data == DATA else str(trained_network(context, "vgg8", 0, data))
    return data, weights


def measured_networks(
    context: Context,
    trained: Mapping[str, tuple[int, ...]],
    *,
    drawn: Mapping[str, tuple[int, ...]] | None = None,
    measures: tuple[str, ...] = ("affinity",),
    data: tuple[str, ...] = (DATA,),
    samples: int = 0,
    split: str = "test",
    part: str = "run",
) -> Run:
    """Measure trained networks on digits, and the same as they are drawn.

    Parameters
    ----------
    context : Context
    trained : mapping of str to tuple of int
        Seeds of the trainings of each network.
    drawn : mapping of str to tuple of int, optional
        Seeds of the initialisations of each; batch norm's statistics are then those of the samples,
        since those that a network begins with belong to no data.
    measures, data : tuple of str
    samples : int
    split : str
    part : str
    """
    asked: list[tuple[str, tuple[str, ...], tuple[int, ...]]] = [
        (model, tuple(str(trained_network(context, model, seed)) for seed in seeds), (0,))
        for model, seeds in trained.items()
    ]
    asked += [(model, ("calibrated",), seeds) for model, seeds in (drawn or {}).items()]
    for model, weights, seeds in asked:
        request = Request(measures, (model,), data, weights, seeds, samples, split=split)
        run = context.run(request, part)
    return run
