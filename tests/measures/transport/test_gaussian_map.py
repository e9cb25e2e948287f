"""The optimal transport map against SciPy's matrix roots, by either library."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import sqrtm
from torch.autograd import gradcheck

from nlbench.errors import Undefined
from nlbench.measures.statistics.samples import centered
from nlbench.measures.transport import gaussian_map
from nlbench.measures.transport.gaussian_map import optimal_map


@pytest.fixture(autouse=True, params=[True, False], ids=["one core", "several"])
def library(request, monkeypatch):
    monkeypatch.setattr(gaussian_map, "uses_one_core", lambda values: request.param)


def normal(seed, n, d):
    r = np.random.default_rng(seed)
    mixed = r.standard_normal((n, d)) @ r.standard_normal((d, d)) / np.sqrt(d)
    return centered(torch.tensor(mixed))


@given(st.integers(0, 999), st.integers(1, 12))
def test_map_is_positive_definite_and_transports_covariance(seed, d):
    source, target = (np.cov(normal(seed + k, 60, d).numpy().T).reshape(d, d) for k in (0, 5000))
    matrix = optimal_map(torch.tensor(source), torch.tensor(target)).numpy()
    scale = np.abs(matrix).max()
    np.testing.assert_allclose(matrix / scale, matrix.T / scale, atol=1e-9)
    assert np.linalg.eigvalsh(matrix).min() > 0
    # Rounding of the product grows with the factors, which are large for a nearly singular source.
    size = max(np.abs(target).max(), scale**2 * np.abs(source).max())
    np.testing.assert_allclose(matrix @ source @ matrix, target, rtol=0, atol=1e-10 * size)


def test_the_map_is_the_papers_formula():
    source, target = (np.cov(normal(k, 60, 6).numpy().T) for k in (8, 9))
    root = np.real(sqrtm(target))
    expected = root @ np.linalg.inv(np.real(sqrtm(root @ source @ root))) @ root
    ours = optimal_map(torch.tensor(source), torch.tensor(target))
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-9)


def test_map_keeps_digits_in_directions_near_the_ridge():
    # Both covariances have the same eigenvectors, so that the map has the square roots of
    # the ratios. The eigenvalues of Lᵀ Σy L span 16 decades: roots taken of them directly
    # would be noise for the weak directions.
    d = 32
    turn = np.linalg.qr(np.random.default_rng(1).standard_normal((d, d)))[0]
    spread, slopes = np.r_[1, np.full(d - 1, 1e-8)], np.linspace(1, 3, d)
    source, target = (turn * spread) @ turn.T, (turn * spread * slopes**2) @ turn.T
    ours = optimal_map(torch.tensor(source), torch.tensor(target)).numpy()
    np.testing.assert_allclose(turn.T @ ours @ turn, np.diag(slopes), rtol=0, atol=1e-5)


def test_a_dead_output_direction_is_mapped_to_zero():
    target = torch.diag(torch.tensor([4.0, 0.0])).double()
    mapped = optimal_map(torch.eye(2).double(), target)
    torch.testing.assert_close(mapped, torch.diag(torch.tensor([2.0, 0.0])).double())


@pytest.mark.parametrize("entries", [[[1.0, 0.0], [0.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]]])
def test_a_singular_source_is_refused(entries):
    with pytest.raises(Undefined):
        optimal_map(torch.tensor(entries).double(), torch.eye(2).double())


@pytest.mark.parametrize("weak", [1.0, 0.0])
def test_gradients_are_those_of_finite_differences(weak):
    source = torch.tensor(np.cov(normal(1, 30, 4).numpy().T))
    directions = torch.tensor(np.cov(normal(2, 30, 4).numpy().T))
    directions[0] = directions[:, 0] = 0
    directions[0, 0] = weak

    def symmetric_map(source, target):
        return optimal_map((source + source.T) / 2, (target + target.T) / 2)

    assert gradcheck(symmetric_map, (source.requires_grad_(), directions), atol=1e-4)
    if weak:
        assert gradcheck(symmetric_map, (source, directions.requires_grad_()), atol=1e-4)
