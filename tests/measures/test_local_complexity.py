"""Local complexity against the closed form of a first layer and brute force on the star."""

import pytest
import torch
from torch import nn

import nlbench
from nlbench.errors import RequestError, Undefined
from nlbench.measures.local_complexity import changed_units, star_boundaries, stars


def star_of(x, directions, radius, seed=0):
    return stars(x, directions, radius, torch.Generator().manual_seed(seed))


def test_frames_are_orthonormal_and_centred():
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    vertices = star_of(x, 4, 0.3)
    assert vertices.shape == (5, 2, 4, 2, 3)
    torch.testing.assert_close(vertices.mean(1), x[:, None].expand(-1, 4, -1, -1))
    v = (vertices[:, 1] - x[:, None]).flatten(2) / 0.3
    torch.testing.assert_close(v @ v.mT, torch.eye(4, dtype=torch.float64).expand(5, -1, -1))
    assert not torch.equal(v[0], v[1])
    with pytest.raises(RequestError):
        star_of(x, 7, 0.3)


@pytest.mark.parametrize("radius", [0.05, 0.5, 3.0])
def test_a_first_layer_has_its_closed_form(radius):
    torch.manual_seed(0)
    x = torch.randn(6, 5, dtype=torch.float64)
    layer = nn.Linear(5, 50).double()
    vertices = star_of(x, 3, radius)
    v = (vertices[:, 1] - x[:, None]) / radius
    # |z| is below r |w·v| for some v.
    reach = radius * (v @ layer.weight.T).abs().amax(1)
    expected = (layer(x).abs() < reach).sum(1).double()
    assert torch.equal(changed_units(nn.Sequential(layer, nn.ReLU()), vertices), expected)


def test_deep_units_and_boundaries_match_brute_force():
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(4, 30), nn.ReLU(), nn.Linear(30, 20), nn.LeakyReLU(0.2), nn.Linear(20, 2)
    ).double()
    vertices = star_of(torch.randn(3, 4, dtype=torch.float64), 4, 0.7)
    with torch.no_grad():
        z = model[0](vertices), model[:3](vertices)
    signs = torch.cat(z, -1).flatten(1, 2) > 0
    expected = (signs.any(1) & ~signs.all(1)).sum(1).double()
    assert torch.equal(changed_units(model, vertices), expected)
    t = torch.linspace(0, 1, 40_001, dtype=torch.float64)[:, None]
    for star, found in zip(vertices, star_boundaries(model, vertices), strict=True):
        count, nearest = 0, 1.0
        for start, end in zip(*star, strict=True):
            x = torch.lerp(start, end, t)
            with torch.no_grad():
                states = torch.cat([model[0](x), model[:3](x)], 1) > 0
            flips = (states.diff(dim=0) != 0).nonzero()[:, 0]
            count += len(flips)
            middles = (t[flips, 0] + t[flips + 1, 0]) / 2
            if len(flips):
                nearest = min(nearest, float((middles - 0.5).abs().min() * 1.4))
        assert found == (count, pytest.approx(nearest, abs=1e-4))


def test_the_measure_averages_over_its_samples():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 2)).double()
    x = torch.randn(20, 3, dtype=torch.float64)
    settings = {"local-complexity.samples": 12, "local-complexity.traced": 5, "function.batch": 7}
    result = nlbench.evaluate(model, x, "local-complexity", settings=settings)["local-complexity"]
    assert result.n == 12
    # On a straight segment a unit of the first layer changes its state at most once.
    assert 0 < result.summary["value"] <= 40
    assert result.summary["boundaries"] >= 1
    assert 0 < result.summary["nearest"] < 0.1
    assert result.summary["near"] <= 1
    again = nlbench.evaluate(model, x, "local-complexity", settings=settings)["local-complexity"]
    assert again.summary == result.summary


def test_stars_beyond_the_budget_are_not_traced():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 400), nn.ReLU(), nn.Linear(400, 2)).double()
    x = torch.randn(8, 3, dtype=torch.float64)

    def result(budget):
        settings = {"local-complexity.budget": budget, "local-complexity.radius": 2.0}
        return nlbench.evaluate(model, x, "local-complexity", settings=settings)["local-complexity"]

    traced, refused = result(1000), result(10)
    assert traced.summary["boundaries"] > 80
    assert "boundaries" not in refused.summary
    assert refused.summary["value"] == traced.summary["value"]
    assert "per segment, more than local-complexity.budget" in refused.reason


def test_networks_without_kinks_have_no_boundaries():
    x = torch.randn(9, 3)
    smooth = nlbench.evaluate(nn.Sequential(nn.Linear(3, 9), nn.GELU()), x, "local-complexity")
    result = smooth["local-complexity"]
    assert result.status == "ok"
    assert "boundaries" not in result.summary
    assert "gelu" in result.reason
    with pytest.raises(Undefined):
        changed_units(nn.Linear(3, 2), star_of(x, 2, 0.1))


class Clamped(nn.Sequential):
    def forward(self, x):
        return super().forward(x).clamp(min=0)


def test_units_that_are_not_counted_are_named():
    model = Clamped(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 2))
    result = nlbench.evaluate(model, torch.randn(9, 3), "local-complexity")["local-complexity"]
    assert result.status == "ok"
    assert result.reason == "activations not captured: clamp of the model"
