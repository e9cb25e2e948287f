"""Nonlinearity coefficient against explicit Jacobians, closed forms and affine networks."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nlbench.errors import NotFinite, Undefined
from nlbench.measure.replicates import interval
from nlbench.measures import nlc
from nlbench.measures.nlc import NonlinearityCoefficient, nonlinearity_coefficient
from nlbench.probes.function import observe_function


def normal(seed, *shape):
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape))


def read(model, batches, **options):
    measure = NonlinearityCoefficient(**options)
    measure.replicated = True
    measure.reset()
    observe_function(model, batches, measure.update)
    return measure.compute()


@given(
    st.integers(0, 999), st.integers(3, 30), st.integers(1, 6), st.integers(1, 6), st.integers(1, 9)
)
def test_affine_network_has_exactly_one_whatever_the_pairs(seed, n, d, k, directions):
    matrix, offset = normal(seed, d, k), 100 * normal(seed + 1, k)
    x = normal(seed + 2, n, d) + 3
    found = nonlinearity_coefficient(lambda x: x @ matrix + offset, x, directions=directions)
    assert found.item() == pytest.approx(1, abs=1e-9)


def definition(function, x):
    """Mean of tr(J Cov_x Jᵀ) over the samples by explicit Jacobians, over tr Cov_f."""
    jacobians = [torch.autograd.functional.jacobian(function, one[None])[0, :, 0] for one in x]
    covariance = torch.cov(x.T).reshape(x.shape[1], x.shape[1])
    bend = torch.stack([torch.trace(j @ covariance @ j.T) for j in jacobians]).mean()
    return (bend / torch.var(function(x), dim=0).sum()).sqrt().item()


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh(), nn.GELU()])
def test_equals_definition_with_explicit_jacobians(activation):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 16), activation, nn.Linear(16, 2)).double()
    net.requires_grad_(False)
    x = normal(1, 601, 3)
    expected = definition(net, x)
    found = nonlinearity_coefficient(net, x, directions=300).item()
    # All pairs make up the covariance, but each goes with two of the samples only.
    assert found == pytest.approx(expected, rel=5e-3)


def test_denominator_over_all_pairs_is_variance_of_output():
    x = normal(2, 9, 1)
    bend = nonlinearity_coefficient(lambda x: x, x, directions=4)
    scaled = nonlinearity_coefficient(lambda x: torch.cat([x, x.detach() ** 2], 1), x, directions=4)
    # The detached column has no derivative and adds its variance to the denominator alone.
    variances = torch.var(torch.cat([x, x**2], 1), dim=0)
    assert bend.item() == pytest.approx(1)
    assert scaled.item() == pytest.approx((variances[0] / variances.sum()).sqrt().item())


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        # On N(0, 1): E f'² / Var f with Hermite polynomials, and for exp in closed form.
        (lambda x: x**2, math.sqrt(2)),
        (lambda x: x**3, math.sqrt(27 / 15)),
        (torch.exp, math.sqrt(math.exp(2) / (math.exp(2) - math.e))),
        (torch.relu, math.sqrt(0.5 / (0.5 - 0.5 / math.pi))),
        (torch.sin, math.sqrt((1 + math.exp(-2)) / (1 - math.exp(-2)))),
    ],
    ids=["square", "cube", "exp", "relu", "sine"],
)
def test_functions_of_normal_variable_have_their_closed_form(function, expected):
    x = normal(3, 40_000, 1)
    found = nonlinearity_coefficient(function, x).item()
    assert found == pytest.approx(expected, rel=0.03)


def test_units_of_input_and_output_do_not_matter():
    x = normal(4, 50, 3)
    mix = normal(5, 3, 3)
    plain = nonlinearity_coefficient(lambda x: torch.tanh(x @ mix), x)
    scaled = nonlinearity_coefficient(lambda x: 7 * torch.tanh(x @ mix / 32) - 5, 32 * x)
    assert scaled.item() == pytest.approx(plain.item())


def test_samples_may_come_in_order():
    x = normal(12, 1000, 1)
    ordered = nonlinearity_coefficient(torch.sin, 3 * x.sort(0).values).item()
    assert ordered == pytest.approx(nonlinearity_coefficient(torch.sin, 3 * x).item(), rel=0.1)
    assert ordered > 2


def test_stream_is_ratio_of_sums_over_batches():
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh()).double()
    # With four directions nine samples form all pairs: the spreads add up to n tr Cov.
    batches = [0.1 * normal(7, 9, 2), 4 * normal(8, 9, 2)]
    result = read(net, batches, directions=4)
    assert result.n == 18
    single = [read(net, [batch], directions=4).summary["value"] for batch in batches]
    spreads = [float(net(batch).detach().var(0).sum()) for batch in batches]
    expected = math.sqrt(np.average(np.square(single), weights=spreads))
    assert result.summary["value"] == pytest.approx(expected, rel=1e-9)
    # The mean of the batches is another number.
    assert abs(expected - np.mean(single)) > 0.01


@pytest.mark.parametrize("n", range(3, 10))
def test_pairs_are_distinct(n):
    pairs = list(nlc._offsets(n, 9))
    assert len(pairs) == (n - 1) // 2
    for first, second in pairs:
        assert len({0, first % n, second % n}) == 3
    differences = {(second - first) % n for first, second in pairs}
    assert len(differences | {n - difference for difference in differences}) == 2 * len(pairs)


@pytest.mark.parametrize("n", [24, 100])
def test_stated_error_covers_the_value_of_many_draws(n):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 3)).double()
    results = [read(network, [normal(seed, n, 5)]) for seed in range(80)]
    values = np.array([result.summary["value"] for result in results])
    intervals = np.array([interval(r.summary["value"], r.replicates) for r in results])
    center = values.mean()
    assert np.mean((intervals[:, 0] < center) & (center < intervals[:, 1])) > 0.9
    assert np.mean([result.error for result in results]) < 1.9 * values.std()


def test_affine_network_has_no_error_to_speak_of():
    assert read(nn.Linear(3, 2).double(), [normal(8, 40, 3)]).error < 1e-9


def test_batch_of_one_or_two_is_skipped():
    net = nn.Tanh()
    whole = read(net, [normal(9, 12, 2)])
    result = read(net, [normal(9, 12, 2), normal(10, 2, 2), normal(11, 1, 2)])
    assert result.summary == whole.summary
    assert dict(result.notes) == {"samples left out": 3}
    with pytest.raises(Undefined):
        read(net, [normal(9, 2, 2)])


@pytest.mark.parametrize("offset", [1e7, 1e9])
def test_spread_below_single_precision_has_a_remark(offset):
    x = normal(0, 200, 3)
    with pytest.raises(Undefined, match="float32"):
        nonlinearity_coefficient(lambda x: torch.tanh(x.float()) + offset, x)
    found = nonlinearity_coefficient(lambda x: torch.tanh(x) + offset, x)
    expected = nonlinearity_coefficient(torch.tanh, x)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_outputs_raise(bad):
    x = normal(0, 9, 2)
    x[3, 0] = bad
    with pytest.raises(NotFinite):
        nonlinearity_coefficient(torch.tanh if math.isnan(bad) else torch.square, x)


def test_squares_beyond_float64_are_refused_not_infinite():
    with pytest.raises(NotFinite):
        nonlinearity_coefficient(lambda x: x * 1e200, normal(0, 9, 2))
