"""The measure: what it reports of a network and of its layers."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import nlbench
from nlbench.measures.pathlength import PathLength, average_path_length
from nlbench.models.sparsified.sparsification import randomize, snap, sparsify
from nlbench.probes.graph.graph_observation import channel_graph


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


def result(model, example, activity=None, **options):
    measure = PathLength(**options)
    measure.reset()
    measure.update(replace(channel_graph(model, example), activity=lambda: activity))
    return measure.compute()


def test_linearised_network_is_shorter_by_its_linear_units():
    model = sparsify(network())
    with torch.no_grad():
        model[1].weight[:3] = 1.0
    snap(model)
    assert average_path_length(model, torch.zeros(1, 3)) == 1.25
    summary = result(model, torch.zeros(1, 3)).summary
    assert (summary["value"], summary["units"], summary["active"]) == (1.25, 10, 7)
    assert summary["linear_share"] == pytest.approx(0.3)


def test_the_effective_width_of_every_layer_is_reported():
    model = sparsify(network())
    randomize(model, 0.5, seed=1)
    found = result(model, torch.zeros(1, 3))
    widths = [int((layer.slopes() != 1).sum()) for layer in (model[1], model[3])]
    assert [value.statistics["value"] for value in found.values] == widths
    assert [value.statistics["units"] for value in found.values] == [4, 6]
    shares = [value.statistics["linear_share"] for value in found.values]
    assert shares == pytest.approx([1 - widths[0] / 4, 1 - widths[1] / 6])


@pytest.mark.parametrize("normalized", [True, False])
def test_the_number_of_paths_is_reported(normalized):
    summary = result(network(), torch.zeros(1, 3), normalized=normalized).summary
    # Three inputs, four and six units, two outputs.
    assert summary["log10_paths"] == pytest.approx(math.log10(3 * 4 * 6 * 2))


def test_a_network_without_units_has_a_length_alone():
    summary = result(network()[0], torch.zeros(1, 3)).summary
    assert (summary["value"], summary.get("linear_share")) == (0.0, None)


def test_a_fully_linear_network_has_length_zero():
    model = sparsify(network())
    randomize(model, 1.0, seed=0)
    assert average_path_length(model, torch.zeros(1, 3)) == 0.0
    assert average_path_length(network()[0], torch.zeros(1, 3)) == 0.0


def test_empirical_length_counts_units_that_change_inputs():
    model = network()
    x = torch.randn(64, 3)
    hidden = model[0](x)
    later = model[2](hidden.relu())
    expected = float((hidden < 0).double().mean() + (later < 0).double().mean())
    results = nlbench.evaluate(
        model, x, measures=["pathlength"], settings={"pathlength.empirical": True}
    )
    assert float(value_of(results)) == pytest.approx(expected, abs=1e-6)


def value_of(results):
    scores = results.scores
    rows = scores[(scores.measure == "pathlength") & (scores.place == "")]
    return rows[rows.statistic == "value"].value.iloc[0]


def test_structural_length_needs_only_the_input_shape():
    results = nlbench.evaluate(network(), torch.full((2, 3), float("inf")), measures=["pathlength"])
    assert value_of(results) == 2.0


def test_unknown_operation_is_undefined_and_named():
    class Sorting(nn.Module):
        def forward(self, x):
            return torch.relu(x).sort(1).values

    scores = nlbench.evaluate(Sorting(), torch.randn(2, 3), measures=["pathlength"]).scores
    row = scores[scores.measure == "pathlength"].iloc[0]
    assert row.status == "undefined"
    assert "sort" in row.reason
