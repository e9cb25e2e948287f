import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nlbench.probes.lines.rules.maxima import (
    overtakes,
    pooling_windows,
    window_overtakes,
    window_tops,
)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.booleans())
def test_an_envelope_bends_where_the_largest_line_changes(seed, lines, ties):
    torch.manual_seed(seed)
    left, right = torch.randn(2, 5, lines, dtype=torch.float64)
    if ties:
        left, right = left.round(), right.round()
    top = (left == left.amax(1, keepdim=True), right == right.amax(1, keepdim=True))
    share, row = overtakes(left, right, *top)
    for envelope in range(5):
        # By brute force: every meeting of two lines at which both are the largest, while
        # none is the largest on both sides.
        expected = set()
        for i in range(lines):
            for j in range(lines):
                a, b = left[envelope], right[envelope]
                rise = (b[i] - a[i]) - (b[j] - a[j])
                if rise <= 0 or a[i] >= a[j]:
                    continue
                t = (a[j] - a[i]) / rise
                height = torch.lerp(a[i], b[i], t)
                if t < 1 - 1e-12 and height >= torch.lerp(a, b, t).max() - 1e-12:
                    expected.add(round(float(t), 9))
        found = {round(float(t), 9) for t in share[row == envelope] if 1e-12 < t < 1 - 1e-12}
        assert found == expected


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool1d(3, 2, 1),
        nn.MaxPool1d(2, ceil_mode=True),
        nn.MaxPool2d((2, 3), (1, 2), (1, 0), (2, 1)),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.MaxPool3d(2, 1),
        nn.AdaptiveMaxPool1d(3),
        nn.AdaptiveMaxPool2d((3, 2)),
        nn.AdaptiveMaxPool3d(2),
    ],
)
def test_pooling_windows_have_the_maxima_of_pooling(pool):
    kind = type(pool).__name__
    axes = int(kind[-2])
    torch.manual_seed(0)
    x = torch.randn(4, 2, *range(7, 7 + axes))
    expected = pool(x)
    if kind.startswith("Adaptive"):
        name, args, kwargs = f"adaptive_max_pool{axes}d", (None, pool.output_size), {}
    else:
        name, args = f"max_pool{axes}d", (None, pool.kernel_size, pool.stride)
        kwargs = {"padding": pool.padding, "dilation": pool.dilation}
    windows = pooling_windows(name, args, kwargs, x.shape[2:], expected.shape[2:])
    assert torch.equal(x.flatten(2)[..., windows].amax(-1), expected.flatten(2))


def test_a_member_far_below_the_others_does_not_blur_them():
    x = torch.tensor([[[1.0, 0.0, -1e30]], [[0.0, 1.0, -1e30]]], dtype=torch.float64)
    windows, noise = torch.tensor([[0, 1, 2]]), 1e-15 * x.abs()
    interval, share = window_overtakes(x, windows, noise)
    assert (interval.tolist(), share.tolist()) == ([0], [0.5])
    assert window_tops(x, windows, x.abs()).tolist() == [[[1.0]], [[1.0]]]
