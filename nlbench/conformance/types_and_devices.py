"""Check that other dtypes and devices give the same value up to rounding errors."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from nlbench.measure import Result

from .check import Check, check_equal
from .trial import FLOAT32_TOLERANCE, Trial, difference, relu_network, samples


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
