"""What a model plugin is: a function that builds a network, and what is known of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from nlbench.measure import Source

__all__ = ["ModelInfo", "model", "model_info"]

Builder = TypeVar("Builder", bound=Callable[..., Any])


@dataclass(frozen=True)
class ModelInfo:
    """What is known of a model beside how it is built.

    Parameters
    ----------
    trained : mapping of str to Path
        From a dataset's name to the checkpoint that ships for it.
    source : Source
        Where the architecture comes from.
    """

    trained: Mapping[str, Path] = field(default_factory=dict)
    source: Source = field(default_factory=lambda: Source(""))


def model(
    *, trained: Mapping[str, Path] | None = None, source: Source | str = ""
) -> Callable[[Builder], Builder]:
    """Say what is known of a model, beside the function that builds it.

    The function takes any of ``in_channels``, ``num_classes`` and ``image_size`` as
    keyword arguments, each with a default, and returns a `torch.nn.Module`. A plain
    function without this decorator is a model plugin too.

    Examples
    --------
    >>> @model(source="Here, 2026")
    ... def tiny(in_channels=3, num_classes=10):
    ...     import torch
    ...     return torch.nn.Conv2d(in_channels, num_classes, 1)
    >>> model_info(tiny).source.citation
    'Here, 2026'
    """
    info = ModelInfo(dict(trained or {}), Source(source) if isinstance(source, str) else source)

    def decorate(build: Builder) -> Builder:
        build.__nlbench_model__ = info  # type: ignore[attr-defined]
        return build

    return decorate


def model_info(build: Callable[..., Any]) -> ModelInfo:
    """What is known of a model; nothing for a plain function."""
    info: ModelInfo = getattr(build, "__nlbench_model__", ModelInfo())
    return info
