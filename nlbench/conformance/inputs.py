"""Check a measure on other inputs, networks, dtypes and devices."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from nlbench.measure import Result

from .trial import (
    FLOAT32_TOLERANCE,
    SAMPLES,
    WIDTH,
    Check,
    Trial,
    check_equal,
    difference,
    relu_network,
    samples,
    value_of,
)


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


def check_degenerate_inputs(trial: Trial, first: Result) -> Iterator[Check]:
    """Check constant activations, constant inputs, few samples and non-finite inputs."""
    for name, model, inputs in (
        ("constant activations", relu_network(shift=-1e3), samples()),
        ("constant inputs", relu_network(), torch.ones(SAMPLES, WIDTH)),
        ("one sample", relu_network(), samples(n=1)),
        ("two samples", relu_network(), samples(n=2)),
    ):
        result = trial.value(model, inputs)
        detail = result.reason if result.status != "ok" else f"{value_of(result):.6g}"
        if result.status == "failed" and not trial.is_observable(model, inputs):
            yield Check(name, "not checked", f"probe {trial.measure.probe}: {detail}")
        else:
            yield Check(name, "broken" if result.status == "failed" else "kept", detail)
    non_finite = samples()
    non_finite[SAMPLES // 2, 1] = math.nan
    result = trial.value(relu_network(), non_finite)
    if result.status == "ok" and difference(first, result, 0.0):
        yield Check("non-finite inputs", "broken", f"ok, {value_of(result):.6g}")
    else:
        detail = result.reason or "the value doesn't depend on the samples"
        yield Check("non-finite inputs", "kept", detail)


def check_types_and_devices(trial: Trial, first: Result) -> Iterator[Check]:
    """Check float64, bfloat16 and, if available, a GPU."""
    double = trial.value(relu_network().double(), samples().double())
    yield check_equal("float64", difference(first, double, FLOAT32_TOLERANCE))
    half = trial.value(relu_network().bfloat16(), samples().bfloat16())
    yield Check("bfloat16", "broken" if half.status == "failed" else "kept", half.reason)
    if torch.cuda.is_available():
        on_gpu = trial.value(relu_network().cuda(), samples().cuda())
        yield check_equal("device", difference(first, on_gpu, FLOAT32_TOLERANCE))
    else:
        yield Check("device", "not checked", "without a GPU")
