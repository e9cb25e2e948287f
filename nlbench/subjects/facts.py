"""What is said of a subject: which model, weights and data it is, and what was found there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nlbench.options import OptionValue
from nlbench.serialization.fields import others

__all__ = ["SubjectFacts"]


@dataclass(frozen=True, kw_only=True)
class SubjectFacts:
    """What is said of a subject; what isn't known is None.

    Parameters
    ----------
    model, weights, data : str
        What they are called in the table.
    data_options : mapping of str to value
        Of the dataset.
    seed : int
    weights_metadata : mapping
        What the weights' file says of how they were made.
    parameters : int
        How many numbers the model has.
    preprocessing : str
    split : str
        Of the dataset.
    samples : int
    sample_hash : str
    batch_norm : str
        Where the statistics of batch norm come from, if from no training.
    weights_hash : str
        Of parameters and buffers, as `nlbench.serialization.hashing.state_hash` has it.
    key : str
        Hash of the request that the subject answers.
    rest : mapping
        What somebody else says of it.

    Examples
    --------
    >>> SubjectFacts(model="vgg8", weights="init", data="digits", seed=0).identity
    ('vgg8', 'init', 'digits', 0)
    """

    model: str
    weights: str
    data: str
    data_options: Mapping[str, OptionValue] | None = None
    seed: int
    weights_metadata: Mapping[str, Any] | None = None
    parameters: int | None = None
    preprocessing: str | None = None
    split: str | None = None
    samples: int | None = None
    sample_hash: str | None = None
    batch_norm: str | None = None
    weights_hash: str | None = None
    key: str | None = None
    rest: Mapping[str, Any] = others()

    @property
    def identity(self) -> tuple[str, str, str, int]:
        """What names the subject in the tidy table."""
        return self.model, self.weights, self.data, self.seed
