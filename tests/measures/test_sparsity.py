"""Fraction of entries near zero, compared with counting them one by one."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import nlbench
from nlbench.measures import sparsity
from nlbench.measures.sparsity import Sparsity, fraction_near_zero

from streams import read

shapes = st.lists(st.integers(1, 5), min_size=2, max_size=5)


def entries(seed, shape):
    r = np.random.default_rng(seed)
    values = r.choice([0.0, 9e-4, -9e-4, 1e-3, -1e-3, 1.1e-3, -1.1e-3, 1.0, -2.0], size=shape)
    return torch.tensor(values)


@given(st.integers(0, 999), shapes)
def test_shares_are_those_of_a_loop_over_entries(seed, shape):
    values = entries(seed, shape)
    expected = [np.mean([abs(v) <= 1e-3 for v in sample.flatten().tolist()]) for sample in values]
    np.testing.assert_allclose(fraction_near_zero(values).numpy(), expected, rtol=1e-6)


@given(st.integers(0, 999), shapes, st.sampled_from([torch.float32, torch.float64]))
def test_numpy_and_pytorch_steps_are_bit_equal(seed, shape, dtype):
    values = entries(seed, shape).to(dtype)
    ours, theirs = sparsity._fraction_by_numpy(values), sparsity._fraction(values)
    assert torch.equal(ours, theirs)
    values.view(-1)[seed % values.numel()] = math.nan if seed % 2 else math.inf
    ours, theirs = sparsity._fraction_by_numpy(values), sparsity._fraction(values)
    assert torch.equal(ours.nan_to_num(-1.0), theirs.nan_to_num(-1.0))
    assert ours.isnan().sum() == 1


@pytest.mark.parametrize(
    ("shape", "limits", "threads"),
    [
        *(((7, 4, 3), {"CPU_CHUNK_ENTRIES": block}, 1) for block in (1, 3, 10**6)),
        ((9, 40), {"CPU_CHUNK_ENTRIES": 80}, 3),
        ((5, 2000), {"MIN_ROW_ENTRIES": 10**6}, 1),
        ((3, 4, 5, 6), {}, 1),
    ],
)
def test_blocks_threads_and_layout_do_not_matter(shape, limits, threads, monkeypatch):
    values = entries(1, shape)
    expected = fraction_near_zero(values)
    for name, limit in limits.items():
        monkeypatch.setattr(sparsity, name, limit)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    layouts = (
        [values, values.to(memory_format=torch.channels_last)] if len(shape) == 4 else [values]
    )
    for layout in layouts:
        assert torch.equal(fraction_near_zero(layout), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_shares_do_not_suffer_from_a_narrow_type(dtype):
    values = torch.zeros(2, 100_000, dtype=dtype)
    values[:, ::4] = 1
    assert fraction_near_zero(values).tolist() == [0.75, 0.75]


def test_value_is_difference_of_zero_fractions():
    x = torch.tensor([[-1.0, -2.0, 3.0, 0.0], [1.0, 2.0, 3.0, 4.0], [-1.0, -1.0, -1.0, -1.0]])
    result = read(Sparsity(), [(x[:1], x[:1].relu()), (x[1:], x[1:].relu())])
    assert result.summary["value"] == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert result.values[0].statistics["before"] == pytest.approx(0.25 / 3)
    assert result.values[0].statistics["after"] == pytest.approx(1.75 / 3)


def test_empty_or_unbatched_tensor_is_refused():
    assert fraction_near_zero(torch.ones(0, 3)).shape == (0,)


@pytest.mark.parametrize("inplace", [False, True])
def test_whole_tensors_are_measured_before_channel_reduction(inplace):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(inplace=inplace))
    images = torch.randn(10, 1, 8, 8)
    with torch.no_grad():
        before = model[0](images)
    expected = (before.clamp(min=0).abs() <= 1e-3).double().mean() - (
        before.abs() <= 1e-3
    ).double().mean()
    result = nlbench.evaluate(model, images, "sparsity", settings={"sites.batch": 4})["sparsity"]
    assert result.summary["value"] == pytest.approx(expected.item(), abs=1e-6)
