"""One subject, measured: what a measure may cost, and what becomes of one that has no room."""

import itertools
import weakref
from types import SimpleNamespace

import pytest
import torch
from pretend_cuda import PretendCuda
from torch import nn

import nlbench
from nlbench.execution import probe_pass
from nlbench.execution.worker import CellTimeout
from nlbench.introspection.memory import CostMeter
from nlbench.introspection.random_state import RandomStream
from nlbench.measure import Measure, Result
from nlbench.probes import Probe
from nlbench.progress import ProgressMonitor


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()


def inputs():
    return torch.randn(24, 4, generator=torch.Generator().manual_seed(1))


class Short(Measure):
    """Norm of the outputs, for which memory runs out as often as is left to."""

    probe = "function"
    left = 0
    looked = 0

    def reset(self):
        self.sum = 0.0

    def update(self, observation):
        type(self).looked += 1
        if self.left > 0:
            type(self).left -= 1
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")
        self.sum += float(observation.inputs.norm())

    def compute(self):
        return Result.of({"norm": self.sum})


class Beside(Short):
    """The same, with room enough."""

    left = looked = 0


class Wary(Measure):
    """Works on the CPU only."""

    probe = "function"

    def update(self, observation):
        if observation.inputs.is_cuda:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.value = float(observation.inputs.norm())

    def compute(self):
        return Result.of({"norm": self.value})


def measured(measures, device="cpu"):
    return nlbench.evaluate(network().to(device), inputs().to(device), measures)


@pytest.fixture(autouse=True)
def _nothing_looked():
    Short.left = Short.looked = Beside.looked = 0


def test_out_of_memory_measure_is_retried_alone():
    expected = measured([Short, Beside])
    Short.left, Short.looked, Beside.looked = 1, 0, 0
    found = measured([Short, Beside])
    assert found["short"].status == "ok"
    assert found["short"].summary == expected["short"].summary
    assert found["short"].reason == expected["short"].reason
    assert Short.looked == 1 + Beside.looked


def test_measures_fall_back_to_the_cpu():
    expected = measured([Wary])["wary"]
    with PretendCuda():
        found = measured([Wary], "cuda")["wary"]
    assert found.status == "ok"
    assert found.reason == "computed on the CPU: cuda:0 is full"
    assert found.summary["value"] == pytest.approx(expected.summary["value"], rel=1e-6)


def test_measure_without_memory_fails_alone():
    Short.left = 10**6
    found = measured([Short, Beside])
    assert (found["short"].status, found["beside"].status) == ("failed", "ok")
    assert "ALLOC_FAILED" in found["short"].reason
    assert Short.looked == 2


def test_loader_is_read_only_once():
    Short.left = 10**6

    class AtSites(Short):
        """Of sites."""

        probe = "sites"

    batches = iter([inputs()[:12], inputs()[12:]])
    found = nlbench.evaluate(network(), batches, [AtSites], labels=False)
    assert found["atsites"].status == "failed"


class Counting(Measure):
    """Number of observations."""

    number = 0

    def reset(self):
        self.number = 0

    def update(self, observation):
        self.number += 1

    def compute(self):
        return Result.of({"number": float(self.number)})


@pytest.mark.parametrize("probe", ["function", "lines"])
def test_timing_synchronises_only_at_start_and_end(probe):
    counting = type("Counted", (Counting,), {"probe": probe, "__doc__": "Number of observations."})
    with PretendCuda() as device:
        model, samples = network().to("cuda"), inputs().to("cuda")
        device.reset()
        run = nlbench.evaluate(model, samples, [counting], settings=FEW if probe == "lines" else {})
    (record,) = run.records
    shown = int(record.result.summary["value"])
    assert shown > 0
    # Around its making, each observation and the result; around the whole.
    assert device.waits["synchronize"] == 2 * (1 + shown + 1) + 2


FEW = {"lines.number": 1, "lines.anchors": 2}


def feed_of(measure, monitor=None):
    device = torch.device("cpu")
    stream = RandomStream("", device)
    return probe_pass.Feed(measure, {}, stream, monitor or ProgressMonitor(), device)


def test_threads_are_timed_by_their_own_clock(monkeypatch):
    clocks = {"perf_counter": itertools.count(), "thread_time": itertools.count(0, 100)}
    ticks = {name: clock.__next__ for name, clock in clocks.items()}
    monkeypatch.setattr(probe_pass, "time", SimpleNamespace(**ticks))
    feed, observation = feed_of(Beside), SimpleNamespace(inputs=inputs())
    assert feed.seconds == 1
    feed.update(observation)
    assert feed.seconds == 2
    feed.update(observation, order=(0, 1))
    assert feed.seconds == 102
    observation.borrowed_seconds = 0.5
    feed.update(observation)
    feed.compute()
    assert feed.seconds == 104.5


def test_a_measure_shares_with_those_of_its_package():
    packaged = type("Packaged", (Beside,), {"__module__": "someones.measures.one", "__doc__": "x"})
    assert feed_of(packaged).package == "someones"


class Diary(ProgressMonitor):
    """Notes when measures start and stop."""

    def __init__(self, limit=None):
        super().__init__()
        self.events, self.limit = [], limit

    def enter(self, measure):
        self.events.append(f"start {measure}")

    def leave(self):
        self.events.append("stop")
        if len(self.events) == self.limit:
            raise CellTimeout("took longer than 5 s")


def test_monitors_are_informed_of_starts_and_stops():
    monitor, observation = Diary(), SimpleNamespace(inputs=inputs())
    feed = feed_of(Short, monitor)
    Short.left = 1
    feed.update(observation)
    # What has failed is not updated again.
    feed.update(observation)
    assert monitor.events == ["start short", "stop"] * 2
    assert "ALLOC_FAILED" in feed.failure.reason


def test_a_monitor_may_end_a_measure():
    monitor, observation = Diary(limit=6), SimpleNamespace(inputs=inputs())
    feed = feed_of(Beside, monitor)
    feed.update(observation)
    assert feed.failure is None
    feed.update(observation)
    assert (feed.failure.status, feed.failure.reason) == ("failed", "took longer than 5 s")
    assert feed.compute() is feed.failure
    assert monitor.events == ["start beside", "stop"] * 3


def test_sites_are_measured_without_waiting_for_the_gpu():
    counting = type("Counted", (Counting,), {"probe": "sites", "__doc__": "Observations."})
    with PretendCuda() as device:
        model, samples = network().to("cuda"), inputs().to("cuda")
        device.reset()
        nlbench.evaluate(model, samples, [counting], settings={"sites.batch": 6})
    assert device.waits["synchronize"] == 2


def test_a_meter_waits_at_both_ends():
    with PretendCuda() as device:
        CostMeter(torch.device("cuda")).read()
        assert device.waits == {"synchronize": 2}


def test_model_is_freed_after_measurement():
    model = network()
    known = weakref.ref(model)
    nlbench.evaluate(model, inputs(), ["r2", "absdev", "nlc"], settings=FEW)
    del model
    assert known() is None


def test_a_probe_without_facts_fails_its_measures(monkeypatch):
    class Silent(Probe):
        name = "function"

        def observe(self, probe_pass):
            probe_pass.step()

    monkeypatch.setattr(probe_pass, "load_probe", lambda name: Silent())
    (record,) = nlbench.evaluate(network(), inputs(), [Short]).records
    assert record.result.status == "failed"
    assert "'function' returns a NoneType" in record.result.reason
