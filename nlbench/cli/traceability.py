"""Which models the probe ``lines`` can trace exactly, for ``nlbench list models --traceable``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nlbench import registry
from nlbench.errors import NlbenchError, error_text
from nlbench.subjects.data import Sample

if TYPE_CHECKING:
    import torch

    from nlbench.subjects.data import Data

__all__ = ["traceability"]


@dataclass(frozen=True)
class _Shapes:
    """As much of a dataset as building a model for it needs."""

    name: str
    shape: tuple[int, ...]
    classes: int

    def sample(self, count: int) -> Sample:
        """Give inputs without content."""
        import torch

        zeros = torch.zeros(count, *self.shape)
        return Sample(zeros, zeros, None)


def traceability(
    names: Iterable[str], dataset: Data, step: Callable[[str], None] = lambda name: None
) -> list[dict[str, Any]]:
    """Say of each model whether it can be traced, and what prevents it.

    A model is built for the dataset's inputs, or where it refuses them for those that its
    own builder states as default. It gets no weights where PyTorch's ``meta`` device will
    do, so that large ones cost as little as small ones. One that can't be built or looked
    at is listed with the reason.

    Parameters
    ----------
    names : iterable of str
        Registered models.
    dataset : Data
    step : callable
        Told each name before its model is built.

    Returns
    -------
    list of dict
        ``name``; ``traceable``: yes, no or unknown; ``input``, its shape; ``reason``.
    """
    rows = []
    for name in names:
        step(name)
        try:
            shape, reason = _look(name, dataset)
            answer = "no" if reason else "yes"
        except (Exception, SystemExit) as error:
            # A model may fail in any way; the list goes on with the next.
            shape, answer, reason = (), "unknown", error_text(error)
        size = "×".join(map(str, shape))
        rows.append({"name": name, "traceable": answer, "input": size, "reason": reason})
    return rows


def _look(name: str, dataset: Data) -> tuple[tuple[int, ...], str]:
    import torch

    from nlbench.probes.lines.program import traceable

    refused: NlbenchError | None = None
    for shape in _shapes(name, dataset):
        target = _Shapes(dataset.name, shape, dataset.classes)
        try:
            model = _built(name, target)
        except NlbenchError as error:
            refused = refused or error
            continue
        return shape, traceable(model, torch.zeros(1, *shape))
    assert refused is not None
    raise refused


def _built(name: str, target: _Shapes) -> torch.nn.Module:
    import torch

    from nlbench.subjects.load import build_model

    try:
        with torch.device("meta"):
            return build_model(name, target, seed=0)  # type: ignore[arg-type]
    except NlbenchError:
        raise
    except Exception:
        # Some builders compute with their weights, which the meta device doesn't have.
        return build_model(name, target, seed=0)  # type: ignore[arg-type]


def _shapes(name: str, dataset: Data) -> Iterator[tuple[int, ...]]:
    """The dataset's shape, then the one that the builder's defaults state."""
    yield tuple(dataset.shape)
    try:
        parameters = inspect.signature(registry.load("models", name)).parameters
    except (TypeError, ValueError):
        return
    none = SimpleNamespace(default=None)
    shape = parameters.get("input_shape", none).default
    side = parameters.get("image_size", none).default
    channels = parameters.get("in_channels", none).default
    if isinstance(shape, tuple):
        yield shape
    elif isinstance(side, int) and isinstance(channels, int):
        yield (channels, side, side)
