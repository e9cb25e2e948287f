"""The affine residual against closed forms and scikit-learn."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.polynomial.hermite_e import hermeval
from scipy.special import ndtri
from sklearn.linear_model import Ridge
from sklearn.model_selection import KFold
from torch import nn

import nlbench
from nlbench.errors import NotFinite
from nlbench.measures import affine_residual as module
from nlbench.measures.affine_residual import affine_residual


def normal_quantiles(n):
    """Points at equal steps of probability, in random order: folds are alike."""
    points = ndtri((np.arange(n) + 0.5) / n)
    return torch.tensor(np.random.default_rng(0).permutation(points))[:, None]


@given(st.integers(0, 999), st.integers(1, 9), st.integers(1, 4), st.sampled_from([1e-6, 1, 1e5]))
def test_an_affine_map_has_no_residual(seed, d, k, unit):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, d, generator=generator).double()
    y = unit * (x @ torch.randn(d, k, generator=generator).double() + 7)
    assert affine_residual(x, y).item() < 1e-20


def test_dependent_inputs_count_as_one_direction():
    x = torch.randn(60, 3).repeat(1, 50)
    assert affine_residual(x, x[:, :2] - x[:, 2:3]).item() < 1e-10


# He_k are orthogonal under the standard normal, E He_k² = k!, and only He_1 is affine.
@pytest.mark.parametrize(
    "coefficients", [(0, 1), (3, 0, 1), (0, 2, 0, 1), (1, 3, 1, 1), (0, 1, 0, 0, 0.2)]
)
def test_the_residual_of_hermite_polynomials(coefficients):
    x = normal_quantiles(20_000)
    y = torch.tensor(hermeval(x.numpy(), coefficients))
    squares = [c**2 * math.factorial(k) for k, c in enumerate(coefficients)]
    expected = 1 - squares[1] / sum(squares[1:])
    assert affine_residual(x, y).item() == pytest.approx(expected, abs=0.02)


def test_the_residual_of_relu():
    x = normal_quantiles(20_000)
    expected = 1 - 0.25 / (0.5 - 1 / (2 * math.pi))
    assert affine_residual(x, x.relu()).item() == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_residual_of_a_sine(k):
    shuffled = torch.randperm(4001, generator=torch.Generator().manual_seed(0))
    x = torch.linspace(-1, 1, 4001).double()[shuffled, None]
    expected = 1 - 6 / (math.pi * k) ** 2
    assert affine_residual(x, (math.pi * k * x).sin()).item() == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize(("n", "d", "k"), [(50, 8, 3), (40, 90, 2)])
@pytest.mark.parametrize("penalty", [1e-3, 0.3, 20.0])
def test_agrees_with_sklearns_ridge_regression(monkeypatch, n, d, k, penalty):
    monkeypatch.setattr(module, "PENALTIES", (penalty,))
    rng = np.random.default_rng(n)
    x = rng.normal(size=(n, d)) * rng.uniform(0.2, 3, d) + 5
    y = np.sin(x[:, :k]) + 0.3 * x[:, 1 : k + 1]
    order = np.argsort(np.arange(n) % 5, kind="stable")  # Folds of scikit-learn are contiguous.
    x_sorted, y_sorted = x[order], y[order]
    residual = 0.0
    for train, test in KFold(5).split(x_sorted):
        singular = np.linalg.svd(x_sorted[train] - x_sorted[train].mean(0), compute_uv=False)
        scale = np.square(singular[singular > 1e-9 * singular.max()]).mean()
        fit = Ridge(alpha=penalty * scale).fit(x_sorted[train], y_sorted[train])
        residual += np.square(y_sorted[test] - fit.predict(x_sorted[test])).sum()
    expected = residual / np.square(y - y.mean(0)).sum()
    value = affine_residual(torch.tensor(x), torch.tensor(y)).item()
    assert value == pytest.approx(expected, rel=1e-9)


def test_the_penalty_minimises_generalised_cross_validation(monkeypatch):
    """Against the explicit hat matrix of each penalty."""
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(30, 12)), rng.normal(size=(30, 1))
    y += x[:, :1]
    x -= x.mean(0)
    scale = np.linalg.svd(x, compute_uv=False) ** 2
    scores = []
    for penalty in module.PENALTIES[:-1]:
        ridge = x.T @ x + penalty * scale.mean() * np.eye(12)
        rest = np.eye(30) - 1 / 30 - x @ np.linalg.solve(ridge, x.T)
        scores.append(np.square(rest @ y).sum() / np.trace(rest) ** 2)
    best = module.PENALTIES[int(np.argmin(scores))]
    train, test = torch.tensor(x), torch.randn(5, 12).double()
    outputs = torch.tensor(y)[:, None]
    chosen = module._predictions(train, outputs, test, 30)
    monkeypatch.setattr(module, "PENALTIES", (best,))
    torch.testing.assert_close(chosen, module._predictions(train, outputs, test, 30))
    assert 0 < best < math.inf


def test_outputs_count_by_their_variance():
    x = normal_quantiles(2000)
    both = torch.cat([3 * x, x**2 - 1], 1)  # variances 9 and 2
    assert affine_residual(x, both).item() == pytest.approx(2 / 11, abs=0.02)


class Waves(nn.Module):
    def forward(self, x):
        return (50 * x[:, :2]).sin()


def test_unrelated_outputs_reach_the_permuted_value():
    x = torch.randn(200, 30, generator=torch.Generator().manual_seed(0))
    result = nlbench.evaluate(Waves(), x, "affine-residual")["affine-residual"].summary
    assert result["permuted"] == pytest.approx(1, abs=0.1)
    assert result["value"] == pytest.approx(result["permuted"], abs=0.1)


def test_the_measure_is_the_function_of_all_batches():
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
    x = torch.randn(90, 5)
    settings = {"function.batch": 20}
    result = nlbench.evaluate(network, x, "affine-residual", settings=settings)
    summary = result["affine-residual"].numbers
    assert 0 < summary["value"] < 0.5
    assert 0 < summary["error"] < summary["value"]
    once = nlbench.evaluate(network, x, "affine-residual")["affine-residual"].summary
    assert once["value"] == pytest.approx(summary["value"], rel=1e-6)


def test_the_standard_error_is_the_spread_over_draws():
    x = torch.randn(40, 300, 1, generator=torch.Generator().manual_seed(2))
    results = [
        nlbench.evaluate(nn.ReLU(), sample, "affine-residual")["affine-residual"].numbers
        for sample in x
    ]
    spread = np.std([result["value"] for result in results])
    assert np.mean([result["error"] for result in results]) == pytest.approx(spread, rel=0.25)


def test_undefined_and_refused_samples():
    x = torch.randn(20, 2)
    with pytest.raises(NotFinite):
        affine_residual(x, x / 0)


def test_constant_inputs_predict_the_mean():
    value = affine_residual(torch.ones(50, 3), torch.randn(50, 2)).item()
    assert value == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(("n", "d", "is_determined"), [(40, 8, True), (40, 64, False)])
def test_underdetermined_affine_map_has_a_remark(n, d, is_determined):
    torch.manual_seed(0)
    run = nlbench.evaluate(nn.Linear(d, 3), torch.randn(n, d), ["affine-residual"])
    result = run["affine-residual"]
    assert result.status == "ok"
    assert (result.summary["value"] < 1e-9) is is_determined
    assert ("don't determine an affine map" in result.reason) is not is_determined
