"""Run all checks on a measure: those here vary inputs, networks, dtypes and devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from nlbench.measure import Result
from nlbench.options import Settings
from nlbench.plugin_loading import checked_measure

from .derived_measures import (
    check_invariances,
    check_repeatability,
    check_replicates,
    check_site_order,
)
from .trial import (
    FLOAT32_TOLERANCE,
    SAMPLES,
    WIDTH,
    Check,
    Outcome,
    Trial,
    check_equal,
    difference,
    relu_network,
    samples,
    value_of,
)


def check_measure(measure: object, settings: Settings | None = None) -> list[Check]:
    """Check the declarations and the behaviour of a measure on small networks.

    Parameters
    ----------
    measure : Measure class
        Or anything else that `nlbench.evaluate` accepts as a measure.
    settings : mapping, optional
        Options for the measure or its probe; see `nlbench.evaluate`. Declared invariances only
        have to hold with default options.

    Returns
    -------
    list of Check
        The outcome ``broken`` means a defect in the measure.

    Raises
    ------
    nlbench.PluginError, nlbench.RequestError
        If `measure` is not a measure, or an option is invalid.

    Examples
    --------
    >>> import nlbench
    >>> @nlbench.site_measure(bounds=(0, 1))
    ... def seven(x, y):
    ...     '''Return seven.'''
    ...     return 7
    >>> [check.detail for check in check_measure(seven) if check.outcome == "broken"][0]
    '1: 7 is out of the declared bounds 0 to 1'
    """
    trial = Trial(checked_measure(measure), dict(settings or {}))
    first = trial.value(relu_network(), samples())
    if first.status != "ok":
        outcome: Outcome = "broken" if first.status == "failed" else "not checked"
        return [Check("value", outcome, first.reason)]
    checks = [Check("value", "kept", f"{value_of(first):.6g} on a small network of ReLUs")]
    for check in _CHECKS:
        checks.extend(check(trial, first))
    return checks


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
    relu = value_of(first)
    identity = value_of(affine)
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


_CHECKS: tuple[Callable[[Trial, Result], Iterator[Check]], ...] = (
    check_repeatability,
    check_site_order,
    check_bounds,
    check_direction,
    check_degenerate_inputs,
    check_types_and_devices,
    check_invariances,
    check_replicates,
)
