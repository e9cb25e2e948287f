"""Rugosity against closed forms, and against explicit Jacobians."""

import math

import pytest
import torch
from torch import nn

import nlbench
from nlbench.errors import NotFinite, Undefined
from nlbench.measure.replicates import standard_error
from nlbench.measures.rugosity import jacobian_changes


def measured(network, x, **options):
    settings = {f"rugosity.{name}": value for name, value in options.items()}
    return nlbench.evaluate(network, x, "rugosity", settings=settings)["rugosity"]


class SquaredNorm(nn.Module):
    def forward(self, x):
        return x.square().sum(1, keepdim=True)


@pytest.mark.parametrize(("distance", "d"), [(0.5, 3), (0.01, 7)])
def test_squared_norm_changes_slope_by_twice_the_distance(distance, d):
    x = torch.randn(6, d, generator=torch.Generator().manual_seed(0)).double()
    value = measured(SquaredNorm(), x, distance=distance).summary["value"]
    assert value == pytest.approx(2 * distance, rel=1e-9)


@pytest.mark.parametrize("outputs", [3, 40])
def test_affine_networks_have_the_value_zero(outputs):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, outputs)).double()
    value = measured(network, torch.randn(9, 5).double()).summary["value"]
    assert value == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("limit", [None, 1, 3])
def test_changes_are_those_of_explicit_jacobians(limit):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    x = torch.randn(7, 3).double()
    steps = 0.3 * torch.randn(7, 3).double()
    changes = jacobian_changes(network, x, steps, limit=limit)
    for i in range(7):
        before, after = (
            torch.autograd.functional.jacobian(network, point) for point in (x[i], x[i] + steps[i])
        )
        assert changes[i].item() == pytest.approx((after - before).norm().item())


def test_squared_changes_are_unbiased_with_many_outputs():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 30)).double()
    x = torch.randn(400, 4).double()
    steps = 0.3 * torch.randn(400, 4).double()
    exact = jacobian_changes(network, x, steps, directions=30).square()
    ratio = jacobian_changes(network, x, steps, directions=4).square() / exact
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / math.sqrt(400)


def test_slopes_change_where_steps_cross_kinks():
    x = torch.tensor([[0.25], [2.0], [-0.25], [-2.0]]).double()
    changes = jacobian_changes(nn.ReLU(), x, torch.tensor([[-0.5], [-0.5], [0.5], [0.5]]).double())
    assert changes.tolist() == [1, 0, 1, 0]


def test_error_is_deviation_over_draws():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 2)).double()
    results = [measured(network, torch.randn(64, 4).double()) for _ in range(40)]
    values = torch.tensor([result.summary["value"] for result in results])
    errors = torch.tensor([standard_error(result.replicates) for result in results])
    assert 0.6 < errors.mean() / values.std() < 1.6


def test_infinite_and_detached_values_are_refused():
    with pytest.raises(NotFinite):
        jacobian_changes(torch.log, torch.full((2, 2), 0.1), torch.full((2, 2), -0.2))
    with pytest.raises(Undefined):
        jacobian_changes(lambda x: x.detach(), torch.ones(2, 2), torch.ones(2, 2))


class Narrow(nn.Module):
    """Its hidden layer computes in bfloat16."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.first, self.hidden = nn.Linear(6, 64), nn.Linear(64, 64)
        self.last = nn.Linear(64, 3)
        if kind == "module":
            self.hidden.bfloat16()

    def forward(self, x):
        x = self.first(x).tanh()
        if self.kind == "module":
            x = self.hidden(x.bfloat16()).float()
        elif self.kind == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                x = self.hidden(x).float()
        else:
            x = self.hidden(x)
        return self.last(x.tanh())


@pytest.mark.parametrize("kind", ["module", "autocast"])
def test_rounding_does_not_count_as_slope_change(kind):
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    result = measured(Narrow(kind), x, distance=0.01)
    assert result.status == "undefined"
    assert "rounding is" in result.reason
    assert measured(Narrow("none"), x, distance=0.01).status == "ok"
    wide = measured(Narrow(kind), x, distance=1.0).summary["value"]
    assert wide == pytest.approx(measured(Narrow("none"), x, distance=1.0).summary["value"], 0.02)
