"""Run all checks on a measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nlbench.measure import Result
from nlbench.options import Settings
from nlbench.plugin_loading import checked_measure

from .derived_measures import (
    check_invariances,
    check_repeatability,
    check_replicates,
    check_site_order,
)
from .inputs import (
    check_bounds,
    check_degenerate_inputs,
    check_direction,
    check_types_and_devices,
)
from .trial import Check, Outcome, Trial, relu_network, samples, value_of

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
