"""The specification of a subject."""

from __future__ import annotations

from dataclasses import dataclass

from nlbench.options import OptionValue


@dataclass(frozen=True)
class SubjectSpec:
    """The names, seed and sample size that specify a subject.

    Parameters
    ----------
    model, data : str
        Registered names.
    weights : str
        ``auto``, ``trained``, ``init``, ``calibrated`` or the path to a checkpoint.
    seed : int
        Seed for the initialisation and for drawing the samples.
    samples : int or None
        Number of samples; None for the whole split.
    split : {"test", "train"}
    options : tuple of (str, value)
        Dataset options, sorted by name.
    arguments : tuple of (str, value)
        Keyword arguments of the model, sorted by name.
    """

    model: str
    weights: str
    data: str
    seed: int = 0
    samples: int | None = 512
    split: str = "test"
    options: tuple[tuple[str, OptionValue | str], ...] = ()
    arguments: tuple[tuple[str, OptionValue | str], ...] = ()
