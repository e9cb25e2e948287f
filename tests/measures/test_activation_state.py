"""Activation state against closed forms on the normal distribution and SciPy's entropy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy, norm
from torch import nn

import nlbench
from nlbench.measures.activation_state import state_entropy


@pytest.mark.parametrize(("mean", "bits"), [(0, 1.0), (1, 0.6311), (-1, 0.6311)])
def test_normal_inputs_have_entropy_of_their_distribution_function(mean, bits):
    # The quantiles of N(mean, 1), so that shares are exact to 1 / n.
    x = norm.ppf((np.arange(100_000) + 0.5) / 100_000, loc=mean)
    value = state_entropy(torch.tensor(x)[:, None]).item()
    assert value == pytest.approx(bits, abs=5e-5)
    assert value == pytest.approx(entropy([norm.cdf(mean), norm.sf(mean)], base=2), abs=2e-5)


@given(st.integers(0, 999), st.integers(2, 30), st.integers(1, 6), st.sampled_from([0.0, 0.7]))
def test_units_have_the_entropy_of_their_two_counts(seed, n, d, kink):
    x = np.random.default_rng(seed).standard_normal((n, d))
    above = np.array([sum(value > kink for value in column) for column in x.T])
    expected = entropy(np.stack([above, n - above]), base=2)
    np.testing.assert_allclose(state_entropy(torch.tensor(x), kink=kink), expected, atol=1e-12)


def test_a_unit_on_one_side_has_no_entropy():
    result = nlbench.evaluate(
        nn.ReLU(), torch.tensor([[1.0, -1, 1], [2, -2, -1]]), "activation-state"
    )
    value = result["activation-state"]
    assert value.summary["value"] == pytest.approx(1 / 3)
    assert value.summary["dead"] == value.summary["always_on"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_positions_are_samples_of_their_channel_if_flattened(last):
    torch.manual_seed(0)
    images = torch.randn(10, 3, 5, 5)
    layer = nn.Conv2d(3, 4, 3)
    inputs = layer(images).detach()

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.act, self.end = layer, nn.ReLU(), nn.Linear(4, 2)

        def forward(self, x):
            x = self.layer(x)
            x = self.end(self.act(x.permute(0, 2, 3, 1))) if last else self.act(x).mean((2, 3))
            return x.flatten(1)

    def value(reduction):
        run = nlbench.evaluate(
            Network(),
            images,
            "activation-state",
            settings={"sites.reduction": reduction, "sites.batch": 4},
        )
        return run["activation-state"].summary["value"]

    by_position = inputs.permute(0, 2, 3, 1).reshape(-1, 4)
    assert value("flatten") == pytest.approx(state_entropy(by_position).mean().item(), abs=1e-9)
    by_mean = state_entropy(inputs.mean((2, 3))).mean().item()
    assert value("spatial") == pytest.approx(by_mean, abs=1e-9)
    assert abs(value("flatten") - by_mean) > 0.01


def test_folded_positions_are_samples_of_their_channel():
    torch.manual_seed(0)
    layer = nn.Linear(6, 4)
    x = torch.randn(24, 5, 6)

    class Folded(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.act, self.end = layer, nn.ReLU(), nn.Linear(4, 3)

        def forward(self, x):
            return self.end(self.act(self.layer(x.reshape(-1, 6)))).view(len(x), -1, 3).mean(1)

    run = nlbench.evaluate(Folded(), x, "activation-state", settings={"sites.reduction": "flatten"})
    expected = state_entropy(layer(x).detach().flatten(0, 1)).mean().item()
    assert run["activation-state"].summary["value"] == pytest.approx(expected, abs=1e-9)
