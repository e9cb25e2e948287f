"""Affine maps against least squares of NumPy and closed forms."""

import math

import numpy as np
import pytest
import torch

from nlbench.errors import NotFinite, Undefined
from nlbench.probes.replacement.fits import AffineFit, copy_to_rows


def fitted(x, y, *, is_full=False, parts=3):
    fit = AffineFit(is_full)
    for a, b in zip(torch.chunk(x, parts), torch.chunk(y, parts), strict=True):
        fit.add(a, b)
    return fit


def test_channel_slope_and_intercept_equal_polyfit():
    x = torch.randn(200, 4) * torch.tensor([1.0, 10, 0.1, 3]) + 100
    y = torch.relu(x - 101)
    affine = fitted(x, y).per_channel()
    for channel in range(4):
        slope, intercept = np.polyfit(x[:, channel].double(), y[:, channel].double(), 1)
        assert affine.weight[channel].item() == pytest.approx(slope, rel=1e-8)
        assert affine.bias[channel].item() == pytest.approx(intercept, rel=1e-8)


def test_full_map_is_that_of_lstsq():
    x, y = torch.randn(300, 5).double(), torch.randn(300, 7).double()
    y = y + x @ torch.randn(5, 7).double()
    affine = fitted(x, y, is_full=True).full()
    design = np.column_stack([x.numpy(), np.ones(300)])
    expected = np.linalg.lstsq(design, y.numpy(), rcond=None)[0]
    np.testing.assert_allclose(affine.weight, expected[:-1], atol=1e-12)
    np.testing.assert_allclose(affine.bias, expected[-1], atol=1e-12)


def test_relu_of_a_normal_has_slope_one_half():
    x = torch.randn(400_000, 1, generator=torch.Generator().manual_seed(0))
    affine = fitted(x, x.relu()).per_channel()
    assert affine.weight.item() == pytest.approx(0.5, abs=5e-3)
    assert affine.bias.item() == pytest.approx(1 / math.sqrt(2 * math.pi), abs=5e-3)


def test_slope_does_not_depend_on_full_moments():
    x = torch.randn(50, 3)
    few, many = fitted(x, x.relu()), fitted(x, x.relu(), is_full=True)
    torch.testing.assert_close(few.per_channel().weight, many.per_channel().weight)


def test_constant_channel_has_slope_zero():
    x = torch.full((10, 1), 0.1) + torch.tensor([[0.0]] * 9 + [[1e-9]])
    affine = fitted(x, torch.full((10, 1), 2.0)).per_channel()
    assert affine.weight.item() == 0
    assert affine.bias.item() == pytest.approx(2.0)


def test_dependent_channels_have_the_map_of_least_norm():
    base = torch.randn(100, 1).double()
    x = torch.cat([base, base], 1)
    affine = fitted(x, 2 * base, is_full=True).full()
    torch.testing.assert_close(affine.weight, torch.ones(2, 1).double())


def test_few_rows_have_no_full_map():
    x = torch.randn(11, 2)
    assert fitted(x, x, is_full=True).full() is None
    assert fitted(torch.randn(12, 2), torch.randn(12, 2), is_full=True).full() is not None


def test_map_applies_at_every_position_in_tensors_type():
    x = torch.randn(4, 3, 5, 6).half()
    y = 2 * x + torch.arange(3).half()[:, None, None]
    affine = fitted(copy_to_rows(x, 1).float(), copy_to_rows(y, 1).float()).per_channel()
    mapped = affine(x, 1)
    assert mapped.dtype == torch.float16
    torch.testing.assert_close(mapped, y, atol=1e-2, rtol=1e-2)


def test_mean_is_the_constant_map():
    x, y = torch.randn(30, 2), torch.randn(30, 2)
    mapped = fitted(x, y).mean()(torch.randn(5, 2).double(), 1)
    torch.testing.assert_close(mapped, y.double().mean(0).expand(5, 2))


def test_non_finite_rows_raise():
    with pytest.raises(NotFinite):
        AffineFit().add(torch.tensor([[math.inf]]), torch.ones(1, 1))


def test_other_channels_have_no_map_per_channel():
    with pytest.raises(Undefined):
        fitted(torch.randn(9, 3), torch.randn(9, 2), is_full=True).per_channel()


def test_unfitted_map_is_undefined():
    with pytest.raises(Undefined):
        AffineFit().per_channel()
