"""The order of the samples changes no value of measures that declare it."""

import functools

import pytest
import torch
from torch import nn

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


@functools.cache
def in_order(name):
    return measure(name, torch.arange(SAMPLES))


def test_most_measures_of_activations_declare_it():
    assert {"affinity", "r2", "cka", "norm", "entropy"} <= set(MEASURES)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_order_of_samples_changes_no_value(name, order):
    expected, results = in_order(name), measure(name, ORDERS[order])
    assert any(result.status == "ok" for result in results.values())
    for measure_name, result in results.items():
        other = expected[measure_name]
        assert result.status == other.status, (measure_name, result.reason)
        assert result.summary == pytest.approx(other.summary, rel=1e-7, abs=1e-9), measure_name
        for value, same in zip(result.values, other.values, strict=True):
            assert value.statistics == pytest.approx(same.statistics, rel=1e-7, abs=1e-9)
