import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nlbench.probes.lines.rules.pieces import unit_crossings
from nlbench.probes.lines.rules.rounding import channel_squares, peak, squared_errors


@settings(max_examples=100)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(1, 17), st.integers(1, 3))
def test_sign_changes_are_found(seed, points, units, other):
    torch.manual_seed(seed)
    # Not contiguous, and rounded to integers so that some are zero.
    margin = torch.randn(units, points, other, dtype=torch.float64).mul(2).round().transpose(0, 1)
    noise = torch.full((points, 1, 1), 0.5, dtype=torch.float64)
    interval, _, fraction = unit_crossings(margin, noise)
    expected = []
    for i in range(points - 1):
        for a, b in zip(
            margin[i].flatten().tolist(), margin[i + 1].flatten().tolist(), strict=True
        ):
            if a * b < 0:
                expected.append((i, a / (a - b)))
    assert list(zip(interval.tolist(), fraction.tolist(), strict=True)) == expected


@pytest.mark.parametrize(
    "shape", [(6, 4, 3), (6, 4, 1), (6, 1, 3), (6, 1, 1), (1, 4, 1), (1, 1, 1)]
)
def test_shared_noise_equals_expanded_noise(shape):
    torch.manual_seed(0)
    margin, noise = torch.randn(6, 4, 3), 2 * torch.rand(shape)
    shared = unit_crossings(margin, noise)
    alone = unit_crossings(margin, noise.expand_as(margin).contiguous())
    assert 0 < len(shared[0]) < len(unit_crossings(margin, torch.zeros_like(noise))[0])
    assert torch.equal(shared[0], alone[0])
    assert torch.equal(shared[2], alone[2])


def test_peaks_are_largest_magnitudes_by_point():
    x = torch.tensor([[[1.0, -3.0]], [[2.0, 0.5]]])
    assert peak(x).tolist() == [[[3.0]], [[2.0]]]
    assert math.isnan(peak(torch.tensor([[1.0, math.nan]])))
    assert peak(torch.zeros(2, 0)).tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1e-40, 1e-30, 1e30])
def test_zeros_have_no_error(dtype, scale):
    x = torch.tensor([[0.0, 1.0, 2.0]], dtype=dtype) * scale
    bound = torch.tensor([[1e30, 1.0, 1.0]], dtype=dtype) * min(scale, 1.0)
    plain = scale * math.sqrt((1 + 4) / 4 + (2 if scale <= 1 else 0))
    squares, size = squared_errors(x, bound, 1)
    assert float((squares.sum().sqrt() * size).item()) == pytest.approx(plain, rel=1e-3)
    # Channels whose positions have equal values.
    wide = x[..., None].expand(1, 3, 5).contiguous()
    squares, size = channel_squares(wide, bound[..., None], 1, 1)
    assert float((squares.sum().sqrt() * size).item()) == pytest.approx(plain, rel=1e-3)
