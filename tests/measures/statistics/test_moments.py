"""Streamed moments against those of the whole data."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nlbench.errors import NotFinite, RequestError
from nlbench.measures.statistics.moments import Moments, PairsAccumulator, SamplePairs


def pair(seed, n, d=3, k=2, offset=0.0, scale=1.0):
    r = np.random.default_rng(seed)
    x, y = r.standard_normal((n, d)), r.standard_normal((n, k))
    return torch.tensor(scale * x + offset), torch.tensor(scale * (y + x[:, :1]) + offset)


def streamed(x, y, sizes):
    stream = SamplePairs()
    for a, b in zip(x.split(sizes), y.split(sizes), strict=True):
        stream = stream.add_samples(a, b)
    return stream


@given(
    st.integers(0, 999),
    st.lists(st.integers(0, 20), min_size=1, max_size=8),
    st.sampled_from([(0.0, 1.0), (3e4, 1.0), (3e4, 1e-4), (-5.0, 1e-8)]),
)
def test_scatters_are_those_of_numpy_whatever_the_batches(seed, sizes, units):
    sizes = [6, *sizes]
    offset, scale = units
    x, y = pair(seed, sum(sizes), offset=offset, scale=scale)
    moments = streamed(x, y, sizes).moments
    # The data as stored, measured from a point where float64 has digits to spare.
    z = np.concatenate([x, y], 1) - offset
    expected = np.cov(z.T, ddof=0) * len(z)
    tolerance = 1e-9 * np.abs(expected).max()
    of_x, of_y = moments.unit[:3], moments.unit[3:]
    for ours, block in (
        (moments.xx * torch.outer(of_x, of_x), expected[:3, :3]),
        (moments.xy * torch.outer(of_x, of_y), expected[:3, 3:]),
        (moments.yy * torch.outer(of_y, of_y), expected[3:, 3:]),
    ):
        np.testing.assert_allclose(ours.numpy(), block, rtol=0, atol=tolerance)
    mean = moments.mean * moments.unit + (moments.origin - offset)
    np.testing.assert_allclose(mean.numpy(), z.mean(0), rtol=0, atol=1e-12 * scale)
    assert moments.n == len(z)


def test_merging_is_the_same_either_way_round():
    x, y = pair(0, 30)
    origin = torch.zeros(5).double()
    a, b = (Moments.of(x[s], y[s], origin) for s in (slice(0, 7), slice(7, 30)))
    whole = Moments.of(x, y, origin)
    for merged in (a.merged(b), b.merged(a)):
        torch.testing.assert_close(merged.scatter, whole.scatter, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(merged.mean, whole.mean, rtol=1e-12, atol=1e-12)
        assert torch.equal(merged.low, whole.low)
        assert torch.equal(merged.high, whole.high)


def test_constant_column_is_exactly_zero_in_every_scatter():
    x, y = pair(1, 50)
    x[:, 1] = 0.1
    moments = streamed(x, y, 7).moments
    assert moments.varying_x.tolist() == [True, False, True]
    assert moments.varying_y.tolist() == [True, True]
    assert torch.equal(moments.xx[1], torch.zeros(3).double())


def test_column_constant_only_within_batches_varies():
    x, y = pair(2, 40)
    x[:20, 1], x[20:, 1] = 1.0, 2.0
    moments = streamed(x, y, 20).moments
    assert moments.varying_x.tolist() == [True, True, True]
    assert (moments.xx[1, 1] * moments.unit[1] ** 2).item() == pytest.approx(10.0, rel=1e-12)


def test_rows_are_buffered_while_few():
    x, y = pair(3, 20, d=8, k=2)
    stream = streamed(x[:9], y[:9], 4)
    assert stream.moments is None
    rows = stream.rows()
    assert torch.equal(rows[0].values, x[:9])
    assert torch.equal(rows[1].values, y[:9])
    before, stream = stream, stream.add_samples(x[9:], y[9:])
    assert (before.n, before.moments) == (9, None)
    assert stream.moments is not None
    assert stream.moments.n == stream.n == 20


def test_float32_is_accumulated_in_float64():
    x, y = (v.float() for v in pair(4, 100, offset=1000.0))
    moments = streamed(x, y, 10).moments
    expected = np.cov(np.concatenate([x, y], 1).astype(np.float64).T, ddof=0) * 100
    scatter = moments.scatter * torch.outer(moments.unit, moments.unit)
    np.testing.assert_allclose(scatter.numpy(), expected, rtol=1e-9, atol=1e-7)


@pytest.mark.parametrize("power", [-1000, -500, 500, 1000])
def test_power_of_two_scaling_is_exact(power):
    x, y = pair(6, 30)
    plain, other = streamed(x, y, 4).moments, streamed(x * 2.0**power, y, 4).moments
    assert torch.equal(other.scatter, plain.scatter)
    assert torch.equal(other.unit[:3], plain.unit[:3] * 2.0**power)
    assert torch.equal(other.unit[3:], plain.unit[3:])
    assert other.varying_x.all()


def test_small_column_next_to_large_keeps_its_scatter():
    x, y = pair(7, 30)
    small = x * torch.tensor([1.0, 2.0**-700, 2.0**600], dtype=torch.float64)
    plain, other = streamed(x, y, 4).moments, streamed(small, y, 4).moments
    assert torch.equal(other.scatter, plain.scatter)
    common = other.unify_units()
    assert len(common.unit[:3].unique()) == len(common.unit[3:].unique()) == 1
    assert torch.equal(common.xx[2, 2], plain.xx[2, 2])


@pytest.mark.parametrize("batch", [3, 20])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("first", [True, False])
def test_coarsest_rounding_of_each_side_is_used(batch, side, first):
    stream = SamplePairs()
    for is_coarse in (first, not first):
        samples = list(pair(8, batch))
        if is_coarse:
            samples[side] = samples[side].float()
        stream = stream.add_samples(*samples)
    rounding = [2.0**-52] * 2
    rounding[side] = 2.0**-23
    assert stream.moments.rounding == tuple(rounding)


def test_an_accumulator_has_the_samples_of_all_batches():
    x, y = pair(9, 12)
    counting = type("Counting", (PairsAccumulator,), {"statistics": lambda self: {}})
    accumulator = counting()
    assert accumulator.pairs.n == 0
    accumulator.add(x[:5], y[:5])
    accumulator.add(x[5:], y[5:])
    expected = streamed(x, y, [5, 7]).moments
    assert accumulator.pairs.n == 12
    assert torch.equal(accumulator.pairs.moments.scatter, expected.scatter)


def test_a_range_beyond_float64_is_refused():
    with pytest.raises(NotFinite):
        streamed(
            torch.tensor([[-1.7e308], [1.7e308], [0.0]], dtype=torch.float64), torch.zeros(3, 1), 3
        )


def test_mismatched_batch_raises():
    x, y = pair(5, 10)
    stream = streamed(x, y, 5)
    with pytest.raises(RequestError):
        stream.add_samples(x[:, :2], y)
    with pytest.raises(RequestError):
        stream.add_samples(x, y[:9])
    with pytest.raises(NotFinite):
        stream.add_samples(x / 0, y)
    assert stream.n == 10
