"""Gaussian CKA against kernels by scikit-learn and centring matrices."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import pdist
from sklearn.metrics.pairwise import rbf_kernel
from torch.autograd import gradcheck

from nlbench.errors import Undefined
from nlbench.measures import cka
from nlbench.measures.cka import CKA, linear_cka, rbf_cka

from streams import batches_of, read


def normal(seed, n, d):
    return torch.tensor(np.random.default_rng(seed).standard_normal((n, d)))


def kernel(values, bandwidth, width=None):
    width = bandwidth * np.median(pdist(values)) if width is None else width
    return rbf_kernel(values, gamma=1 / (2 * width**2))


def biased(k, l):  # noqa: E741
    center = np.eye(len(k)) - 1 / len(k)
    return np.trace(k @ center @ l @ center) / (len(k) - 1) ** 2


def unbiased(k, l):  # noqa: E741
    """As the inner product of U-centred matrices (Székely and Rizzo 2014)."""
    n = len(k)

    def u_centered(gram):
        gram = gram - np.diag(np.diag(gram))
        rows = gram.sum(1) / (n - 2)
        gram = gram - rows[:, None] - rows + gram.sum() / ((n - 1) * (n - 2))
        return gram - np.diag(np.diag(gram))

    return (u_centered(k) * u_centered(l)).sum() / (n * (n - 3))


def ratio(hsic, pairs):
    xy, xx, yy = (
        sum(hsic(pair[i], pair[j]) for pair in pairs) for i, j in ((0, 1), (0, 0), (1, 1))
    )
    return xy / math.sqrt(xx * yy)


@pytest.mark.parametrize(("debiased", "hsic"), [(False, biased), (True, unbiased)])
@given(st.integers(0, 999), st.integers(5, 30), st.integers(1, 20), st.floats(0.2, 2.0))
def test_equals_definition_with_scikit_learns_kernels(debiased, hsic, seed, n, d, bandwidth):
    x = normal(seed, n, d)
    # Far from where it saturates, so that no two samples are all but equal.
    y = torch.tanh(x @ normal(seed + 5000, d, 3) / d)
    expected = ratio(hsic, [(kernel(x.numpy(), bandwidth), kernel(y.numpy(), bandwidth))])
    found = rbf_cka(x, y, bandwidth=bandwidth, debiased=debiased).item()
    assert found == pytest.approx(expected, abs=1e-9)
    if not debiased:
        assert -1e-12 <= found <= 1 + 1e-12


@pytest.mark.parametrize(("debiased", "hsic"), [(False, biased), (True, unbiased)])
def test_stream_uses_first_batchs_kernel(debiased, hsic):
    x = normal(1, 30, 4)
    y = torch.relu(x) + 0.1 * x**2
    # Batches of 12, 12 and 6, whose terms have different weights.
    widths = [0.4 * np.median(pdist(v[:12].numpy())) for v in (x, y)]
    pairs = [
        (kernel(a.numpy(), 0, widths[0]), kernel(b.numpy(), 0, widths[1]))
        for a, b in batches_of(x, y, 12)
    ]
    found = read(CKA(kernel="rbf", debiased=debiased), batches_of(x, y, 12)).summary["value"]
    assert found == pytest.approx(ratio(hsic, pairs), abs=1e-9)


@given(st.integers(0, 999), st.integers(-300, 300), st.floats(-50, 50), st.booleans())
def test_rotations_units_and_offsets_do_not_matter(seed, power, shift, debiased):
    x = normal(seed, 12, 4)
    y = torch.relu(x)
    turn = torch.linalg.qr(normal(seed + 1, 4, 4)).Q
    plain = rbf_cka(x, y, debiased=debiased).item()
    moved = rbf_cka((x @ turn + shift) * 2.0**power, y - shift, debiased=debiased).item()
    assert moved == pytest.approx(plain, abs=1e-8)


def test_a_wide_kernel_comes_near_the_linear_one():
    x = normal(2, 40, 5)
    y = torch.relu(x)
    assert rbf_cka(x, y, bandwidth=200).item() == pytest.approx(linear_cka(x, y).item(), abs=1e-3)


@pytest.mark.parametrize("count", [6, 8, 11])
def test_distances_of_equal_samples_are_not_in_median(count):
    x = normal(3, 12, 3)
    x[:count] = x[0]
    y = torch.relu(x)
    matrices = []
    for values in (x.numpy(), y.numpy()):
        distances = pdist(values)
        matrices.append(kernel(values, 0, 0.4 * np.median(distances[distances > 0])))
    assert rbf_cka(x, y).item() == pytest.approx(ratio(biased, [matrices]), abs=1e-9)


def test_gradients_equal_finite_differences_at_fixed_width(monkeypatch):
    kernel = cka._GaussianKernel(unit=1.0, width=1.3)
    monkeypatch.setattr(cka._GaussianKernel, "of", lambda *_: kernel)
    x = normal(4, 6, 2).requires_grad_()
    assert gradcheck(lambda x: rbf_cka(x, torch.tanh(x)), (x,))


@pytest.mark.parametrize("debiased", [False, True])
def test_constant_features_are_undefined(debiased):
    x = normal(5, 9, 2)
    for pair in ((x, torch.full((9, 2), 0.1)), (x * 0, x)):
        with pytest.raises(Undefined):
            rbf_cka(*pair, debiased=debiased)
    value = read(CKA(kernel="rbf", debiased=debiased), [(x, x * 0)]).values[0]
    assert (value.status, value.reason) == ("undefined", "constant output")


def test_small_batches_are_skipped_with_a_remark():
    x = normal(6, 23, 3)
    y = torch.relu(x)
    result = read(CKA(kernel="rbf", debiased=True), batches_of(x, y, 10))
    assert result.values[0].reason == "batches of fewer than 4 samples left out: 1"
    nothing = read(CKA(kernel="rbf"), [(x[:1], y[:1])]).values[0]
    assert (nothing.status, nothing.reason) == ("undefined", "no batch of at least 2 samples")
