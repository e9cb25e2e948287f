"""Local linearity against closed forms, and against the tangent from an explicit Jacobian."""

import pytest
import torch
from torch import nn

import nlbench
from nlbench.errors import NotFinite, Undefined
from nlbench.measure.replicates import standard_error
from nlbench.measures.local_linearity import gradient_signs, tangent_residuals
from nlbench.measures.statistics.sample_seeds import random_signs


def measured(network, x, **options):
    settings = {f"local-linearity.{name}": value for name, value in options.items()}
    return nlbench.evaluate(network, x, "local-linearity", settings=settings)["local-linearity"]


class SquaredNorm(nn.Module):
    def forward(self, x):
        return x.square().sum(1, keepdim=True)


@pytest.mark.parametrize("directions", ["random", "gradient"])
@pytest.mark.parametrize(("radius", "d"), [(0.5, 3), (0.01, 7)])
def test_squared_norm_departs_by_squared_radius_times_dimension(directions, radius, d):
    x = torch.randn(6, d, generator=torch.Generator().manual_seed(0)).double()
    result = measured(SquaredNorm(), x, directions=directions, radius=radius)
    assert result.summary["residual"] == pytest.approx(radius**2 * d, rel=1e-9)


@pytest.mark.parametrize("directions", ["random", "gradient"])
def test_affine_networks_have_the_value_zero(directions):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3)).double()
    value = measured(network, torch.randn(9, 5).double(), directions=directions).summary["value"]
    assert value == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("limit", [None, 2])
def test_residuals_are_those_of_the_explicit_jacobian(limit):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    x, steps = torch.randn(7, 3).double(), 0.3 * torch.randn(7, 3).double()
    residuals, changes = tangent_residuals(network, x, steps, limit=limit)
    for i in range(7):
        slope = torch.autograd.functional.jacobian(network, x[i]) @ steps[i]
        moves = [network(x[i] + sign * steps[i]) - network(x[i]) for sign in (1, -1)]
        departures = [(moves[0] - slope).norm(), (moves[1] + slope).norm()]
        assert residuals[i].item() == pytest.approx(sum(departures).item() / 2)
        assert changes[i].item() == pytest.approx(sum(m.square().sum() for m in moves).item() / 2)


def test_rectifier_departs_where_the_step_crosses_its_kink():
    x = torch.tensor([[0.25], [2.0]]).double()
    # From 0.25, one of both steps ends at -0.25, where the output is 0 and the tangent -0.25.
    result = measured(nn.ReLU(), x, radius=0.5)
    assert result.summary["residual"] == pytest.approx(0.25 / 2 / 2)


def test_error_is_deviation_over_draws():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 2)).double()
    results = [measured(network, torch.randn(64, 4).double(), radius=0.5) for _ in range(40)]
    values = torch.tensor([result.summary["value"] for result in results])
    errors = torch.tensor([standard_error(result.replicates) for result in results])
    assert 0.6 < errors.mean() / values.std() < 1.6


def test_directions_belong_to_samples():
    x = torch.zeros(3, 50)
    signs = random_signs(x, torch.tensor([1, 2, 1]))
    assert torch.equal(signs[0], signs[2])
    assert not torch.equal(signs[0], signs[1])


def test_a_constant_is_undefined():
    dead = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    nn.init.constant_(dead[0].bias, -100.0)
    result = measured(dead, torch.zeros(4, 2))
    assert result.status == "undefined"
    assert "does not change" in result.reason


def test_non_finite_or_detached_output_is_refused():
    with pytest.raises(NotFinite):
        tangent_residuals(torch.log, torch.full((2, 2), 0.1), torch.full((2, 2), 0.2))
    with pytest.raises(Undefined):
        gradient_signs(lambda x: x.detach(), torch.ones(2, 2))


@pytest.mark.parametrize(
    ("dtype", "radius"),
    [(torch.bfloat16, 0.1), (torch.float16, 1e-3), (torch.float32, 1e-6), (torch.float64, 1e-6)],
)
def test_rounding_does_not_count_as_departure(dtype, radius):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    x = torch.randn(24, 5).to(dtype)
    settings = {"local-linearity.radius": radius}
    result = nlbench.evaluate(network, x, ["local-linearity"], settings=settings, errors="none")[
        "local-linearity"
    ]
    if dtype == torch.float64:
        assert result.summary["value"] < 1e-5
    else:
        assert result.status == "undefined"
        assert "rounding" in result.reason


class Narrow(nn.Module):
    """Computes in bfloat16 inside."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layers(x).float()


def test_rounding_inside_a_network_is_undefined():
    x = torch.randn(32, 6)
    assert nlbench.evaluate(Narrow(), x, ["local-linearity"])["local-linearity"].status == (
        "undefined"
    )
    layers = Narrow().layers
    assert nlbench.evaluate(layers, x, ["local-linearity"])["local-linearity"].status == "ok"
