"""The routines called without Python's lock give SciPy's numbers to the last bit."""

import numpy as np
import pytest
from scipy.linalg import blas, lapack

from nlbench.measures import _lapack


@pytest.fixture(params=["by pointer", "by SciPy"])
def way(request, monkeypatch):
    assert _lapack._routine("dsyevd") is not None
    if request.param == "by SciPy":
        monkeypatch.setattr(_lapack, "_routine", lambda name: None)


def definite(r, seed=0):
    rows = np.random.default_rng(seed).standard_normal((2 * r, r))
    return np.asfortranarray(rows.T @ rows)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("r", [1, 2, 7, 64, 130])
def test_the_numbers_are_scipys_to_the_last_bit(r):
    matrix, other = definite(r), definite(r, 1)
    factor, status = _lapack.cholesky(matrix)
    assert status == 0
    assert np.array_equal(factor, lapack.dpotrf(matrix, lower=1, clean=1)[0])
    reduced = _lapack.reduced_pencil(other, factor)
    assert np.array_equal(reduced, lapack.dsygst(other, factor, itype=2, lower=1)[0])
    solved = _lapack.solved_transposed(factor, other)
    assert np.array_equal(solved, blas.dtrsm(1.0, factor, other, lower=1, trans_a=1))
    values, vectors, failed = _lapack.eigenpairs_of(reduced.copy(order="F"))
    expected = lapack.dsyevd(reduced, lower=1)
    assert failed == 0
    assert np.array_equal(values, expected[0])
    assert np.array_equal(vectors, expected[1])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (3, 5), (70, 40), (4, 0)])
@pytest.mark.parametrize("order", ["C", "F", "neither"])
def test_products_of_rows_are_scipys_to_the_last_bit_in_either_order(shape, order):
    made = np.random.default_rng(2).standard_normal((2 * shape[0], shape[1]))
    array = made[::2] if order == "neither" else np.array(made[: shape[0]], order=order)
    found = _lapack.row_products(array)
    if array.flags.f_contiguous:
        expected = blas.dsyrk(1.0, array, lower=1)
    else:
        expected = blas.dsyrk(1.0, array.T, trans=1, lower=1)
    assert np.array_equal(found, expected)


@pytest.mark.usefixtures("way")
def test_a_matrix_that_is_not_definite_has_a_status():
    assert _lapack.cholesky(np.asfortranarray([[1.0, 0.0], [0.0, -1.0]]))[1] == 2


@pytest.mark.usefixtures("way")
def test_what_is_given_is_left_alone():
    matrix, other = definite(5), definite(5, 1)
    before = matrix.copy(), other.copy()
    factor, _ = _lapack.cholesky(matrix)
    kept = factor.copy()
    _lapack.reduced_pencil(other, factor)
    _lapack.solved_transposed(factor, other)
    _lapack.row_products(other)
    assert np.array_equal(matrix, before[0])
    assert np.array_equal(other, before[1])
    assert np.array_equal(factor, kept)
