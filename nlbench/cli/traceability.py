"""The table of ``nlbench list models --traceable``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nlbench import registry
from nlbench.errors import NlbenchError, error_text

if TYPE_CHECKING:
    from nlbench.subjects.data import Data


def traceability(
    names: Iterable[str], dataset: Data, step: Callable[[str], None] = lambda name: None
) -> list[dict[str, Any]]:
    """Determine whether each model can be traced exactly and, if not, why not.

    Each model is built for the dataset's input shape or, if it rejects that, for its builder's
    default input shape. If possible, it is built on PyTorch's ``meta`` device, so that large
    models take no longer than small ones. If a model can't be built or run, its row contains the
    error. `step` is called with each name before the model is built.
    """
    rows = []
    for name in names:
        step(name)
        try:
            shape, reason = _untraceable_reason(name, dataset)
            answer = "no" if reason else "yes"
        except (Exception, SystemExit) as error:
            # A model may raise any exception, which must not abort the listing.
            shape, answer, reason = (), "unknown", error_text(error)
        size = "×".join(map(str, shape))
        rows.append({"name": name, "traceable": answer, "input": size, "reason": reason})
    return rows


def _untraceable_reason(name: str, dataset: Data) -> tuple[tuple[int, ...], str]:
    import torch

    from nlbench.probes.lines import untraceable_reason

    first_error: NlbenchError | None = None
    for shape in _input_shapes(name, dataset):
        # A placeholder for a dataset with that input shape.
        stand_in = SimpleNamespace(
            name=dataset.name,
            shape=shape,
            classes=dataset.classes,
            sample=lambda count, shape=shape: SimpleNamespace(inputs=torch.zeros(count, *shape)),
        )
        try:
            model = _build_without_weights(name, stand_in)
        except NlbenchError as error:
            first_error = first_error or error
            continue
        return shape, untraceable_reason(model, torch.zeros(1, *shape))
    assert first_error is not None
    raise first_error


def _build_without_weights(name: str, dataset: Any) -> Any:
    import torch

    from nlbench.subjects.build import build_model

    try:
        with torch.device("meta"):
            return build_model(name, dataset, seed=0)
    except NlbenchError:
        raise
    except Exception:
        # Some builders compute with the weights, which have no values on the meta device.
        return build_model(name, dataset, seed=0)


def _input_shapes(name: str, dataset: Data) -> Iterator[tuple[int, ...]]:
    """Yield the dataset's input shape, then the builder's default shape."""
    yield tuple(dataset.shape)
    try:
        parameters = inspect.signature(registry.load("models", name)).parameters
    except (TypeError, ValueError):
        return
    missing = SimpleNamespace(default=None)
    shape = parameters.get("input_shape", missing).default
    side = parameters.get("image_size", missing).default
    channels = parameters.get("in_channels", missing).default
    if isinstance(shape, tuple):
        yield shape
    elif isinstance(side, int) and isinstance(channels, int):
        yield (channels, side, side)
