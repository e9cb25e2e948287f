"""Checks and scalings that all site measures share."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nlbench.errors import NotFinite, RequestError, Undefined
from nlbench.measures.statistics.prepared import prepare_samples
from nlbench.measures.statistics.samples import (
    as_samples,
    centered,
    check_count,
    power_of_two,
    varying_columns,
)


@given(st.floats(-1e300, 1e300, allow_subnormal=False), st.integers(2, 50))
def test_constant_column_is_centred_to_zero(value, n):
    column = torch.full((n, 1), value, dtype=torch.float64)
    assert torch.equal(centered(column), torch.zeros(n, 1).double())
    assert not varying_columns(column).any()


@pytest.mark.parametrize("offset", [0.0, 1.0, 3e4])
def test_centring_keeps_digits_of_small_spread_on_offset(offset):
    steps = torch.arange(-8, 9, dtype=torch.float64)[:, None] * 2.0**-30
    torch.testing.assert_close(centered(steps + offset), steps, rtol=1e-14, atol=0)


def test_column_varies_beyond_rounding():
    one = torch.ones(3, 4).double()
    one[1, 0] += 1e-15
    one[1, 1] += 1e-14
    one[:, 2] = torch.tensor([0.0, 1e-300, 0.0], dtype=torch.float64)
    assert varying_columns(one).tolist() == [False, True, True, False]


@given(st.floats(1e-320, 1e308), st.floats(-1, 1))
def test_samples_are_scaled_by_power_of_two(peak, share):
    values = torch.tensor([[peak], [share * peak]], dtype=torch.float64)
    scaled = values / power_of_two(values)
    assert 1 <= scaled[0, 0].item() < 2
    ratio = math.frexp(peak / scaled[0, 0].item())[0]
    assert ratio == 0.5


def test_a_range_beyond_float64_is_refused():
    with pytest.raises(NotFinite):
        power_of_two(centered(torch.tensor([[-1.7e308], [1.7e308]]).double()))


def test_gradients_pass_the_conversion():
    x = torch.ones(3, 2, requires_grad=True)
    as_samples(x, "x").sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 2))


def test_a_single_sample_is_centred_to_zero():
    assert torch.equal(centered(torch.full((1, 3), 7.0)), torch.zeros(1, 3))


@pytest.mark.parametrize(("n", "m", "error"), [(3, 4, RequestError), (1, 1, Undefined)])
def test_both_sides_need_as_many_samples(n, m, error):
    with pytest.raises(error):
        check_count(torch.zeros(n, 2), torch.zeros(m, 2))
    assert check_count(torch.zeros(n, 1), torch.zeros(n, 2), at_least=n) == n


@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [(torch.float64, 2.0**-52), (torch.float32, 2.0**-23), (torch.bfloat16, 2.0**-23),
     (torch.float16, 2.0**-23), (torch.int64, 2.0**-52), (torch.bool, 2.0**-52)],
)  # fmt: skip
def test_samples_know_the_spacing_of_their_type(dtype, rounding):
    samples = prepare_samples(torch.ones(4, 2, dtype=dtype), "x")
    assert (samples.rounding, samples.values.dtype) == (rounding, torch.float64)
    assert prepare_samples(samples, "x") is samples
