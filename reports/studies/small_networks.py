"""Small networks trained on digits, which the studies of signatures share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlbench.request import Request

if TYPE_CHECKING:
    from nlbench.store.run_folder import Run

    from .study import Context

__all__ = ["DATA", "measured_networks", "small_network", "trained_network"]


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
    seeds: Mapping[str, int],
    *,
    drawn: Mapping[str, int] | None = None,
    measures: tuple[str, ...] = ("affinity",),
    data: tuple[str, ...] = (DATA,),
    samples: int = 0,
    part: str = "run",
) -> Run:
    """Measure trained networks on digits, and the same as they are drawn.

    Parameters
    ----------
    context : Context
        Its seeds, where any are given, take the place of the numbers of seeds.
    seeds : mapping of str to int
        How many trainings of each network.
    drawn : mapping of str to int, optional
        How many initialisations of each; batch norm's statistics are then those of the samples,
        since those that a network begins with belong to no data.
    measures, data : tuple of str
    samples : int
    part : str
    """
    weights = {
        model: [str(trained_network(context, model, s)) for s in context.seeds or range(number)]
        for model, number in seeds.items()
    }
    asked = [(model, tuple(files), (0,)) for model, files in weights.items()]
    asked += [
        (model, ("calibrated",), context.seeds or tuple(range(number)))
        for model, number in (drawn or {}).items()
    ]
    for model, chosen, initialised in asked:
        request = Request(measures, (model,), data, chosen, initialised, samples)
        run = context.run(request, part)
    return run
