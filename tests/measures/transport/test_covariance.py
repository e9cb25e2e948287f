"""Shrunk covariances against scikit-learn."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.covariance import LedoitWolf, ledoit_wolf_shrinkage
from torch.autograd import gradcheck, gradgradcheck

from nlbench.measures.statistics.samples import centered
from nlbench.measures.transport.covariance import (
    joint_coordinates,
    ledoit_wolf_coefficient,
    regularized_covariance,
)


def normal(seed, n, d, spread=0.0):
    """Samples of correlated normals whose columns' scales span `spread` powers of ten."""
    r = np.random.default_rng(seed)
    mixed = r.standard_normal((n, d)) @ r.standard_normal((d, d)) / np.sqrt(d)
    return centered(torch.tensor(mixed * 10.0 ** np.linspace(-spread, 0, d)))


@given(st.integers(0, 999), st.integers(2, 40), st.integers(2, 40), st.sampled_from([0.0, 3.0]))
def test_the_shrunk_covariance_is_scikit_learns(seed, n, d, spread):
    data = normal(seed, n, d, spread)
    ours = regularized_covariance(data, dim=d, shrinkage="ledoit-wolf", ridge=0.0)
    expected = LedoitWolf(assume_centered=True).fit(data.numpy()).covariance_
    scale = np.abs(expected).max()
    np.testing.assert_allclose(ours.matrix.numpy() / scale, expected / scale, rtol=0, atol=1e-12)
    assert ours.trace.item() == pytest.approx(np.trace(expected), rel=1e-12)


@pytest.mark.parametrize(("n", "d"), [(512, 64), (64, 512), (200, 200)])
def test_the_coefficient_is_scikit_learns_to_1e_12(n, d):
    data = normal(3, n, d)
    ours = ledoit_wolf_coefficient(data, data.T @ data, d).item()
    assert ours == pytest.approx(
        ledoit_wolf_shrinkage(data.numpy(), assume_centered=True), rel=1e-12
    )


def test_coefficient_is_the_same_in_a_smaller_basis():
    data = normal(4, 20, 300)
    reduced, _ = joint_coordinates(data, data)
    inside = ledoit_wolf_coefficient(reduced, reduced.T @ reduced, 300).item()
    assert inside == pytest.approx(
        ledoit_wolf_shrinkage(data.numpy(), assume_centered=True), rel=1e-12
    )


def test_coefficient_reaches_one_for_uninformative_samples():
    data = centered(torch.eye(6, dtype=torch.float64))
    assert ledoit_wolf_coefficient(data, data.T @ data, 6).item() == 1.0


def test_without_shrinkage_covariance_is_unbiased_with_ridge():
    data = normal(5, 30, 4)
    ours = regularized_covariance(data, dim=4, shrinkage="none", ridge=0.1)
    sample = np.cov(data.numpy().T)
    expected = sample + 0.1 * np.trace(sample) / 4 * np.eye(4)
    np.testing.assert_allclose(ours.matrix.numpy(), expected, rtol=1e-12, atol=1e-15)
    assert ours.trace.item() == pytest.approx(np.trace(expected), rel=1e-12)


@pytest.mark.parametrize("differentiated", [False, True])
def test_coordinates_keep_all_inner_products_even_of_duplicates(differentiated):
    x, y = normal(6, 5, 40), normal(7, 5, 40)
    x[1] = x[0]
    rows = torch.cat([x, y])
    inside = torch.cat(joint_coordinates(x.requires_grad_(differentiated), y)).detach()
    assert inside.shape == (10, 10)
    torch.testing.assert_close(inside @ inside.T, rows @ rows.T, rtol=0, atol=1e-13)


def test_functions_of_inner_products_have_two_derivatives():
    x, y = normal(8, 4, 11).requires_grad_(), normal(9, 4, 11)

    def score(x):
        inside = torch.cat(joint_coordinates(centered(x), y))
        return (inside @ inside.T).tanh().sum()

    assert gradcheck(score, (x,))
    assert gradgradcheck(score, (x,))
