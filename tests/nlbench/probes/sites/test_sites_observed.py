import random
import threading
import time

import pytest
import torch
from torch import nn

import nlbench
from nlbench.errors import RequestError
from nlbench.introspection.threads import BackgroundWorkers
from nlbench.measure import Measure, Result, site_measure
from nlbench.probes.sites import SITES
from nlbench.probes.sites import listeners as sites


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(inplace=True), nn.Conv2d(6, 4, 3), nn.SiLU(inplace=True)
    )


def settings(**given):
    return {name: option.default for name, option in SITES.options.items()} | given


def share_positive(x):
    return (x.flatten(1) > 0).float().mean(1)


class Positive(Measure):
    """Share of positive entries, before and after."""

    probe = "sites"
    unreduced = {"positive": share_positive}  # noqa: RUF012

    def reset(self):
        self.found = {}

    def update(self, observation):
        assert list(observation.unreduced) == ["positive"]
        before, after = observation.unreduced["positive"]
        self.found[observation.place] = float(after.mean() - before.mean())

    def compute(self):
        return Result.of(self.found)


class AlsoPositive(Positive):
    """The same function under another name."""

    unreduced = {"share": share_positive}  # noqa: RUF012

    def update(self, observation):
        self.found[observation.place] = float(observation.unreduced["share"][0].mean())


class Failing(Positive):
    """A function that can't be computed."""

    unreduced = {"positive": lambda x: 1 / 0}  # noqa: RUF012


def test_whole_tensor_functions_receive_input_and_output():
    network, x = model(), torch.randn(20, 3, 8, 8)
    result = nlbench.evaluate(network, x, [Positive])
    with torch.no_grad():
        h = network[0](x)
        g = network[2](h.relu())
    change = share_positive(h.relu()).mean() - share_positive(h).mean()
    assert result["positive"].values[0].statistics["value"] == pytest.approx(
        float(change), abs=1e-6
    )
    change = share_positive(nn.functional.silu(g)).mean() - share_positive(g).mean()
    assert result["positive"].values[1].statistics["value"] == pytest.approx(
        float(change), abs=1e-6
    )


def test_measures_with_one_function_share_its_result(monkeypatch):
    calls = []

    def counted(x):
        calls.append(len(x))
        return share_positive(x)

    monkeypatch.setattr(Positive, "unreduced", {"positive": counted})
    monkeypatch.setattr(AlsoPositive, "unreduced", {"share": counted})
    result = nlbench.evaluate(model(), torch.randn(20, 3, 8, 8), [Positive, AlsoPositive, "r2"])
    assert [record.result.status for record in result.records] == ["ok"] * 3
    assert len(calls) == 4


def test_failing_function_affects_only_its_measure():
    result = nlbench.evaluate(model(), torch.randn(20, 3, 8, 8), [Failing, Positive])
    assert [record.result.status for record in result.records] == ["failed", "ok"]
    assert "ZeroDivisionError" in result["failing"].reason


def test_background_and_sequential_numbers_agree(monkeypatch):
    x = torch.randn(300, 3, 8, 8)
    found = []
    for beside in (True, False):
        monkeypatch.setattr(sites, "overlap_pays", lambda device, beside=beside: beside)
        run = nlbench.evaluate(model(), x, ["affinity", "cka", "r2"], settings={"sites.batch": 32})
        found.append(run.scores)
    assert found[0].equals(found[1])


def test_selection_counts_all_sites():
    result = nlbench.evaluate(
        model(), torch.randn(20, 3, 8, 8), ["r2"], settings={"sites.select": "kind:silu"}
    )
    assert [value.place for value in result["r2"].values] == ["3"]
    assert result.records[0].probe.facts["sites"] == 1


def test_malformed_selection_is_refused_before_running():
    with pytest.raises(RequestError):
        SITES.check(100, settings(select="every:many"))
    assert SITES.steps(100, settings(batch=30)) == 4


def test_fused_activations_are_reported_unseen():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 5, batch_first=True)

        def forward(self, x):
            return self.lstm(x)[0]

    record = nlbench.evaluate(Recurrent(), torch.randn(8, 3, 4), ["r2"]).records[0]
    assert record.probe.facts["unseen"] == ["lstm of lstm (15 calls)"]
    assert "except inside lstm of lstm" in record.result.reason


def test_out_of_memory_keeps_scores_of_whole_batch():
    class Limited(nn.Module):
        def __init__(self, most):
            super().__init__()
            self.network, self.most = model().double(), most

        def forward(self, x):
            x = self.network[:2](x)
            if len(x) > self.most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return self.network[2:](x)

    x = torch.randn(100, 3, 8, 8).double()
    measures = ["affinity", "cka", "r2", "norm", "entropy"]
    whole, parts = (nlbench.evaluate(Limited(most), x, measures).scores for most in (1000, 7))
    assert list(whole.place) == list(parts.place)
    assert list(whole.status) == list(parts.status)
    assert set(whole.status) == {"ok"}
    assert parts.value.to_numpy() == pytest.approx(whole.value.to_numpy(), rel=1e-9, abs=1e-12)


def test_batch_number_and_size_follow_the_option():
    sizes = []

    @site_measure()
    def size(x, y):
        """Samples of a batch."""
        sizes.append(len(x))
        return 0.0

    nlbench.evaluate(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        (torch.randn(n, 4) for n in (5, 90, 1, 33, 71)),
        [size],
        settings={"sites.batch": 50},
        errors="none",
    )
    assert sizes == [50, 50, 50, 50]


class Drawing(Measure):
    """Sums what it draws itself, slowly, and what the network gave."""

    probe = "sites"

    def reset(self):
        self.found = {}

    def update(self, observation):
        drawn = float(torch.rand(1, dtype=torch.float64))
        time.sleep(0.002)
        drawn += float(torch.rand(1, dtype=torch.float64)) + float(observation.y.mean())
        self.found[observation.place] = self.found.get(observation.place, 0.0) + drawn

    def compute(self):
        return Result.of(self.found)


def test_drawing_network_and_measure_are_independent(monkeypatch):
    class Noisy(nn.Module):
        def forward(self, x):
            for _ in range(4):
                x = torch.relu(x + torch.randn_like(x))
            return x

    found = []
    for beside in (True, False):
        monkeypatch.setattr(sites, "overlap_pays", lambda device, beside=beside: beside)
        options = {"sites.batch": 8}
        torch.manual_seed(0)
        run = nlbench.evaluate(Noisy(), torch.ones(64, 5), [Drawing], settings=options)
        found.append(run.scores)
    assert found[0].equals(found[1])


def test_deterministic_network_overlaps_with_measures_after_first_batch(monkeypatch):
    room = []
    monkeypatch.setattr(sites, "overlap_pays", lambda device: True)
    monkeypatch.setattr(
        sites.BackgroundWorkers, "set_limit", lambda self, limit: room.append(limit)
    )
    options = {"sites.batch": 8}
    nlbench.evaluate(model(), torch.randn(32, 3, 8, 8), [Drawing, "r2"], settings=options)
    assert room == [sites.QUEUE_BYTES]


def ramified():
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3), nn.GELU()]
    return nn.Sequential(*layers)


class Means(Measure):
    """Mean outputs, of a package of its own."""

    __module__ = "strangers.measures"
    probe = "sites"
    independent_sites = True

    def reset(self):
        self.found = {}

    def update(self, observation):
        before = self.found.get(observation.place, 0.0)
        self.found[observation.place] = before / 3 + float(observation.shared(mean_output))

    def compute(self):
        return Result.of(self.found)


def mean_output(pair):
    return pair.y.mean()


class Ordered(Means):
    """Chains all sites, so that their order shows; says nothing of independent sites."""

    def reset(self):
        super().reset()
        self.last = 0.0

    def update(self, observation):
        super().update(observation)
        self.last = self.found[observation.place] = self.found[observation.place] + self.last / 2


def observed(monkeypatch, network, measures, threads, seed=None, samples=61):
    """By measure: result, and what the probe says; with a seed threads take random times."""
    if seed is not None:
        draws = random.Random(seed)
        process = BackgroundWorkers._process

        def delayed(self, index, item):
            time.sleep(draws.random() / 1000)
            process(self, index, item)

        monkeypatch.setattr(BackgroundWorkers, "_process", delayed)
    monkeypatch.setattr(sites, "measure_threads", lambda device: threads)
    monkeypatch.setattr(sites, "overlap_pays", lambda device: True)
    inputs = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))
    run = nlbench.evaluate(network, inputs, measures, settings={"sites.batch": 8})
    monkeypatch.undo()
    return {record.measure.name: (record.result, record.probe.facts) for record in run.records}


ALL = ["affinity", "r2", "cka", "norm", "sparsity", "entropy"]


def test_thread_count_changes_no_bit(monkeypatch):
    alone = observed(monkeypatch, ramified(), [*ALL, Means], 1)
    assert {result.status for result, _ in alone.values()} == {"ok"}
    for seed in range(3):
        assert observed(monkeypatch, ramified(), [*ALL, Means], 3, seed) == alone


def test_measure_without_declared_independence_uses_one_thread(monkeypatch):
    alone = observed(monkeypatch, ramified(), [Ordered, "r2"], 1)
    beside = observed(monkeypatch, ramified(), [Ordered, "r2"], 3, seed=0)
    assert alone == beside
    assert not Ordered.independent_sites


class Gathering(Means):
    """Goes on when it is at three sites at once."""

    independent_sites = True
    together = threading.Barrier(3, timeout=60)

    def update(self, observation):
        if observation.batch:
            self.together.wait()
        super().update(observation)


def test_independent_measures_use_several_sites_at_once(monkeypatch):
    # 24 samples: after the first batch, two a site.
    found = observed(monkeypatch, ramified(), [Gathering, "r2"], 3, samples=24)
    result, _ = found["gathering"]
    assert result.status == "ok", result.reason


class FailingTwice(Means):
    """Fails at two sites of the second batch, in threads at the later one first."""

    independent_sites = True
    later = threading.Event()
    is_waiting = False

    def update(self, observation):
        if observation.batch == 1 and observation.place == "3":
            self.later.set()
            raise KeyError(observation.place)
        if observation.batch == 1 and observation.place == "1":
            assert not self.is_waiting or self.later.wait(60)
            raise ValueError(observation.place)
        super().update(observation)


def test_first_failure_in_order_is_reported(monkeypatch):
    alone = observed(monkeypatch, ramified(), [FailingTwice, Means, "r2"], 1)
    monkeypatch.setattr(FailingTwice, "is_waiting", True)
    monkeypatch.setattr(FailingTwice, "later", threading.Event())
    shared = observed(monkeypatch, ramified(), [FailingTwice, Means, "r2"], 3)
    assert shared == alone
    result, _ = shared["failingtwice"]
    assert (result.status, result.reason) == ("failed", "ValueError: 1")
    assert shared["means"][0].status == "ok"


class Short(Means):
    """Finds too little memory in its first pass."""

    independent_sites = True
    passes = 0

    def reset(self):
        super().reset()
        type(self).passes += 1

    def update(self, observation):
        if self.passes == 1 and observation.batch == 2:
            raise torch.OutOfMemoryError("out of memory")
        super().update(observation)


def test_thread_out_of_memory_is_retried_in_one(monkeypatch):
    numbers, start = [], BackgroundWorkers.__init__

    def watched(self, *args, threads=1, **kwargs):
        numbers.append(threads)
        start(self, *args, threads=threads, **kwargs)

    monkeypatch.setattr(BackgroundWorkers, "__init__", watched)
    found = observed(monkeypatch, ramified(), [Short, Means], 3)
    assert numbers == [3, 1]
    assert found["short"] == found["means"]


class Growing(nn.Module):
    """Calls one more activation from the third batch on."""

    def __init__(self):
        super().__init__()
        self.layers, self.late, self.calls = ramified(), nn.ELU(), 0

    def forward(self, x):
        self.calls += 1
        x = self.layers(x)
        return self.late(x) if self.calls > 3 else x


def test_late_site_is_independent_of_thread_count(monkeypatch):
    alone = observed(monkeypatch, Growing(), [Means, "r2"], 1)
    shared = observed(monkeypatch, Growing(), [Means, "r2"], 3, seed=1)
    assert shared == alone
    assert "different activations in batch" in alone["means"][0].reason


def test_random_draws_make_all_sequential(monkeypatch):
    at_work, most = [], []

    def update(self, observation):
        at_work.append(1)
        most.append(len(at_work))
        torch.rand(1)
        at_work.pop()

    monkeypatch.setattr(Means, "update", update)
    room = []
    monkeypatch.setattr(BackgroundWorkers, "set_limit", lambda self, limit: room.append(limit))
    observed(monkeypatch, ramified(), [Means], 3)
    assert (set(most), room) == ({1}, [])
