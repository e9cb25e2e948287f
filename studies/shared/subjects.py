"""Subjects that a study loads itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nlbench.subjects.subject import Subject


def load_on_cpu(model: str, weights: str, data: str, **fields: Any) -> Subject:
    """Load a subject on the CPU, by the fields of `SubjectSpec`."""
    import torch

    from nlbench.subjects.load import load_subject
    from nlbench.subjects.spec import SubjectSpec

    return load_subject(SubjectSpec(model, weights, data, **fields), torch.device("cpu"))
