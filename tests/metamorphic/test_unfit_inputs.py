"""What no measure can use is refused by all of them in the same way."""

import pytest
import torch
from torch import nn

import nlbench
from nlbench.errors import RequestError

MEASURES = ["absdev", "density", "r2", "elementwise-residual", "nlc", "substitution"]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def results(model, x):
    return [r.result for r in nlbench.evaluate(model, x, MEASURES, errors="none").records]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64])
def test_inputs_of_another_type_are_refused_alike(dtype):
    found = results(network(), torch.randn(24, 4).to(dtype))
    assert {result.status for result in found} == {"failed"}
    assert len({result.reason for result in found}) == 1


def test_one_sample_is_undefined_alike():
    found = results(network(), torch.randn(1, 4))
    assert {result.status for result in found} == {"undefined"}


def test_non_finite_numbers_are_not_rounding():
    x = torch.randn(24, 4)
    x[3, 1] = torch.nan
    assert not any("float64" in result.reason for result in results(network(), x))


def test_a_layer_without_weights_is_refused():
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(RequestError, match="LazyLinear"):
        results(model, torch.randn(24, 4))


@pytest.mark.parametrize(("width", "outputs"), [(0, 3), (8, 0)])
def test_empty_layers_are_undefined_or_constant(width, outputs):
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, outputs))
    run = nlbench.evaluate(model, torch.randn(24, 4), [*MEASURES, "pathlength"], errors="none")
    for record in run.records:
        assert record.result.status in ("ok", "undefined"), record.result.reason
        assert record.result.summary.get("value", 0.0) == 0.0 or width
