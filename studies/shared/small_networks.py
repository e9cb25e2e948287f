"""Small networks trained on digits, shared by the studies of signatures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nlbench.request import Request
from nlbench.store.run import Run
from nlbench.studies.framework import Context

DATA = "digits"

# Batch norm allows a higher learning rate, with 96% accuracy on digits after eight epochs.
_BATCH_NORM: Mapping[str, Any] = {"learning_rate": 0.05, "warmup_steps": 20, "schedule": "cosine"}


def trained_network(context: Context, model: str, seed: int, data: str = DATA) -> Path:
    """Request a trained network, shared by all studies, and return its checkpoint.

    VGG8 uses the recipe for the bundled checkpoint; networks with batch norm use a shorter recipe
    with a higher learning rate. Quick studies train for fewer epochs.
    """
    if model == "vgg8":
        if not context.quick:
            return context.request_training(model, data, "vanilla", seed)
        short: dict[str, Any] = {"name": "short", "epochs": 3, "warmup_steps": 20}
        return context.request_training(model, data, "adam", seed, **short)
    name, epochs, batch = ("short", 1, 64) if context.quick else ("fast", 8, 128)
    return context.request_training(
        model, data, "vanilla", seed, name=name, epochs=epochs, batch_size=batch, **_BATCH_NORM
    )


def seeds_by_model(context: Context, vgg8: int = 3) -> dict[str, tuple[int, ...]]:
    """Return the training seeds for vgg8, resnet20 and plain20.

    Quick studies use fewer. vgg8 trains fastest and may have more than the three seeds of the
    others.
    """
    counts = {"vgg8": vgg8, "resnet20": 3, "plain20": 3}
    quick = {"vgg8": 2, "resnet20": 1, "plain20": 1}
    return {model: context.seeds_or(full, quick[model]) for model, full in counts.items()}


def trained_vgg8(context: Context) -> tuple[str, str]:
    """Return the dataset and weights for a vgg8: bundled for digits, trained for other data."""
    data = context.data or DATA
    weights = "trained" if data == DATA else str(trained_network(context, "vgg8", 0, data))
    return data, weights


def measure_networks(
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
    """Measure networks trained on digits, and untrained ones, for each model and seed.

    Untrained networks use batch-norm statistics of the samples, since their initial statistics
    don't describe any data.
    """
    subjects: list[tuple[str, tuple[str, ...], tuple[int, ...]]] = []
    for model, seeds in trained.items():
        weights = tuple(str(trained_network(context, model, seed)) for seed in seeds)
        subjects.append((model, weights, (0,)))
    subjects += [(model, ("calibrated",), seeds) for model, seeds in (drawn or {}).items()]
    for model, weights, seeds in subjects:
        request = Request(measures, (model,), data, weights, seeds, samples, split=split)
        run = context.run(request, part)
    return run
