"""Constructed networks have the nonlinearity in their names, by closed forms."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import special

from nlbench import registry
from nlbench.measures.affine_residual import affine_residual
from nlbench.measures.nlc import nonlinearity_coefficient
from nlbench.probes.lines import trace_segment
from nlbench.studies.networks.formulas import FORMULAS, Formula, LinearMap
from nlbench.studies.networks.planted import CONSTRUCTED, MAPS
from nlbench.studies.shared.ladders import LADDERS


def built(name, inputs=8, seed=0):
    torch.manual_seed(seed)
    return registry.load("models", f"ladders/{name}")(input_shape=(inputs,)).double().eval()


def normal(n, d, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed)).double()


def residual(name, x):
    with torch.no_grad():
        return affine_residual(x, built(name, x.shape[1])(x)).item()


AFFINE = [
    "relu-0", "gelu-0", "silu-0", "tanh-0", "swish-0", "cubic-0", "degree-1", "product-1",
    "spiral-0",
]  # fmt: skip


@pytest.mark.parametrize("name", [*AFFINE, "zigzag-0", "tents-0", "residual-0", "sums-0"])
def test_the_first_rung_is_affine(name):
    x = normal(100, 8)
    x = x.abs() if name == "tents-0" else x.clamp(min=-1)
    assert residual(name, x) < 1e-12


def test_attention_without_sharpness_is_affine():
    assert residual("attention-0", normal(200, 48)) < 1e-12
    assert residual("attention-4", normal(500, 48)) > 1e-3


@pytest.mark.parametrize("number", range(len(MAPS)))
def test_affine_maps(number):
    assert residual(f"map-{number}", normal(50, 16)) < 1e-12


@pytest.mark.parametrize("share", [0.25, 0.5, 1])
def test_cubic_fraction_equals_affine_residual(share):
    assert residual(f"cubic-{share}", normal(20_000, 4)) == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_degrees_and_products_have_closed_forms(k):
    """Both have the nonlinearity coefficient √k and, from two on, no affine part."""
    x = normal(20_000, 4)
    for name in (f"degree-{k}", f"product-{k}"):
        expected = 0 if k == 1 else 1
        assert residual(name, x) == pytest.approx(expected, abs=0.02)
        # Pairs of samples form the coefficient's denominator.
        nlc = nonlinearity_coefficient(built(name, 4), x, directions=8).item()
        assert nlc == pytest.approx(math.sqrt(k), rel=0.15)


@pytest.mark.parametrize("k", [1, 3])
def test_sines_have_the_residual_of_their_frequency(k):
    x = torch.rand(20_000, 3, generator=torch.Generator().manual_seed(1)).double() * 2 - 1
    expected = 1 - 6 / (math.pi * k) ** 2
    assert residual(f"sine-{k}", x) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("turns", [0.125, 0.25, 0.5])
def test_spirals_have_closed_forms(turns):
    """Of normal points: the best affine map is a rotation, scaled by |E r² exp(2πitr)| / E r²."""
    x, squared = normal(20_000, 4), (2 * math.pi * turns) ** 2
    cosine = special.hyp1f1(2, 0.5, -squared / 2)
    sine = 1.5 * math.sqrt(math.pi / 2 * squared) * special.hyp1f1(2.5, 1.5, -squared / 2)
    expected = 1 - cosine**2 - sine**2
    assert residual(f"spiral-{turns}", x) == pytest.approx(expected, abs=0.02)
    nlc = nonlinearity_coefficient(built(f"spiral-{turns}", 4), x, directions=8).item()
    assert nlc == pytest.approx(math.sqrt(1 + squared), rel=0.03)


@pytest.mark.parametrize("kinks", [0, 1, 2, 5])
def test_zigzag_kinks_lie_between_minus_one_and_one(kinks):
    network = built(f"zigzag-{kinks}", 1)
    ends = torch.tensor([[-1.0], [1.0]]).double()
    assert trace_segment(network, ends[0], ends[1]).regions == kinks + 1
    x = torch.linspace(-1, 1, kinks + 2).double()[:, None]
    values = network(x).flatten() * network(ends[:1]).sign().flatten() * -1
    expected = torch.tensor([-1.0 if n % 2 == 0 else 1.0 for n in range(kinks + 2)]).double()
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("times", [0, 1, 4])
def test_iterated_tents_from_relus_equal_the_formula(times):
    x = torch.linspace(0, 1, 257).double()[:, None]
    composed, formula = built(f"tents-{times}", 1), built(f"tent-{times}", 1)
    torch.testing.assert_close(composed(x).abs(), formula(x).abs(), rtol=0, atol=1e-6)
    regions = trace_segment(composed, torch.zeros(1).double(), torch.ones(1).double()).regions
    assert regions == 2**times


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize(("name", "low"), [("zigzag", -1), ("tents", 0)])
def test_polynomials_explain_less_on_each_rung(name, low, degree):
    """The order doesn't rest on the number of pieces, which a measure counts."""
    x = np.linspace(low, 1, 20_001)
    basis = np.polynomial.legendre.legvander(2 * (x - x.mean()) / np.ptp(x), degree)
    shares = []
    for rung in LADDERS[name].rungs:
        network = built(rung.model.removeprefix("ladders/"), 1)
        y = network(torch.from_numpy(x)[:, None]).detach().numpy()[:, 0]
        left = y - basis @ np.linalg.lstsq(basis, y, rcond=None)[0]
        shares.append(left.var() / y.var())
    assert shares[0] < 1e-9
    assert (np.diff(shares) > 1e-4).all()


def test_same_relus_make_a_line_or_a_modulus():
    x = normal(50, 3)
    line, modulus = built("sums-0", 3), built("sums-1", 3)
    torch.testing.assert_close(line[0].weight, modulus[0].weight)
    torch.testing.assert_close((modulus(x) ** 2).sum(1), (line(x) ** 2).sum(1))
    assert residual("sums-1", normal(5000, 3)) > 0.95


@pytest.mark.parametrize("name", sorted(set(CONSTRUCTED) - {"map", "gaussian"}))
def test_later_rungs_are_more_nonlinear(name):
    """The amounts of the ladders rise with the affine residual, but where it is saturated."""
    from nlbench.studies.shared.ladders import HELD_OUT, LADDERS

    ladder = {**LADDERS, **HELD_OUT}[name]
    d = int(ladder.settings[f"{ladder.data.partition('/')[0]}.shape"])
    x = normal(3000, d) if "normal" in ladder.data else torch.rand(3000, d).double()
    x = 2 * x - 1 if ladder.data == "interval/-1:1" else x
    values = [residual(rung.model.removeprefix("ladders/"), x) for rung in ladder.rungs]
    assert all(b > min(a, 0.9) for a, b in itertools.pairwise(values)), values


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("amount", [1.0, 3.0])
def test_derivatives_of_formulas_are_right(name, amount):
    amount = min(amount, 1.0) if name in ("gelu", "silu", "tanh", "cubic") else amount
    x = (torch.rand(40).double() * 0.98 + 0.003).requires_grad_()
    module = Formula(name, amount)
    assert torch.autograd.gradcheck(module, (x,), check_forward_ad=True)


def test_derivatives_of_maps_are_right():
    module = LinearMap(torch.randn(3, 3).double())
    x = torch.randn(5, 3).double().requires_grad_()
    assert torch.autograd.gradcheck(module, (x,), check_forward_ad=True)
