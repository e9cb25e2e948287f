"""The order of the samples changes no value of measures that declare it."""

import functools
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from nlbench import evaluate
from nlbench.registry import expand, load

SAMPLES = 40
MEASURES = [
    name for name in expand("measures", ["*"]) if "order" in load("measures", name).invariant_to
]
ORDERS = {
    "reversed": torch.arange(SAMPLES).flip(0),
    "rotated": torch.arange(SAMPLES).roll(5),
    "shuffled": torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(2)),
}


def layers():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.Sigmoid())


def convolutions():
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(36, 3), nn.Tanh())


def tokens():
    return nn.Sequential(nn.Linear(5, 6), nn.SiLU(), nn.Linear(6, 3), nn.ReLU(), nn.Flatten())


NETWORKS = {
    "layers": (layers, (4,)),
    "convolutions": (convolutions, (2, 5, 5)),
    "tokens": (tokens, (3, 5)),
}


def measure(name, order):
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    model = make().double()
    x = torch.randn(SAMPLES, *shape, dtype=torch.float64)
    labels = torch.arange(SAMPLES) % 3
    run = evaluate(model, x[order], MEASURES, labels=labels[order], name="network")
    return {record.measure.name: record.result for record in run.records}


def test_most_measures_of_activations_declare_it():
    assert {"affinity", "r2", "cka", "norm", "entropy"} <= set(MEASURES)


@pytest.mark.parametrize(("name", "order"), list(zip(NETWORKS, ORDERS, strict=True)))
def test_the_order_of_samples_changes_no_value(name, order):
    expected = measure(name, torch.arange(SAMPLES))
    results = measure(name, ORDERS[order])
    assert any(result.status == "ok" for result in results.values())
    for measure_name, result in results.items():
        other = expected[measure_name]
        assert result.status == other.status, (measure_name, result.reason)
        assert result.summary == pytest.approx(other.summary, rel=1e-7, abs=1e-9), measure_name
        for value, same in zip(result.values, other.values, strict=True):
            assert value.statistics == pytest.approx(same.statistics, rel=1e-7, abs=1e-9)


class Reordering(nn.Module):
    """The same network on samples in another order."""

    def __init__(self, network, way):
        super().__init__()
        self.network = network
        self.way = way

    def forward(self, x):
        order = x.flatten(1)[:, 0].argsort()
        if self.way == "flip":
            return self.network(x.flip(0)).flip(0)
        if self.way == "roll":
            return self.network(x.roll(3, 0)).roll(-3, 0)
        if self.way == "index":
            return self.network(x[order])[order.argsort()]
        y = self.network(x.index_select(0, order))
        returned = torch.empty_like(y)
        returned[order] = y
        return returned


@pytest.mark.parametrize("way", ["flip", "roll", "index", "assignment"])
def test_an_order_inside_the_network_changes_no_value(way):
    torch.manual_seed(0)
    network = layers().double()
    x = torch.randn(SAMPLES, 4, dtype=torch.float64)
    names = ["linearity", "r2", "affinity", "cka"]
    plain, reordered = (
        evaluate(model, torch.cat([x, x[:3]]), names, name="network")
        for model in (network, Reordering(network, way))
    )
    for name in names:
        expected, result = plain[name], reordered[name]
        assert result.summary == pytest.approx(expected.summary, rel=1e-7)
        for value, same in zip(result.values, expected.values, strict=True):
            assert value.statistics == pytest.approx(same.statistics, rel=1e-7, abs=1e-9)


def sorted_by_class():
    """Return 180 samples around the means of three species of iris, class after class."""
    labels = torch.arange(180) // 60
    means = torch.tensor([[5.0, 3.4, 1.5, 0.2], [5.9, 2.8, 4.3, 1.3], [6.6, 3.0, 5.6, 2.0]])
    noise = torch.randn(180, 4, generator=torch.Generator().manual_seed(0))
    return means[labels] + 0.4 * noise, labels


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


PATHS = {"lines.number": 12}


@functools.cache
def scores_in_order(order):
    """Return the network's value and standard error by every measure that has one."""
    inputs, labels = sorted_by_class()
    indices = torch.arange(180)
    if order == "shuffled":
        indices = torch.randperm(180, generator=torch.Generator().manual_seed(5))
    names = expand("measures", ["*"])
    run = evaluate(classifier(), inputs[indices], names, labels=labels[indices], settings=PATHS)
    whole = run.scores[(run.scores["place"] == "") & (run.scores["status"] == "ok")]
    return {
        (row.measure, row.statistic): row.value
        for row in whole.itertuples()
        if row.statistic in ("value", "error")
    }


@pytest.mark.parametrize("name", expand("measures", ["*"]))
def test_sorted_samples_have_the_values_of_shuffled(name):
    runs = [scores_in_order(order) for order in ("sorted", "shuffled")]
    values = [run.get((name, "value")) for run in runs]
    if None in values:
        assert values == [None, None]
        return
    errors = [run.get((name, "error"), 0.0) for run in runs]
    assert abs(values[0] - values[1]) <= 4 * math.hypot(*errors) + 1e-4 * abs(values[0])


class Rows(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


class Sized:
    """A loader of one's own with a length."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


inputs_by_class, classes = sorted_by_class()
PAIRS = list(zip(inputs_by_class.split(45), classes.split(45), strict=True))
DATASET = TensorDataset(inputs_by_class, classes)
FINITE = {
    "list": PAIRS,
    "loader of one's own": Sized(PAIRS),
    "dataset": DATASET,
    "DataLoader": DataLoader(DATASET, batch_size=50),
    "batch sampler": DataLoader(DATASET, batch_sampler=torch.arange(180).split(60)),
    "without collation": DataLoader(PAIRS, batch_size=None),
    "mappings": [{"input": x, "labels": y} for x, y in PAIRS],
}


@functools.cache
def measure_container(container):
    measures = ["affinity", "r2", "pathlength", "geometric-complexity", "accuracy"]
    if container == "tensor":
        return evaluate(classifier(), inputs_by_class, measures, labels=classes)
    return evaluate(classifier(), FINITE[container], measures)


@pytest.mark.parametrize("container", FINITE)
def test_samples_of_every_finite_container_are_drawn_alike(container):
    whole = measure_container("tensor")
    run = measure_container(container)
    assert run.scores.equals(whole.scores)
    assert run.records[0].subject == whole.records[0].subject


def test_samples_are_drawn_from_finite_containers():
    inputs = torch.arange(600.0)[:, None].expand(600, 4) / 600
    dataset = TensorDataset(inputs)
    results = [
        evaluate(classifier(), samples, ["nlc"])["nlc"]
        for samples in (DataLoader(dataset, batch_size=100), list(inputs.split(100)), inputs)
    ]
    for result in results[:2]:
        assert "of 512 samples drawn from all" in result.reason
        assert result.summary["value"] == pytest.approx(results[2].summary["value"], rel=0.2)
    stream = evaluate(classifier(), DataLoader(Rows(inputs), batch_size=100), ["nlc"])["nlc"]
    assert "of the first 512 samples of a stream" in stream.reason


def test_scores_remark_the_order_of_streams():
    measures = ["affinity", "r2"]
    run = evaluate(classifier(), iter(inputs_by_class.split(45)), measures)
    assert "batches in the order of a stream" in run["affinity"].reason
    assert run["r2"].reason == ""
    assert evaluate(classifier(), PAIRS, measures)["affinity"].reason == ""
    short = evaluate(classifier(), iter(inputs_by_class[:100].split(45)), measures)
    assert short["affinity"].reason == ""
