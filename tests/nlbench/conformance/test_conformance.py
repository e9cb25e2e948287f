"""The checks of ``check-measure``: the built-ins keep them, and each kind of defect is found."""

import functools
import itertools
import math

import pytest
import torch

import nlbench
from nlbench import registry
from nlbench.conformance import check_measure, checks
from nlbench.errors import PluginError, RequestError
from nlbench.measure import Measure, Result, site_measure

OURS = [
    name
    for name, entry in registry.entries("measures").items()
    if entry.claims[0].value.startswith("nlbench.")
]


def broken(measure, *only, settings=None):
    """Return the details of what is broken, of all checks or some."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "_CHECKS", only or checks._CHECKS)
        outcomes = check_measure(measure, settings)
    return {c.name: c.detail for c in outcomes if c.outcome == "broken"}


FEW_STARS = {"samples": 4, "traced": 1, "directions": 2}
SETTINGS = {
    # The network of the check has too few units for 128 samples with different patterns.
    "naswot": {"naswot.samples": 16},
    "local-complexity": {f"local-complexity.{name}": FEW_STARS[name] for name in FEW_STARS},
}


@functools.cache
def check_built_in(name):
    measure = registry.load("measures", name)
    return {check.name: check for check in check_measure(measure, SETTINGS.get(name))}


@pytest.mark.parametrize("name", OURS)
def test_a_built_in_measure_keeps_the_contract(name):
    outcomes = check_built_in(name)
    assert [c for c in outcomes.values() if c.outcome == "broken"] == []
    assert outcomes["value"].outcome == "kept"
    assert len(outcomes) > 15


def test_built_in_measure_keeps_it_with_other_options():
    measure = registry.load("measures", "affinity")
    assert broken(measure, settings={"affinity.shrinkage": "none"}) == {}


def test_conflicting_numbers_for_one_input_are_found():
    @site_measure()
    def noisy(x, y):
        """Draw without a generator of its own."""
        return (x - y).abs().mean() * (1 + 0.01 * torch.rand(()))

    assert (
        "use a separate generator for random numbers"
        in broken(noisy, checks.check_repeatability)["two instances"]
    )


def test_nondeterministic_number_is_found():
    calls = itertools.count()

    @site_measure()
    def counting(x, y):
        """Count."""
        return float(next(calls))

    assert "repeatable" in broken(counting, checks.check_repeatability)


class Totals(Measure):
    """Mean change."""

    probe = "sites"

    def reset(self):
        self.sums = {}

    def update(self, observation):
        self.sums[observation.place] = (observation.x - observation.y).abs().mean()

    def compute(self):
        return Result.of(self.sums)


def test_dependence_between_sites_is_found():
    class Chained(Totals):
        """Adds what the site before had."""

        independent_sites = True

        def reset(self):
            super().reset()
            self.last = 0.0

        def update(self, observation):
            super().update(observation)
            place = observation.place
            self.last = self.sums[place] = self.sums[place] + self.last / 2

    assert "becomes" in broken(Chained, checks.check_site_order)["independent sites"]
    Chained.independent_sites = False
    assert broken(Chained, checks.check_site_order) == {}


def test_incomplete_reset_is_found():
    class Forgetful(Totals):
        seen = None

        def update(self, observation):
            self.seen = self.seen or observation.place
            super().update(observation)
            self.sums[observation.place] += observation.place == self.seen

        def reset(self):
            super().reset()
            self.seen = f"{self.seen or ''}2" if self.seen else None

    found = broken(Forgetful, checks.check_repeatability)
    assert "reset() keeps some of its state" in found["after reset"]
    assert broken(Totals) == {}


def test_modified_observation_is_found():
    class Greedy(Totals):
        def update(self, observation):
            observation.x.sub_(observation.y)
            super().update(observation)

    assert "observations unchanged" in broken(Greedy, checks.check_repeatability)


def test_wrong_direction_is_found():
    @site_measure(more_means="less nonlinear")
    def wrong(x, y):
        """It is zero for the identity."""
        return (x - y).abs().mean()

    found = broken(wrong)
    assert set(found) == {"direction"}
    assert found["direction"].endswith("0 with identities")


def test_bounds_left_by_some_inputs_are_found():
    @site_measure(bounds=(0.0, 10.0))
    def change(x, y):
        """It has a unit."""
        return (x - y).abs().mean()

    assert "huge inputs" in broken(change, checks.check_bounds)["bounds"]


def test_failure_on_empty_observations_is_found():
    @site_measure()
    def ratio(x, y):
        """Divide by nothing."""
        if not y.any():
            raise ZeroDivisionError("no output")
        return x.norm() / y.norm()

    found = broken(ratio, checks.check_degenerate_inputs)
    assert found["constant activations"] == "ZeroDivisionError: no output"


def test_score_of_non_finite_inputs_is_found():
    @site_measure()
    def blind(x, y):
        """Overlook what is not finite."""
        return (x - y).nan_to_num().abs().mean()

    found = broken(blind, checks.check_degenerate_inputs)
    assert found["non-finite inputs"].startswith("ok, ")


def test_false_and_missing_invariance_claims_are_reported():
    @site_measure(invariant_to=("order", "units"))
    def change(x, y):
        """It has a unit."""
        return (x - y).abs().mean()

    outcomes = {check.name: check for check in check_measure(change)}
    assert outcomes["invariant to order"].outcome == "kept"
    assert outcomes["invariant to units"].outcome == "broken"
    assert outcomes["invariant to rotations"].outcome == "not claimed"
    assert "could be declared" in outcomes["invariant to batches"].detail


def test_shared_results_are_those_of_the_varied_samples():
    outcomes = check_built_in("entropy")
    assert outcomes["invariant to units"].outcome == "kept"
    assert outcomes["invariant to offsets"].outcome == "not claimed"
    assert outcomes["invariant to rotations"].outcome == "not claimed"


def test_non_measure_is_refused_as_at_load():
    with pytest.raises(PluginError):
        check_measure(lambda x, y: 1.0)
    with pytest.raises(RequestError, match="'knid'"):
        check_measure(registry.load("measures", "r2"), {"r2.knid": "adjusted"})


def test_measure_without_a_value_is_not_checked_further():
    @site_measure()
    def shy(x, y):
        """Never say anything."""
        if math.inf > len(x):
            raise nlbench.Undefined("never")
        return 1.0

    (check,) = check_measure(shy)
    assert (check.outcome, check.detail) == ("not checked", "never")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to check with")
def test_without_a_gpu_the_device_is_not_checked():
    check = check_built_in("norm")["device"]
    assert (check.outcome, check.detail) == ("not checked", "without a GPU")
