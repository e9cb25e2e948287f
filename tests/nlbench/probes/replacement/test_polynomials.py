"""Polynomial maps against closed forms, quadrature and NumPy's least squares."""

import math

import numpy as np
import pytest
import torch
from drawing import before_drawing
from torch import nn

import nlbench
from nlbench.errors import NotFinite, RequestError, Undefined
from nlbench.probes.replacement.fits import AffineFit, PolynomialFit, legendre
from nlbench.probes.replacement.replacement_probe import parse_maps


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def costs(function, x, maps="channel,mean,poly2,poly3,poly5", **settings):
    """Statistics of one function that is replaced, as squared changes over the variance."""
    model = nn.Sequential(Function(function), nn.Identity())
    options = {"replacement.maps": maps, "replacement.of": "modules:0", **settings}
    result = nlbench.evaluate(model, x, "substitution", settings=options)["substitution"]
    assert result.status == "ok", result.reason
    return result.values[0].statistics


def grid(n=2001, radius=1.0):
    """Midpoints of equal cells, in random order."""
    x = (torch.arange(n, dtype=torch.float64) + 0.5) * (2 * radius / n) - radius
    return x[torch.randperm(n, generator=torch.Generator().manual_seed(0))][:, None]


def test_square_has_degree_two():
    statistics = costs(torch.square, grid())
    assert statistics["poly2"] == pytest.approx(0, abs=1e-20)
    assert statistics["degree"] == 2


def test_absolute_value_keeps_a_sixteenth_of_its_variance():
    # By Legendre's expansion |x| has the variance 1/12, of which degree 2 leaves 1/12 - 5/64.
    statistics = costs(torch.abs, grid(20001))
    assert statistics["poly2"] == pytest.approx((1 / 12 - 5 / 64) * 12, rel=5e-3)
    assert statistics["poly3"] == pytest.approx(statistics["poly2"], rel=1e-2)
    assert "degree" not in statistics


@pytest.mark.parametrize(("maps", "degree"), [("poly3", 3), ("poly5", 5)])
def test_cost_of_tanh_is_that_of_quadrature(maps, degree):
    nodes, weights = np.polynomial.legendre.leggauss(60)
    y = np.tanh(2 * nodes)
    coefficients = [
        (2 * k + 1) / 2 * np.sum(weights * y * np.polynomial.legendre.Legendre.basis(k)(nodes))
        for k in range(degree + 1)
    ]
    rest = y - np.polynomial.legendre.legval(nodes, coefficients)
    expected = np.sum(weights * rest**2) / np.sum(weights * y**2)
    value = costs(torch.tanh, grid(20001, radius=2.0), maps)["value"]
    assert value == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("degree", [2, 3, 5])
def test_fit_is_that_of_numpy(degree):
    generator = torch.Generator().manual_seed(degree)
    x = 3 + 2 * torch.randn(300, 4, generator=generator, dtype=torch.float64)
    y = x.sin() + torch.randn(300, 4, generator=generator, dtype=torch.float64)
    fit = PolynomialFit(5)
    for part in zip(x.split(70), y.split(70), strict=True):
        fit.add(*part)
    mapped = fit.polynomial(degree)(x, 1)
    for channel in range(4):
        p = np.polynomial.Polynomial.fit(x[:, channel].numpy(), y[:, channel].numpy(), degree)
        np.testing.assert_allclose(mapped[:, channel], p(x[:, channel].numpy()), atol=1e-9)


def test_offset_and_scale_of_the_input_change_nothing():
    x = grid(401)
    values = [
        costs(lambda x, a=a, b=b: torch.tanh(3 * (x - b) / a), a * x + b, "poly3")["value"]
        for a, b in ((1.0, 0.0), (1e-6, 1e4), (1e6, -1e9))
    ]
    assert values[1] == pytest.approx(values[0], rel=1e-3)
    assert values[2] == pytest.approx(values[0], rel=1e-3)


def test_constant_channel_is_fitted():
    fit = PolynomialFit(3)
    fit.add(torch.full((5, 1), 2.0), torch.full((5, 1), 7.0))
    assert fit.polynomial(3)(torch.full((1, 1), 2.0), 1).item() == pytest.approx(7)


def test_channels_of_any_axis_are_separate():
    x = torch.randn(8, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    slopes = torch.tensor([1.0, -2.0, 5.0], dtype=torch.float64).view(3, 1, 1)
    rows = x.movedim(1, -1).flatten(0, -2)
    fit = PolynomialFit(2)
    fit.add(rows, (slopes * x.square()).movedim(1, -1).flatten(0, -2))
    torch.testing.assert_close(fit.polynomial(2)(x, 1), slopes * x.square())


def test_inputs_outside_the_range_are_counted():
    # Maps are fitted on samples of even index, and evaluated on those between.
    x = torch.empty(40, 1, dtype=torch.float64)
    x[::2, 0] = torch.linspace(-1, 1, 20, dtype=torch.float64)
    x[1::2, 0] = torch.linspace(-2, 2, 20, dtype=torch.float64)
    outside = costs(torch.tanh, before_drawing(x), "poly2")["outside"]
    assert outside == (x[1::2].abs() > 1).double().mean()


def test_padding_does_not_count():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(x[..., :2], attention_mask=x[..., 2])

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.Tanh()

        def forward(self, x, attention_mask):
            return self.act(x)

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 6, 3, dtype=torch.float64, generator=generator)
    x[..., 2] = 1.0
    x[:, 4:, 2] = 0.0
    other = x.clone()
    other[:, 4:, :2] = 50 * torch.randn(32, 2, 2, dtype=torch.float64, generator=generator)
    settings = {"replacement.maps": "poly3,poly2"}
    first, second = (
        nlbench.evaluate(Masked(), inputs, "substitution", settings=settings)["substitution"]
        for inputs in (x, other)
    )
    assert first.status == "ok", first.reason
    assert second.values[0].statistics == pytest.approx(first.values[0].statistics, rel=1e-9)


def test_legendre_polynomials_are_those_of_numpy():
    t = torch.linspace(-1.5, 1.5, 7, dtype=torch.float64)
    expected = np.polynomial.legendre.legvander(t.numpy(), 5)
    np.testing.assert_allclose(legendre(t, 5), expected, rtol=1e-12, atol=1e-12)


def test_bad_input_is_refused():
    with pytest.raises(NotFinite):
        PolynomialFit(2).add(torch.tensor([[math.nan]]), torch.ones(1, 1))
    with pytest.raises(Undefined):
        PolynomialFit(2).polynomial(2)
    with pytest.raises(Undefined):
        AffineFit().polynomial(2)
    with pytest.raises(RequestError):
        parse_maps("poly4")
