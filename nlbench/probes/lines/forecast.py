"""Forecasts of the cost of tracing a subject's segments."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from torch import nn

from nlbench.errors import UnsupportedOperation
from nlbench.probes.probe import ProbeOptions, Resources, Samples

from .api import segment_ends
from .estimation.estimator import MIN_STEPS, estimate_segments
from .estimation.extrapolation import CHECK_PLACES, ERROR_SIGMAS
from .estimation.grids import COST_PROBE_STEPS
from .estimation.piecewise import UnknownPieces
from .observation import paths_of
from .quadrature import integrate_along
from .segments import segments_on_device
from .trace import SegmentEstimate

PROBED_SEGMENTS = 4
"""Number of segments per subject that a forecast evaluates."""
PASSES_PER_REGION = {"exact": 1, "adaptive": 2}
DOUBLE_PRECISION_COST = 2
"""Time of a forward pass in float64 relative to float32."""
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


def forecast(
    model: nn.Module, samples: Samples, options: ProbeOptions, resources: Resources
) -> str:
    """Predict the method, boundaries, forward passes and time for tracing a subject's paths.

    Raises
    ------
    nlbench.Undefined
        If there are no paths.
    """
    starts, ends = segment_ends(paths_of(model, samples, options))
    count, method = len(starts), str(options["method"])
    if method == "sampling":
        passes = count * (int(options["resolution"]) + 1)
        return f"{count:,} segments: sampling takes {passes:,} forward passes"
    probed = min(PROBED_SEGMENTS, count)
    # Evenly distributed over the segments, but at different positions on their paths.
    index = [int((i + (0.5 + i * _GOLDEN_RATIO) % 1) * count / probed) for i in range(probed)]
    coarse = estimate_segments(
        model,
        segments_on_device(model, starts[index], ends[index]),
        tolerance=float(options["tolerance"]),
        evaluations=COST_PROBE_STEPS + 1 + CHECK_PLACES,
        dtype=torch.float64 if options["dtype"] == "float64" else torch.float32,
        memory=resources.memory,
    )
    began = time.perf_counter()
    try:
        estimates = [estimate for estimate in coarse if estimate is not None]
    except UnsupportedOperation as error:
        if isinstance(error, UnknownPieces) and method != "refined":
            method = "exact" if method == "auto" else method
            return f"{count:,} segments: {method}, at an unknown cost ({error})"
        limit = int(options["evaluations"])
        began = time.perf_counter()
        [estimate] = integrate_along(
            model,
            starts[index[:1]],
            ends[index[:1]],
            tolerance=float(options["tolerance"]),
            evaluations=limit,
            memory=resources.memory,
        )
        seconds = count * (time.perf_counter() - began)
        return (
            f"{count:,} segments: by quadrature, predicted from one of them: about "
            f"{_round(count * estimate.evaluations)} forward passes, about {_duration(seconds)}, "
            f"at most {count * limit:,} passes ({error})"
        )
    seconds = (time.perf_counter() - began) / sum(estimate.evaluations for estimate in estimates)
    return f"{count:,} segments; predicted from nine points on {probed} of them: " + _prediction(
        estimates, seconds, count / probed, options
    )


def _prediction(
    estimates: Sequence[SegmentEstimate], seconds: float, scale: float, options: ProbeOptions
) -> str:
    method, budget = str(options["method"]), int(options["budget"])
    regions = [(estimate.crossings or 0.0) + 1 for estimate in estimates]
    is_refined = [method == "refined" or (method == "auto" and n > budget) for n in regions]
    refined = exact = 0.0
    for estimate, n, by_grids in zip(estimates, regions, is_refined, strict=True):
        if by_grids:
            refined += _refined_passes(estimate, options)
        else:
            exact += n * PASSES_PER_REGION.get(method, 1)
    cost = 1 if options["dtype"] != "auto" else DOUBLE_PRECISION_COST
    chosen = method
    if method == "auto":
        count = sum(is_refined)
        chosen = "auto uses " + ("refined" if count == len(estimates) else "exact")
        if 0 < count < len(estimates):
            chosen = f"auto uses refined on {count} of {len(estimates)}, else exact"
    return (
        f"about {_round(sum(regions) / len(regions) - 1)} boundaries per segment; {chosen}, "
        f"about {_round(scale * (refined + exact))} forward passes, "
        f"about {_duration(scale * (refined + cost * exact) * seconds)}"
    )


def _refined_passes(estimate: SegmentEstimate, options: ProbeOptions) -> int:
    """Predict the number of forward passes for refining a coarse estimate.

    The number of crossings still to be found is proportional to the step size, and the error of
    the deviation to its square.
    """
    tolerance, coarse = float(options["tolerance"]), len(estimate.t) - 1
    steps = MIN_STEPS
    if estimate.crossings:
        # Expected number of remaining crossings for which two standard deviations are tolerable.
        allowed = 3 / 10 * (tolerance * estimate.crossings / ERROR_SIGMAS) ** 2
        remaining = estimate.crossings - estimate.at_least
        steps = max(steps, math.ceil(coarse * remaining / allowed))
    error = float(torch.linalg.vector_norm(estimate.deviation_error))
    total = float(torch.linalg.vector_norm(estimate.above + estimate.below))
    if error and total:
        steps = max(steps, math.ceil(coarse * math.sqrt(error / (tolerance * total))))
    halved: int = 2 ** math.ceil(math.log2(steps))
    return min(halved + 1 + CHECK_PLACES, int(options["evaluations"]))


def _round(number: float) -> str:
    """Round to two significant digits."""
    if number < 100:
        return f"{number:.0f}"
    digits = math.floor(math.log10(number)) - 1
    return f"{round(number / 10**digits) * 10**digits:,}"


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * size:
            return f"{_round(seconds / size)} {unit}"
    return f"{max(1.0, seconds):.0f} s"
