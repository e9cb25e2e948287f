"""Functions of parameters are no activations, and data written into constants are data."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import nlbench

MEASURES = [
    "affinity", "norm", "sparsity", "entropy", "influence", "activation-state", "substitution",
    "local-complexity", "length-distortion",
]  # fmt: skip
GATE = torch.linspace(-1, 1, 12)


class Network(nn.Module):
    """Two hidden layers, the first of which is scaled by constants."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.second = nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 10)
        self.last = nn.Linear(10, 4)

    def gate(self, h):
        return h * GATE.sigmoid().to(h.dtype)

    def hidden(self, x):
        return self.first(x)

    def forward(self, x):
        h = self.gate(self.act(self.hidden(x)))
        return self.last(self.act(self.second(h)))


class Scaled(Network):
    """The scale is computed in advance, as a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", GATE.sigmoid())

    def gate(self, h):
        return h * self.scale


class ByParameter(Network):
    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(GATE.clone())

    def gate(self, h):
        return h * torch.sigmoid(self.logits)


class ByAttribute(Network):
    def __init__(self):
        super().__init__()
        self.logits = GATE.clone()

    def gate(self, h):
        return h * torch.sigmoid(self.logits.to(h.dtype))


class ByScalar(Scaled):
    """A positive scale of a single number."""

    def __init__(self):
        super().__init__()
        self.raw = nn.Parameter(torch.tensor(1.0).expm1().log())

    def gate(self, h):
        return super().gate(h) * nn.functional.softplus(self.raw)


class ByLayer(Scaled):
    """A network of constants."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 12))

    def gate(self, h):
        return super().gate(h) * self.net(torch.ones(1, 1, dtype=h.dtype)).mul(0).add(1)


class Positive(nn.Module):
    def forward(self, weight):
        return weight.relu() - (-weight).relu()


def parametrized():
    network = Scaled()
    parametrize.register_parametrization(network.second, "weight", Positive())
    return network


class Assigned(Scaled):
    def hidden(self, x):
        h = torch.empty(len(x), 12, dtype=x.dtype)
        h[:, :5] = super().hidden(x)[:, :5]
        h[:, 5:] = super().hidden(x)[:, 5:]
        return h


class Copied(Scaled):
    def hidden(self, x):
        h = torch.zeros(len(x), 12, dtype=x.dtype)
        h.view(-1)[: len(x) * 12].copy_(super().hidden(x).reshape(-1))
        return h


class Added(Scaled):
    def hidden(self, x):
        h = torch.zeros(len(x), 12, dtype=x.dtype)
        h[:, :5].copy_(super().hidden(x)[:, :5])
        h[:, 5:] += super().hidden(x)[:, 5:]
        return h


@functools.cache
def _inputs():
    return torch.randn(96, 6, generator=torch.Generator().manual_seed(1))


def _results(network):
    settings = {"lines.number": 1, "lines.anchors": 2}
    run = nlbench.evaluate(network.eval(), _inputs(), MEASURES, settings=settings, errors="none")
    return {record.measure.name: record.result for record in run.records}


@pytest.fixture(scope="module")
def expected():
    return _results(Scaled())


@pytest.mark.parametrize(
    "make",
    [ByParameter, ByAttribute, ByScalar, ByLayer, parametrized, Assigned, Copied, Added],
)
def test_constants_change_no_number(expected, make):
    results = _results(make())
    for name, other in expected.items():
        result = results[name]
        assert (result.status, len(result.values)) == (other.status, len(other.values)), name
        for value, twin in zip((result, *result.values), (other, *other.values), strict=True):
            number, expected_number = value.numbers.get("value"), twin.numbers.get("value")
            # A copy through a view is integrated, not traced.
            assert number == pytest.approx(expected_number, rel=2e-3, abs=1e-6), name
