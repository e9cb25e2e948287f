"""What has no affinity score, and what is said about it."""

import pytest
import torch

from nlbench.errors import Undefined
from nlbench.measures.affinity import affinity_score

BOTH = pytest.mark.parametrize("shrinkage", ["ledoit-wolf", "none"])


def normal(seed, n, d):
    """Normal samples in float32."""
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


@BOTH
@pytest.mark.parametrize("value", [0.0, 0.1, -3e8, 1e-12])
def test_a_constant_output_has_no_score(value, shrinkage):
    # Published code gives 0.2929 = 1 - 1/sqrt(2): the ridge on both sides of the fraction.
    x = normal(0, 50, 3)
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(Undefined):
            affinity_score(x, torch.full((50, 3), value, dtype=dtype), shrinkage=shrinkage)


def test_output_constant_up_to_rounding_is_undefined():
    x = normal(0, 50, 3).double()
    y = torch.full((50, 3), 0.3).double()
    y[::2] = torch.nextafter(y[::2], torch.tensor(1.0).double())
    with pytest.raises(Undefined):
        affinity_score(x, y)
    assert affinity_score(x, 1e-9 * x + 0.3).item() == pytest.approx(1, abs=1e-2)


def test_constant_input_with_varying_output_has_no_score():
    with pytest.raises(Undefined):
        affinity_score(torch.ones(50, 3), normal(0, 50, 3))


@pytest.mark.parametrize("n", [0, 1])
def test_fewer_than_two_samples_have_no_score(n):
    with pytest.raises(Undefined):
        affinity_score(torch.ones(n, 3), torch.ones(n, 3))


def test_singular_input_without_regularization_is_undefined():
    x = normal(0, 50, 3)
    x[:, 1] = x[:, 0]
    with pytest.raises(Undefined):
        affinity_score(x, torch.relu(x), shrinkage="none", ridge=0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_score_is_a_float64_scalar_whatever_comes_in(dtype):
    x = (10 * normal(0, 50, 3)).to(dtype)
    y = x.clamp(min=0)
    score = affinity_score(x, y)
    assert score.dtype == torch.float64
    assert score.shape == ()
    assert score.item() == affinity_score(x.double(), y.double()).item()


def test_the_callers_tensors_are_left_alone():
    x, y = normal(0, 50, 3).double(), normal(1, 50, 3).double()
    before = x.clone(), y.clone()
    affinity_score(x, y)
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])


def test_spread_below_rounding_of_the_type_is_constant():
    x = 1e-7 * torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    with pytest.raises(Undefined, match="float32"):
        affinity_score(x, torch.sigmoid(x))
    wide = x.double()
    assert affinity_score(wide, torch.sigmoid(wide)).item() == pytest.approx(1, abs=1e-6)
