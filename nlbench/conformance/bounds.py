"""Check the declared bounds and direction of a measure."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from nlbench.measure import Result

from .check import Check, check_equal
from .trial import SAMPLES, WIDTH, Trial, relu_network, samples, value_of


def check_bounds(trial: Trial, first: Result) -> Iterator[Check]:
    """Check the bounds for inputs with different scales and distributions."""
    inputs = {
        "tiny": 1e-6 * samples(1),
        "huge": 1e6 * samples(2),
        "heavy-tailed": samples(3).pow(5),
        "offset": samples(4) + 1e4,
        "equal except for one": torch.cat([torch.ones(SAMPLES - 1, WIDTH), -torch.ones(1, WIDTH)]),
    }
    results = {name: trial.value(relu_network(), values) for name, values in inputs.items()}
    problems = [
        f"{name} inputs: {result.reason}"
        for name, result in results.items()
        if result.status == "failed"
    ]
    yield check_equal("bounds", "; ".join(problems))


def check_direction(trial: Trial, first: Result) -> Iterator[Check]:
    """Check that ReLUs are measured as more nonlinear than identities in the same network."""
    affine = trial.value(relu_network(slope=1.0), samples())
    more_means = trial.measure.more_means
    if more_means == "neither" or affine.status != "ok":
        reason = "not declared" if more_means == "neither" else f"affine network: {affine.reason}"
        yield Check("direction", "not checked", reason)
        return
    relu, identity = value_of(first), value_of(affine)
    is_correct = relu > identity if more_means == "more nonlinear" else relu < identity
    detail = f"{relu:.6g} with ReLUs, {identity:.6g} with identities"
    yield Check("direction", "kept" if is_correct else "broken", detail)
