"""Linear CKA against centring matrices, its debiased form against U-centring."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from nlbench.errors import Undefined
from nlbench.measure.contract import validated_result
from nlbench.measures import cka
from nlbench.measures.cka import CKA, linear_cka

import published
from streams import batches_of, read


def normal(seed, n, d):
    r = np.random.default_rng(seed)
    return torch.tensor(r.standard_normal((n, d)) + 0.5)


def naive_cka(x, y):
    """tr(K H L H) and so on, with the centring matrix H written out."""
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    n = len(x)
    center = np.eye(n) - 1 / n
    k, l = (center @ v @ v.T @ center for v in (x, y))  # noqa: E741
    return np.trace(k @ l) / math.sqrt(np.trace(k @ k) * np.trace(l @ l))


def test_independent_samples_are_within_the_bounds():
    result = read(CKA(), [(normal(0, 500, 2), normal(1, 500, 3))])
    assert result.summary["value"] < 0.02
    for options in ({}, {"debiased": True}, {"kernel": "rbf"}):
        measure = CKA(**options)
        result = read(measure, [(normal(0, 60, 2), normal(1, 60, 3))])
        assert validated_result(result, measure.bounds_of(measure.settings)) is result


def u_hsic(x, y):
    """Unbiased HSIC as the inner product of U-centred matrices (Székely and Rizzo 2014)."""
    n = len(x)

    def u_centered(v):
        gram = np.asarray(v) @ np.asarray(v).T
        np.fill_diagonal(gram, 0)
        rows = gram.sum(1) / (n - 2)
        gram = gram - rows[:, None] - rows + gram.sum() / ((n - 1) * (n - 2))
        np.fill_diagonal(gram, 0)
        return gram

    return (u_centered(x) * u_centered(y)).sum() / (n * (n - 3))


def naive_debiased(batches):
    xy, xx, yy = (sum(u_hsic(b[i], b[j]) for b in batches) for i, j in ((0, 1), (0, 0), (1, 1)))
    return xy / math.sqrt(xx * yy)


def result(batches, **settings):
    return read(CKA(**settings), batches)


@pytest.mark.parametrize("case", published.CASES, ids=published.IDS)
def test_the_reference_values_are_met(case):
    x, y = published.samples(case)
    assert linear_cka(x, y).item() == pytest.approx(case["linear_cka"], abs=1e-5)
    streamed = result(batches_of(x, y, 50)).summary["value"]
    assert streamed == pytest.approx(case["linear_cka"], abs=1e-5)


@given(st.integers(0, 999), st.integers(2, 40), st.integers(1, 40), st.integers(1, 40))
def test_both_forms_are_the_definition_with_centring_matrices(seed, n, d, k):
    x, y = normal(seed, n, d), torch.relu(normal(seed, n, d) @ normal(seed + 5000, d, k))
    assume(y.std(0).max() > 0)
    ours = linear_cka(x, y).item()
    assert ours == pytest.approx(naive_cka(x, y), abs=1e-9)
    assert -1e-12 <= ours <= 1 + 1e-12


@given(st.integers(0, 999), st.integers(5, 40), st.integers(1, 40), st.integers(1, 40))
def test_debiased_value_is_that_of_u_centred_matrices(seed, n, d, k):
    x = normal(seed, n, d)
    y = x @ normal(seed + 5000, d, k) + normal(seed + 6000, n, k) ** 2
    assert linear_cka(x, y, debiased=True).item() == pytest.approx(
        naive_debiased([(x, y)]), rel=1e-9, abs=1e-9
    )


@given(st.integers(0, 999), st.integers(5, 30), st.integers(1, 20), st.booleans())
def test_rotations_units_and_offsets_do_not_matter(seed, n, d, debiased):
    x, y = normal(seed, n, d), torch.relu(normal(seed, n, d)) + 0.1 * normal(seed + 5000, n, d)
    turn = torch.linalg.qr(normal(seed + 6000, d, d)).Q
    plain = linear_cka(x, y, debiased=debiased).item()
    other = linear_cka(1e8 * (x @ turn + 5), 1e-8 * (y - 3), debiased=debiased).item()
    assert other == pytest.approx(plain, abs=1e-7)
    assert linear_cka(y, x, debiased=debiased).item() == pytest.approx(plain, abs=1e-12)


@pytest.mark.parametrize("debiased", [False, True])
@pytest.mark.parametrize("size", [5, 40])
@pytest.mark.parametrize("scale", [1e-300, 1e-150, 1e-90, 1e90, 1e150, 1e300])
def test_extreme_scales_do_not_change_a_stream(scale, size, debiased):
    x = normal(0, 40, 3)
    y = torch.relu(x)
    plain = result(batches_of(x, y, size), debiased=debiased).summary["value"]
    for a, b in ((scale * x, y), (x, scale * y), (scale * x, scale * y)):
        found = result(batches_of(a, b, size), debiased=debiased)
        assert found.summary["value"] == pytest.approx(plain, abs=1e-12)
        if not debiased or size == 40:
            whole = linear_cka(a, b, debiased=debiased).item()
            assert found.summary["value"] == pytest.approx(whole, abs=1e-12)


@pytest.mark.parametrize("debiased", [False, True])
def test_largest_scale_dominates_batches(debiased):
    x = normal(0, 30, 3)
    x[:10] *= 1e-200
    x[20:] *= 1e150
    y = torch.relu(x)
    found = result(batches_of(x, y, 10), debiased=debiased).summary["value"]
    x[:20], y[:20] = 0, 0
    assert found == pytest.approx(
        result(batches_of(x, y, 10), debiased=debiased).summary["value"], abs=1e-12
    )


def test_float32_features_with_an_offset_keep_their_digits():
    x = (normal(1, 300, 8) + 1000).float()
    y = torch.relu(x - 1000)
    assert linear_cka(x, y).item() == pytest.approx(naive_cka(x.double() - 1000, y), abs=1e-10)


def test_unrelated_wide_features_are_alike_only_with_bias():
    x, y = normal(2, 30, 3000), normal(3, 30, 3000)
    assert linear_cka(x, y).item() > 0.9
    assert abs(linear_cka(x, y, debiased=True).item()) < 0.1


def test_the_debiased_value_can_be_negative():
    values = [linear_cka(normal(s, 8, 3), normal(s + 50, 8, 3), debiased=True) for s in range(20)]
    assert min(values) < 0


@pytest.mark.parametrize("size", [5, 16, 40])
def test_debiased_stream_takes_the_ratio_of_sums_last(size):
    x = normal(4, 80, 6)
    y = torch.relu(x)
    found = result(batches_of(x, y, size), debiased=True)
    assert found.summary["value"] == pytest.approx(naive_debiased(batches_of(x, y, size)), abs=1e-9)
    assert found.values[0].reason == ""


def test_debiased_value_skips_batches_below_four_samples():
    x = normal(5, 35, 6)
    y = torch.relu(x)
    found = result(batches_of(x, y, 16), debiased="true")
    expected = naive_debiased(batches_of(x, y, 16)[:2])
    assert found.summary["value"] == pytest.approx(expected, abs=1e-9)
    assert found.values[0].reason == "batches of fewer than 4 samples left out: 1"
    few = result(batches_of(x, y, 3), debiased=True)
    assert (few.status, few.reason) == ("undefined", "no batch of at least 4 samples")


@pytest.mark.parametrize("debiased", [False, True])
@pytest.mark.parametrize("value", [0.0, 0.1, -3e8])
def test_constant_features_are_undefined_not_nan(value, debiased):
    x = normal(6, 30, 3)
    flat = torch.full((30, 3), value, dtype=torch.float64)
    for size in (7, 30):
        for a, b, role in ((x, flat, "output"), (flat, x, "input")):
            with pytest.raises(Undefined):
                linear_cka(a, b, debiased=debiased)
            found = result(batches_of(a, b, size), debiased=debiased)
            assert (found.status, found.reason) == ("undefined", f"constant {role}")


def test_an_unbiased_norm_that_is_rounding_is_undefined():
    # One active sample: every off-diagonal entry of the Gram matrix is zero, and what the
    # sums leave after cancelling is noise that a ratio would turn into a score.
    y = torch.zeros(20, 3).double()
    y[4] = torch.tensor([0.3, 1.7, 0.9])
    x = normal(7, 20, 3)
    with pytest.raises(Undefined):
        linear_cka(x, y, debiased=True)
    assert result([(x, y)], debiased=True).status == "undefined"
    assert linear_cka(x, y).item() == pytest.approx(naive_cka(x, y), abs=1e-12)


@pytest.mark.parametrize(("n", "debiased"), [(0, False), (1, False), (3, True)])
def test_too_few_samples_are_undefined(n, debiased):
    with pytest.raises(Undefined):
        linear_cka(torch.ones(n, 2), torch.ones(n, 2), debiased=debiased)
    assert result([(torch.ones(n, 2), torch.ones(n, 2))], debiased=debiased).status == "undefined"


@pytest.mark.parametrize("debiased", [False, True])
@pytest.mark.parametrize(("n", "d"), [(12, 2), (6, 9)])
def test_gradients_are_those_of_finite_differences(n, d, debiased):
    x, y = normal(8, n, d).requires_grad_(), normal(9, n, d).requires_grad_()
    assert gradcheck(lambda x, y: linear_cka(x, y, debiased=debiased), (x, y))


def test_terms_scale_with_their_units():
    terms = cka._HSICTerms(*(torch.tensor(v) for v in (3.0, 4.0, 5.0, 6.0, 7.0)), 1.0, 2.0)
    moved = terms.convert_units(2.0, 8.0)
    # Squares of x in its new unit are 1/4 of the old ones, those of y 1/16.
    expected = cka._HSICTerms(
        *(torch.tensor(v) for v in (3 / 64, 4 / 16, 5 / 256, 6 / 16, 7 / 256)), 2.0, 8.0
    )
    assert moved == expected


@pytest.mark.parametrize("settings", [{}, {"debiased": True}, {"kernel": "rbf"}], ids=str)
def test_spread_below_rounding_of_the_type_is_constant(settings):
    x = 1e-7 * torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    value = read(CKA(**settings), [(x, torch.sigmoid(x))])
    assert value.status == "undefined"
    assert value.reason.startswith("constant output")
    wide = read(CKA(**settings), [(x.double(), torch.sigmoid(x.double()))])
    assert wide.summary["value"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("offset", [0.0, 1.0, 1e3, 1e6])
def test_offsets_do_not_show_with_few_samples(offset):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(20, 90, generator=generator, dtype=torch.float64)
    y = x.relu()
    expected = linear_cka(x, y).item()
    assert linear_cka(x + offset, y - offset).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("unit", [2.0**-400, 2.0**-100, 2.0**100, 2.0**400])
def test_units_do_not_overflow_with_few_samples(unit):
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(20, 90, generator=generator, dtype=torch.float64)
    expected = linear_cka(x, x.abs()).item()
    assert linear_cka(x * unit, x.abs() / unit).item() == pytest.approx(expected, rel=1e-12)
