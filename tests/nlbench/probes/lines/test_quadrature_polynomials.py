import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.polynomial import chebyshev, polynomial

from nlbench.probes.lines.quadrature import (
    DEGREE,
    NODES,
    coefficients,
    evaluate,
    integrate_parts,
    tail,
)


def interpolated(*functions):
    values = np.stack([function(NODES) for function in functions], 1)
    return coefficients(values[None])


def by_roots(c):
    """Return areas and variation of a polynomial, from its roots and those of its derivative."""
    power = chebyshev.cheb2poly(c)

    def between(roots):
        real = roots[np.abs(roots.imag) < 1e-9].real
        return np.concatenate([[-1], np.sort(real[np.abs(real) < 1]), [1]])

    areas = np.diff(polynomial.polyval(between(polynomial.polyroots(power)), chebyshev_int(power)))
    turns = between(polynomial.polyroots(polynomial.polyder(power)))
    variation = np.abs(np.diff(polynomial.polyval(turns, power))).sum()
    return areas[areas > 0].sum(), -areas[areas < 0].sum(), variation


def chebyshev_int(power):
    return polynomial.polyint(power)


@given(st.integers(0, 10**6))
def test_a_polynomial_of_degree_16_is_reproduced(seed):
    c = np.random.default_rng(seed).normal(size=DEGREE + 1)
    fitted = interpolated(lambda x: chebyshev.chebval(x, c))
    np.testing.assert_allclose(fitted[:, 0, 0], c, atol=1e-13)
    assert evaluate(fitted, 0.31)[0, 0] == pytest.approx(chebyshev.chebval(0.31, c), abs=1e-12)


@given(st.integers(0, 10**6), st.integers(1, 8))
@settings(max_examples=100)
def test_parts_are_those_between_the_roots(seed, degree):
    random = np.random.default_rng(seed)
    c = np.zeros((DEGREE + 1, 2, 3))
    c[: degree + 1] = random.normal(size=(degree + 1, 2, 3))
    parts = integrate_parts(c)
    for i, j in np.ndindex(2, 3):
        above, below, variation = by_roots(c[: degree + 1, i, j])
        assert parts.above[i, j] == pytest.approx(above, abs=1e-9)
        assert parts.below[i, j] == pytest.approx(below, abs=1e-9)
        assert parts.variation[i, j] == pytest.approx(variation, rel=1e-9)


def test_parts_do_not_depend_on_the_block_size():
    c = (
        np.random.default_rng(0).normal(size=(DEGREE + 1, 70, 300))
        * 0.5 ** np.arange(17)[:, None, None]
    )
    together = integrate_parts(c)
    alone = integrate_parts(c[:, 42:43])
    np.testing.assert_array_equal(together.above[42], alone.above[0])
    np.testing.assert_array_equal(together.variation[42], alone.variation[0])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: np.exp(2 * x),
        lambda x: np.sin(9 * x),
        lambda x: 1 / (1 + 25 * x**2),
        lambda x: np.abs(x - 0.21),
        lambda x: np.maximum(x, 0.4),
        lambda x: np.sqrt(1.001 + x),
        lambda x: np.tanh(40 * (x - 0.3)),
    ],
)
def test_tail_bounds_the_interpolation_error(function):
    c = interpolated(function)
    x = np.linspace(-1, 1, 20001)
    error = np.abs(function(x) - chebyshev.chebval(x, c[:, 0, 0])).mean()
    assert error <= tail(c)[0, 0] + 1e-15
