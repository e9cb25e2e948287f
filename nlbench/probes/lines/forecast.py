"""What tracing a subject's paths will cost, told from nine points on a few of its segments."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nlbench.errors import UnsupportedOperation
from nlbench.probes import ProbeOptions, Resources, Samples
from nlbench.probes.model_state import precise_device, typed_copy

from .estimate import SegmentEstimate
from .lines import paths_of
from .patterns import UnknownPieces
from .program import run_alone
from .refined import LEAST, PROBES, TOLD, Segment, estimate_all, on_device

__all__ = ["forecast", "passes_needed"]

LOOKED_AT = 4
"""Segments of a subject by which all are told, evenly spread."""
_GOLDEN = (math.sqrt(5) - 1) / 2
_PASSES_A_REGION = {"exact": 1, "adaptive": 2}
_POINTS = 16
"""At which a forward pass in double precision is timed."""


def passes_needed(found: SegmentEstimate, tolerance: float, evaluations: int) -> int:
    """Tell from a coarse grid how many forward passes refining it will take.

    What halving will yet add to the crossings falls in proportion to the step, the error of the
    deviation with its square.

    Parameters
    ----------
    found : SegmentEstimate
        On a uniform grid.
    tolerance : float
    evaluations : int
        Most of them.

    Examples
    --------
    >>> kinks = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
    >>> ends = iter([(torch.tensor([-1.0]), torch.tensor([1.0]))])
    >>> found = next(estimate_all(kinks, ends, tolerance=1e-3, evaluations=25))
    >>> passes_needed(found, 1e-3, 4096) <= 4096
    True
    """
    assert found.crossings is not None
    told = len(found.t) - 1
    steps = LEAST
    if found.crossings:
        # Where so many are to come, twice the standard deviation of their sum is tolerated.
        allowed = 3 / 5 * (tolerance * found.crossings) ** 2 / 2
        rest = found.crossings - found.at_least
        steps = max(steps, math.ceil(told * rest / allowed))
    error = float(torch.linalg.vector_norm(found.deviation_error))
    total = float(torch.linalg.vector_norm(found.above + found.below))
    if error and total:
        steps = max(steps, math.ceil(told * math.sqrt(error / (tolerance * total))))
    halved: int = 2 ** math.ceil(math.log2(steps))
    return min(halved + 1 + PROBES, evaluations)


def forecast(
    model: nn.Module, samples: Samples, options: ProbeOptions, resources: Resources
) -> str:
    """Predict what tracing a subject's paths takes: method, boundaries, forward passes, time.

    Parameters
    ----------
    model, samples, options, resources
        As for `nlbench.probes.Probe.observe`.

    Raises
    ------
    nlbench.Undefined
        If there are no paths.
    """
    paths = paths_of(model, samples, options)
    starts, ends = paths[:, :-1].flatten(0, 1), paths[:, 1:].flatten(0, 1)
    count, method = len(starts), str(options["method"])
    if method == "sampling":
        passes = count * (int(options["resolution"]) + 1)
        return f"{count:,} segments: sampling takes {passes:,} forward passes"
    few = min(LOOKED_AT, count)
    # One in each quarter; not all at the same place of their paths.
    which = [int((i + (0.5 + i * _GOLDEN) % 1) * count / few) for i in range(few)]
    chosen = list(on_device(model, starts[which], ends[which]))
    try:
        found, seconds = _looked_at(model, chosen, options, resources)
    except UnknownPieces as error:
        chosen_method = "exact" if method == "auto" else method
        if chosen_method != "refined":
            return f"{count:,} segments: {chosen_method}, at a cost that can't be told ({error})"
        refused = str(error)
    except UnsupportedOperation as error:
        refused = str(error)
    else:
        predicted = _predicted(model, chosen, found, seconds, count, options)
        return f"{count:,} segments; predicted from nine points on {few} of them: {predicted}"
    most = count * int(options["evaluations"])
    return f"{count:,} segments: by quadrature, at most {most:,} forward passes ({refused})"


def _looked_at(
    model: nn.Module, chosen: Sequence[Segment], options: ProbeOptions, resources: Resources
) -> tuple[list[SegmentEstimate], float]:
    """Give the nine points' estimates, and seconds a forward pass."""
    wanted = str(options["dtype"])
    estimates = estimate_all(
        model,
        iter(chosen),
        tolerance=float(options["tolerance"]),
        evaluations=TOLD + 1 + PROBES,
        dtype=torch.float32 if wanted == "auto" else getattr(torch, wanted),
        memory=resources.memory,
    )
    begin = time.perf_counter()
    found = [estimate for estimate in estimates if estimate is not None]
    passes = sum(estimate.evaluations for estimate in found)
    return found, (time.perf_counter() - begin) / passes


def _predicted(
    model: nn.Module,
    chosen: Sequence[Segment],
    found: Sequence[SegmentEstimate],
    seconds: float,
    count: int,
    options: ProbeOptions,
) -> str:
    method = str(options["method"])
    regions = [(estimate.crossings or 0.0) + 1 for estimate in found]
    limit = int(options["budget"])
    is_refined = [method == "refined" or (method == "auto" and n > limit) for n in regions]
    refined = exact = 0.0
    for estimate, n, by_grids in zip(found, regions, is_refined, strict=True):
        if by_grids:
            evaluations = int(options["evaluations"])
            refined += passes_needed(estimate, float(options["tolerance"]), evaluations)
        else:
            exact += n * _PASSES_A_REGION.get(method, 1)
    scale = count / len(found)
    time_needed = scale * refined * seconds
    if exact:
        time_needed += scale * exact * _seconds_in_double(model, chosen[0])
    taken = method
    if method == "auto":
        share = sum(is_refined)
        taken = "auto takes " + ("refined" if share == len(found) else "exact")
        if 0 < share < len(found):
            taken = f"auto takes refined on {share} of {len(found)}, else exact"
    least, most = min(regions) - 1, max(regions) - 1
    boundaries = _about(sum(regions) / len(regions) - 1)
    if most > 1.5 * least:
        boundaries = f"{_about(least)} to {_about(most)}"
    return (
        f"about {boundaries} boundaries a segment; {taken}, about "
        f"{_about(scale * (refined + exact))} forward passes, {_duration(time_needed)}"
    )


@torch.inference_mode()
def _seconds_in_double(model: nn.Module, segment: Segment) -> float:
    network = typed_copy(model, torch.float64)
    device = precise_device(network, segment[0])
    start, end = (x.to(device).double() for x in segment)
    shares = torch.linspace(0, 1, _POINTS, dtype=torch.float64, device=start.device)
    points = torch.lerp(start, end, shares.reshape(-1, *[1] * start.ndim))
    run_alone(network, points[:1])
    begin = time.perf_counter()
    values: Tensor = run_alone(network, points)
    float(values.sum())  # Of a GPU it is waited for.
    return (time.perf_counter() - begin) / _POINTS


def _about(number: float) -> str:
    """Two digits of a number: more are not known."""
    if number < 100:
        return f"{number:.0f}"
    digits = math.floor(math.log10(number)) - 1
    return f"{round(number / 10**digits) * 10**digits:,}"


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * size:
            return f"about {_about(seconds / size)} {unit}"
    return f"about {max(1.0, seconds):.0f} s"
