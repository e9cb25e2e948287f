"""Linear units: what the measure counts in the channel graph."""

import pytest
import torch
from torch import nn

import nlbench
from nlbench.models.sparsified import linear_share, nonlinear_units, randomize, sparsify


def result(model, inputs):
    return nlbench.evaluate(model, inputs, ["linear-units"]).records[0].result


def test_agrees_with_the_sparsified_networks_own_count():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 9, 1), nn.ReLU())
    model = sparsify(model)
    randomize(model, 0.4, seed=1)
    found = result(model, torch.zeros(2, 3, 8, 8))
    assert found.summary["value"] == pytest.approx(linear_share(model))
    counts = {
        value.place: (value.statistics["nonlinear"], value.statistics["units"])
        for value in found.values
    }
    assert counts == nonlinear_units(model)


def test_untransformed_network_has_no_linear_units():
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))
    assert result(model, torch.zeros(2, 3)).summary == {"value": 0, "nonlinear": 4, "units": 4}


def test_network_without_activations_is_undefined():
    assert result(nn.Linear(3, 2), torch.zeros(2, 3)).status == "undefined"
