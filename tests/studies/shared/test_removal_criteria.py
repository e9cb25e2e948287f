"""Criteria of removal, against finite differences and numbers by hand."""

import numpy as np
import pytest
import torch
from torch import nn

from nlbench.probes.replacement import find_calls
from nlbench.studies.shared.removal_criteria import call_criteria


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)
    ).double()


INPUTS = torch.randn(40, 4, generator=torch.Generator().manual_seed(1)).double()
LABELS = torch.arange(40) % 3


def table(network, **options):
    return call_criteria(network, find_calls(network, INPUTS), INPUTS, LABELS, **options)


def errors(network, place):
    """Return y and the errors of polyfit's lines at a place."""
    with torch.no_grad():
        x = network[:place](INPUTS).clone()
        y = network[place](x.clone())
    lines = [np.polyfit(x[:, c], y[:, c], 1) for c in range(x.shape[1])]
    slope, bias = torch.tensor(np.array(lines)).T
    return y, x * slope + bias - y


@pytest.mark.parametrize("place", [1, 3])
def test_terms_are_those_of_finite_differences(network, place):
    y, error = errors(network, place)
    step = 1e-6

    def losses(t):
        with torch.no_grad():
            logits = network[place + 1 :](y + t * error)
        return nn.functional.cross_entropy(logits, LABELS, reduction="none")

    change = (losses(step) - losses(-step)) / (2 * step)
    row = table(network)[str(place)]
    assert row["taylor"] == pytest.approx(float(change.mean().abs()), rel=1e-6)
    assert row["fisher"] == pytest.approx(float(change.square().mean()), rel=1e-6)
    assert row["residual"] == pytest.approx(float(error.square().mean()), rel=1e-9)


def test_change_depth_and_size_are_those_of_calls(network):
    rows = table(network)
    with torch.no_grad():
        x = network[0](INPUTS)
    change = (x.relu() - x).norm(dim=1) / x.norm(dim=1)
    assert rows["1"]["change"] == pytest.approx(float(change.mean()))
    assert [rows[place]["depth"] for place in ("1", "3")] == [1, 0]
    assert [rows[place]["size"] for place in ("1", "3")] == [6, 5]
    names = {"residual", "change", "taylor", "fisher", "senet", "depth", "size", "random"}
    assert set(rows["1"]) == names


def test_senet_counts_large_weights_of_the_layer_before(network):
    with torch.no_grad():
        for layer in (network[0], network[2], network[4]):
            layer.weight.uniform_(0.1, 0.2)
        # Seven of 69 weights are the largest tenth.
        network[2].weight[0] = 1.0
        network[0].weight[0, :2] = 1.0
    rows = table(network)
    assert rows["1"]["senet"] == pytest.approx(1 - 2 / 24)
    assert rows["3"]["senet"] == pytest.approx(1 - 6 / 30, abs=1 / 30)


def test_random_follows_the_seed(network):
    first, again, other = (table(network, seed=seed)["1"]["random"] for seed in (0, 0, 1))
    assert first == again != other


def test_network_is_left_without_gradients(network):
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    table(network)
    assert all(parameter.grad is None for parameter in network.parameters())
    assert all(torch.equal(before[name], t) for name, t in network.state_dict().items())
