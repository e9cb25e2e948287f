"""Check that degenerate inputs give a number or ``undefined``, but never a failure."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from nlbench.measure import Result

from .check import Check
from .trial import SAMPLES, WIDTH, Trial, difference, relu_network, samples, value_of


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
