"""Eigenvectors by larger groups of reflectors, against the definition and NumPy's."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy.linalg import block_diag

from nlbench.measures.linear_algebra import eigenpairs as eigen
from nlbench.measures.linear_algebra.eigenpairs import (
    MIN_GROUPED_ROWS,
    REFLECTORS_PER_GROUP,
    eigenpairs,
)


@pytest.fixture(scope="module", autouse=True)
def grouped():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eigen, "MIN_GROUPED_ROWS", REFLECTORS_PER_GROUP + 1)
        yield


def symmetric(seed, size):
    square = np.random.default_rng(seed).standard_normal((size, size))
    return square + square.T


def check(matrix):
    values, vectors = eigenpairs(np.array(np.tril(matrix), order="F"))
    scale = np.abs(matrix).max()
    assert_allclose(values, np.linalg.eigvalsh(matrix), rtol=0, atol=1e-12 * len(matrix) * scale)
    assert_allclose(vectors.T @ vectors, np.eye(len(matrix)), rtol=0, atol=1e-12)
    assert_allclose(matrix @ vectors, vectors * values, rtol=0, atol=1e-12 * len(matrix) * scale)


@settings(max_examples=10)
@given(st.integers(0, 999), st.integers(1, 3 * REFLECTORS_PER_GROUP + 2), st.floats(1e-6, 1e6))
def test_eigenpairs_of_any_size_and_scale_meet_definition(seed, size, scale):
    check(scale * symmetric(seed, size))


@pytest.mark.parametrize("size", [MIN_GROUPED_ROWS - 1, MIN_GROUPED_ROWS])
def test_eigenpairs_of_large_matrices_meet_the_definition(size, monkeypatch):
    monkeypatch.setattr(eigen, "MIN_GROUPED_ROWS", MIN_GROUPED_ROWS)
    check(symmetric(1, size))


@pytest.mark.parametrize(
    "matrix",
    [
        np.diag(np.arange(100.0)),
        np.eye(100),
        np.zeros((100, 100)),
        block_diag(symmetric(2, 40), np.eye(30), symmetric(3, 60)),
        np.outer(np.arange(90.0), np.arange(90.0)),
    ],
    ids=["diagonal", "identity", "zero", "in blocks", "of rank one"],
)
def test_trivial_reflectors_and_repeated_eigenvalues_are_handled(matrix):
    check(matrix)


def test_scipy_without_tridiagonal_routine_suffices(monkeypatch):
    monkeypatch.delattr(eigen.lapack, "dstevd", raising=False)
    check(symmetric(4, 100))


def test_missing_convergence_is_an_error(monkeypatch):
    monkeypatch.setattr(eigen.lapack, "dstevd", lambda d, e: (d, np.eye(len(d)), 1), raising=False)
    with pytest.raises(ArithmeticError):
        eigenpairs(np.asfortranarray(symmetric(5, 100)))
