"""Values whose spread is close to the rounding of float64 are undefined."""

import pytest
import torch
from torch import nn

import nlbench

MEASURES = ["affinity", "r2", "cka", "effective-rank", "linearity", "entropy"]


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.function(x).to(self.head.weight.dtype))


NETWORKS = {
    "sigmoid": (lambda x: torch.sigmoid(5e-15 * torch.relu(x)), "sigmoid"),
    "tanh": (lambda x: torch.tanh(1 + 5e-15 * torch.relu(x)), "tanh"),
    "softmax": (lambda x: torch.softmax(1e-14 * x.view(-1, 2, 4), 2).flatten(1), "softmax"),
    "gelu": (lambda x: torch.nn.functional.gelu(1e9 + 1e-5 * x), "gelu"),
    "relu": (lambda x: torch.relu(1e9 + 1e-5 * x), "relu"),
}


def site_values(name, measures, dtype):
    torch.manual_seed(0)
    function, place = NETWORKS[name]
    x = torch.randn(128, 8, dtype=dtype)
    settings = {"sites.attention": True}
    run = nlbench.evaluate(Apply(function).to(dtype), x, measures, settings=settings)
    for record in run.records:
        yield from ((record, value) for value in record.result.values if place in value.place)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NETWORKS)
def test_spread_at_float64s_rounding_is_undefined(name, dtype):
    values = list(site_values(name, MEASURES, dtype))
    assert len(values) == len(MEASURES)
    for record, value in values:
        assert value.status == "undefined", (record.measure.name, value.statistics)
        assert "float64's rounding" in value.reason or "constant" in value.reason


def test_measures_without_spread_keep_their_values():
    values = list(site_values("sigmoid", ["norm", "sparsity"], torch.float64))
    assert [value.status for _, value in values] == ["ok", "ok"]


@pytest.mark.parametrize("scale", [1e-9, 1e-200, 1e200])
def test_clear_spread_has_a_value_at_any_scale(scale):
    x = scale * torch.randn(64, 4, dtype=torch.float64)
    run = nlbench.evaluate(nn.ReLU(), x, ["affinity", "r2", "cka", "linearity", "entropy"])
    assert [value.status for r in run.records for value in r.result.values] == 5 * ["ok"]
