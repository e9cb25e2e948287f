"""Shrunk covariances against scikit-learn, the transport map against SciPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import sqrtm
from sklearn.covariance import LedoitWolf, ledoit_wolf_shrinkage

from nlbench.errors import Undefined
from nlbench.measures._covariance import (
    joint_basis,
    ledoit_wolf_coefficient,
    regularized_covariance,
    transport,
)
from nlbench.measures._samples import centered


def normal(seed, n, d, spread=0.0):
    """Samples of correlated normals whose columns' scales span `spread` powers of ten."""
    r = np.random.default_rng(seed)
    mixed = r.standard_normal((n, d)) @ r.standard_normal((d, d)) / np.sqrt(d)
    return centered(torch.tensor(mixed * 10.0 ** np.linspace(-spread, 0, d)))


@settings(deadline=None, max_examples=40)
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
    ours = ledoit_wolf_coefficient(data, data.T @ data / n, d).item()
    assert ours == pytest.approx(
        ledoit_wolf_shrinkage(data.numpy(), assume_centered=True), rel=1e-12
    )


def test_the_coefficient_is_the_same_in_a_smaller_basis():
    data = normal(4, 20, 300)
    reduced = data @ joint_basis(data, data)
    inside = ledoit_wolf_coefficient(reduced, reduced.T @ reduced / 20, 300).item()
    assert inside == pytest.approx(
        ledoit_wolf_shrinkage(data.numpy(), assume_centered=True), rel=1e-12
    )


def test_the_coefficient_reaches_one_where_the_samples_say_nothing_of_directions():
    data = centered(torch.eye(6, dtype=torch.float64))
    assert ledoit_wolf_coefficient(data, data.T @ data / 6, 6).item() == 1.0


def test_without_shrinkage_it_is_the_unbiased_covariance_with_a_relative_ridge():
    data = normal(5, 30, 4)
    ours = regularized_covariance(data, dim=4, shrinkage="none", ridge=0.1)
    sample = np.cov(data.numpy().T)
    expected = sample + 0.1 * np.trace(sample) / 4 * np.eye(4)
    np.testing.assert_allclose(ours.matrix.numpy(), expected, rtol=1e-12, atol=1e-15)
    assert ours.trace.item() == pytest.approx(np.trace(expected), rel=1e-12)


def test_the_basis_is_orthonormal_and_holds_all_rows_even_of_duplicates():
    x, y = normal(6, 5, 40), normal(7, 5, 40)
    x[1] = x[0]
    basis = joint_basis(x, y)
    torch.testing.assert_close(basis.T @ basis, torch.eye(10).double(), rtol=0, atol=1e-14)
    for rows in (x, y):
        torch.testing.assert_close(rows @ basis @ basis.T, rows, rtol=0, atol=1e-13)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 999), st.integers(1, 12))
def test_the_map_is_symmetric_definite_and_turns_one_covariance_into_the_other(seed, d):
    source, target = (np.cov(normal(seed + k, 60, d).numpy().T).reshape(d, d) for k in (0, 5000))
    matrix = transport(torch.eye(d).double(), torch.tensor(source), torch.tensor(target)).numpy()
    scale = np.abs(matrix).max()
    np.testing.assert_allclose(matrix / scale, matrix.T / scale, atol=1e-9)
    assert np.linalg.eigvalsh(matrix).min() > 0
    np.testing.assert_allclose(
        matrix @ source @ matrix, target, rtol=0, atol=1e-10 * np.abs(target).max()
    )


def test_the_map_is_the_papers_formula():
    source, target = (np.cov(normal(k, 60, 6).numpy().T) for k in (8, 9))
    root = np.real(sqrtm(target))
    expected = root @ np.linalg.inv(np.real(sqrtm(root @ source @ root))) @ root
    ours = transport(torch.eye(6).double(), torch.tensor(source), torch.tensor(target))
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-9)


def test_the_map_keeps_its_digits_in_directions_held_by_little_more_than_the_ridge():
    # Both covariances have the same eigenvectors, so that the map has the square roots of
    # the ratios. The eigenvalues of Lᵀ Σy L span 16 decades: roots taken of them directly
    # would be noise for the weak directions.
    d = 32
    turn = np.linalg.qr(np.random.default_rng(1).standard_normal((d, d)))[0]
    spread, slopes = np.r_[1, np.full(d - 1, 1e-8)], np.linspace(1, 3, d)
    source, target = (turn * spread) @ turn.T, (turn * spread * slopes**2) @ turn.T
    ours = transport(torch.eye(d).double(), torch.tensor(source), torch.tensor(target)).numpy()
    np.testing.assert_allclose(turn.T @ ours @ turn, np.diag(slopes), rtol=0, atol=1e-5)


def test_a_dead_output_direction_is_mapped_to_zero():
    target = torch.diag(torch.tensor([4.0, 0.0])).double()
    mapped = transport(torch.eye(2).double(), torch.eye(2).double(), target)
    torch.testing.assert_close(mapped, torch.diag(torch.tensor([2.0, 0.0])).double())


@pytest.mark.parametrize("entries", [[[1.0, 0.0], [0.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]]])
def test_a_singular_source_is_refused(entries):
    with pytest.raises(Undefined, match="singular"):
        transport(torch.eye(2).double(), torch.tensor(entries).double(), torch.eye(2).double())
