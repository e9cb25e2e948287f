"""The specification of a subject."""

from __future__ import annotations

from dataclasses import dataclass

from nlbench.options import OptionValue


@dataclass(frozen=True)
class SubjectSpec:
    """The names, seed and sample size that specify a subject."""

    # model, data: registered names
    model: str
    weights: str  # auto, trained, init, calibrated or the path to a checkpoint
    data: str
    seed: int = 0  # seed for the initialisation and for drawing the samples
    samples: int | None = 512  # number of samples; None for the whole split
    split: str = "test"  # test or train
    options: tuple[tuple[str, OptionValue | str], ...] = ()  # dataset options, sorted by name
    # Keyword arguments of the model, sorted by name.
    arguments: tuple[tuple[str, OptionValue | str], ...] = ()
