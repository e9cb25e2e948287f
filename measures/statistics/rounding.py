"""Rounding of a network's outputs, against the network in float64."""

from __future__ import annotations

import torch

from nlbench.probes.function import FunctionBatch

SAMPLES = 16
"""Number of samples of a batch whose outputs determine the rounding."""


def output_rounding(observation: FunctionBatch) -> tuple[float, float]:
    """Return the mean rounding of the outputs of a batch and their mean norm.

    The rounding is at least that of the narrowest type of the outputs and parameters. Parts of a
    network may compute in a narrower type still, which the network in float64 shows.
    """
    with torch.no_grad():
        outputs = observation.function(observation.inputs[:SAMPLES])
    tensors = [outputs, *observation.model.parameters()]
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    narrowest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    norm = outputs.double().norm(dim=1).mean().item()
    rounding = torch.finfo(narrowest).eps * norm
    precise = observation.precise_outputs(SAMPLES)
    if precise is not None:
        errors = outputs.double() - precise.to(outputs.device)
        rounding = max(rounding, errors.norm(dim=1).mean().item())
    return rounding, norm
