"""The recorded facts about a subject."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nlbench.options import OptionValue
from nlbench.serialization.fields import extra_fields

LABELS_LEFT_OUT = "labels that are no class indices are left out"
"""Part of the description of samples whose labels can't be used."""


@dataclass(frozen=True, kw_only=True)
class SubjectFacts:
    """The recorded facts about a subject. Unknown facts are None.

    Examples
    --------
    >>> SubjectFacts(model="vgg8", weights="init", data="digits", seed=0).identity
    ('vgg8', 'init', 'digits', 0)
    """

    # model, weights, data: names in the table of scores
    model: str
    weights: str
    data: str
    data_options: Mapping[str, OptionValue] | None = None
    seed: int
    # Keyword arguments of the model that were set.
    arguments: Mapping[str, OptionValue] | None = None
    weights_metadata: Mapping[str, Any] | None = None
    parameters: int | None = None
    preprocessing: str | None = None
    split: str | None = None
    samples: int | None = None
    sample_hash: str | None = None
    batch_norm: str | None = None  # origin of the batch-norm statistics, if they are not trained
    # Hash of the parameters and buffers; see `nlbench.serialization.hashing.state_hash`.
    weights_hash: str | None = None
    key: str | None = None  # hash of the subject's specification
    # Versions of the files of its model and data, by the name of the model or dataset.
    sources: Mapping[str, str] | None = None
    # Versions of the other files that its own code read, by their paths.
    files: Mapping[str, str] | None = None
    settings_key: str | None = None  # hash of the subject's specification without these versions
    rest: Mapping[str, Any] = extra_fields()  # facts added by other programs

    @property
    def identity(self) -> tuple[str, str, str, int]:
        """The subject's identity in the tidy table."""
        return self.model, self.weights, self.data, self.seed
