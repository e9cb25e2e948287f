"""Calibration of batch-norm statistics on samples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nlbench.errors import RequestError, one_line, system_text

if TYPE_CHECKING:
    import torch


def calibrate(model: torch.nn.Module, batches: Iterable[torch.Tensor]) -> None:
    """Compute batch-norm statistics from samples, averaged over batches.

    The model must be in evaluation mode. Only its batch-norm layers are switched to training mode
    during the forward passes; dropout, for example, stays off. Other batches than those the layers
    accept are an error.

    Examples
    --------
    >>> import torch
    >>> layer = torch.nn.BatchNorm1d(2).eval()
    >>> calibrate(layer, [torch.tensor([[0.0, 1.0], [2.0, 1.0]])])
    >>> layer.running_mean.tolist(), layer.running_var.tolist()
    ([1.0, 1.0], [2.0, 0.0])
    """
    import torch

    from nlbench.introspection.model_state import batch_norm_layers

    layers: list[Any] = batch_norm_layers(model)
    momenta = [layer.momentum for layer in layers]
    try:
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # None selects the mean over all batches.
            layer.train()
        with torch.no_grad():
            for batch in batches:
                model(batch.clone())
    except (RuntimeError, ValueError, TypeError) as error:
        reason = one_line(system_text(error), 200)
        raise RequestError(f"batch norm can't be calibrated on the samples: {reason}") from error
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
            layer.eval()
