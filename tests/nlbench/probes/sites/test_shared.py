"""What measures share in a pass, and how the pass is shared among threads."""

import threading
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import nlbench
from nlbench.conformance.pretend_cuda import PretendCuda
from nlbench.measure import Accumulator, Measure, PooledMeasure, Result, site_measure
from nlbench.measures.prepared import prepare
from nlbench.probes.sites import sites

SIX = ["affinity", "r2", "cka", "norm", "sparsity", "entropy"]
OPTIONS = {"sites.batch": 8}


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 5, 3), nn.ReLU(inplace=True), nn.Conv2d(5, 4, 3), nn.SiLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 6), nn.GELU(), nn.Linear(6, 3))


def inputs():
    return torch.randn(34, 2, 6, 6, generator=torch.Generator().manual_seed(1))


def numbers(run):
    """Everything that each measure says, by its name."""
    return {record.measure.name: record.result for record in run.records}


def with_threads(monkeypatch, threads, beside=None):
    monkeypatch.setattr(sites, "overlap_pays", lambda device: True)
    monkeypatch.setattr(sites, "threads_beside", lambda device: (threads, beside or threads))


class Drawing(Measure):
    """Sums of what it draws and what it sees, one state for all sites."""

    probe = "sites"

    def reset(self):
        self.total, self.order, self.at_work = 0.0, [], 0

    def update(self, observation):
        assert self.at_work == 0
        self.at_work += 1
        self.order.append(observation.order)
        self.total = 0.5 * self.total + float(torch.rand(1)) + float(observation.y.mean())
        # It is its own copy that it writes into.
        observation.x.zero_()
        self.at_work -= 1

    def compute(self):
        assert self.order == sorted(self.order)
        return Result.of({"all": self.total})


@pytest.fixture(scope="module")
def alone():
    """Each measure's result, measured by itself."""
    found = {}
    for measure in [*SIX, Drawing]:
        found |= numbers(nlbench.evaluate(network(), inputs(), [measure], settings=OPTIONS))
    return found


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.sampled_from([*SIX, Drawing]), min_size=1, unique=True), st.sampled_from([1, 2, 7])
)
def test_no_bit_depends_on_threads_on_other_measures_or_on_their_order(alone, measures, threads):
    with pytest.MonkeyPatch.context() as monkeypatch:
        with_threads(monkeypatch, threads)
        found = numbers(nlbench.evaluate(network(), inputs(), measures, settings=OPTIONS))
    assert found == {name: alone[name] for name in found}
    assert len(found) == len(measures)


def test_measures_that_say_so_work_on_several_sites_at_once(monkeypatch):
    with_threads(monkeypatch, 3)
    meeting = threading.Barrier(3, timeout=30)

    @site_measure(parallel=True)
    def meets(x, y):
        """Wait for two more sites."""
        meeting.wait()
        return 1.0

    run = nlbench.evaluate(network(), inputs(), [meets], settings=OPTIONS)
    assert [value.place for value in run["meets"].values] == ["1", "3", "6"]


def test_a_measure_that_fails_leaves_the_numbers_of_the_others(monkeypatch, alone):
    with_threads(monkeypatch, 7)

    class Failing(Measure):
        """Fails in every batch from the second on; the first one counts."""

        probe, parallel = "sites", True

        def update(self, observation):
            if observation.batch:
                time.sleep(0.01 * (observation.site.index == 0))
                raise ValueError(f"at {observation.order}")

        def compute(self):
            return Result.of({"all": 1.0})

    run = nlbench.evaluate(network(), inputs(), [Failing, *SIX], settings=OPTIONS)
    found = numbers(run)
    assert found.pop("failing").reason == "ValueError: at (1, 0)"
    assert found == {name: alone[name] for name in SIX}
    assert not any(thread.name == "measures" for thread in threading.enumerate())


def change(x, y):
    CALLS.append(len(x))
    return (x - y).abs()


def failing(x, y):
    CALLS.append(len(x))
    raise nlbench.Undefined("nothing to share")


CALLS = []


def shares(name, function, is_parallel):
    class Sharing(Measure):
        """Largest change, which others compute too."""

        probe, parallel = "sites", is_parallel

        def reset(self):
            self.found = {}

        def update(self, observation):
            shared = observation.shared(function)
            assert torch.equal(shared, (observation.x - observation.y).abs())
            self.found[observation.place] = shared.max().item()

        def compute(self):
            return Result.of(self.found)

    return type(name, (Sharing,), {"name": name, "__doc__": Sharing.__doc__})


@pytest.mark.parametrize("function", [change, failing])
def test_what_is_shared_is_computed_once(monkeypatch, function):
    with_threads(monkeypatch, 3)
    CALLS.clear()
    measures = [shares(name, function, name != "c") for name in "abc"]
    run = nlbench.evaluate(network(), inputs(), measures, settings=OPTIONS)
    first, *others = (run[name] for name in "abc")
    assert others == [first, first]
    if function is change:
        # Of three sites in each of five batches, for those that share and for the one that doesn't.
        assert (first.status, len(CALLS)) == ("ok", 2 * 15)
    else:
        assert (first.status, first.reason) == ("undefined", "nothing to share")


@pytest.mark.parametrize("target", ["x", "made", "prepared", "given"])
def test_a_measure_that_writes_into_what_it_is_shown_fails_and_others_see_nothing_of_it(
    monkeypatch, alone, target
):
    with_threads(monkeypatch, 2)

    def overwriting(x, y):
        return x.zero_()

    class Writing(Measure):
        """Break its promise."""

        probe, parallel = "sites", True

        def update(self, observation):
            made = {
                "x": lambda: observation.x,
                "made": lambda: observation.shared(change),
                "prepared": lambda: observation.shared(prepare)[1].values,
                "given": lambda: observation.shared(overwriting),
            }
            made[target]().zero_()

        def compute(self):
            return Result.of({"all": 0.0})

    measures = ["norm", Writing, *SIX[:3], *SIX[4:]]
    found = numbers(nlbench.evaluate(network(), inputs(), measures, settings=OPTIONS))
    assert found.pop("writing").reason == "update() writes into what other measures are shown"
    assert found == {name: alone[name] for name in SIX}


class Sums(Accumulator):
    """Sum of the outputs, and how often it was asked to add."""

    def __init__(self):
        self.total, self.added = 0.0, 0

    def add(self, x, y):
        self.added += 1
        self.total += y.double().sum().item()

    def statistics(self):
        return {"value": self.total, "added": self.added}


class Pooled(PooledMeasure):
    """Sum of the outputs."""

    parallel = True

    def accumulator(self):
        return [Sums()]

    def take(self, accumulator, observation):
        accumulator[0] = observation.pooled(accumulator[0])

    def _value(self, place):
        return nlbench.Value(place, self._accumulators[place][0].statistics())


def test_an_accumulator_that_measures_share_takes_in_each_batch_once(monkeypatch):
    with_threads(monkeypatch, 3)
    body = {"__doc__": "The same once more."}
    again = type("Again", (Pooled,), body)
    apart = type("Apart", (Pooled,), {"parallel": False, **body})
    run = nlbench.evaluate(network(), inputs(), [Pooled, again, apart], settings=OPTIONS)
    assert run["pooled"].values == run["again"].values == run["apart"].values
    assert {value.statistics["added"] for value in run["pooled"].values} == {5}


def test_r2_and_cka_keep_the_samples_of_a_site_once(monkeypatch):
    from nlbench.measures import _moments

    added, add = [], _moments.SamplePairs.add

    def counted(self, x, y):
        added.append(len(x))
        add(self, x, y)

    monkeypatch.setattr(_moments.SamplePairs, "add", counted)
    nlbench.evaluate(network(), inputs(), ["r2", "cka"], settings=OPTIONS)
    assert sum(added) == 3 * 34


def test_a_measures_time_holds_what_others_have_spent_on_it(monkeypatch):
    def slow(x, y):
        time.sleep(0.02)
        return x

    def asking(name):
        def function(self, observation):
            observation.shared(slow)

        body = {
            "probe": "sites",
            "parallel": True,
            "update": function,
            "name": name,
            "__doc__": "Asks.",
        }
        return type(name, (Measure,), {**body, "compute": lambda self: Result.of({"all": 0.0})})

    run = nlbench.evaluate(network(), inputs(), [asking("a"), asking("b")], settings=OPTIONS)
    assert all(record.seconds >= 15 * 0.02 for record in run.records)


def test_six_measures_wait_for_a_gpu_at_most_four_times_a_site_and_batch(alone):
    with PretendCuda() as device:
        model, samples = network().to("cuda"), inputs().to("cuda")
        device.reset()
        run = nlbench.evaluate(model, samples, [*SIX, Drawing], settings=OPTIONS)
    found = numbers(run)
    for name in SIX:
        assert found[name].summary["value"] == pytest.approx(
            alone[name].summary["value"], rel=1e-12
        )
    assert device.waits.total() <= 4 * 3 * 5, device.places
    # One event for the six and one for what is shown in order; nothing is copied by waiting.
    of_sites = {what for place, what in device.places if place.startswith("sites/")}
    assert of_sites == {"event.synchronize"}
    assert device.waits["event.synchronize"] == 2 * 3 * 5


def test_a_prepared_pair_is_the_same_in_a_pass_and_without():
    x = torch.randn(6, 3)
    pair = prepare(x, x.relu())
    site = sites.Site("relu", "relu", 0, (3,), 1)
    again = sites.SiteBatch(site, 0, x, x.relu()).shared(prepare)
    for one, other in zip(pair, again, strict=True):
        assert torch.equal(one.scaled, other.scaled)
        assert torch.equal(one.centered, one.values - one.values.mean(0)) or torch.allclose(
            one.centered, one.values - one.values.mean(0), rtol=1e-12, atol=1e-15
        )
