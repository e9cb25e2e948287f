"""Trivial measures against NumPy."""

import numpy as np
import pytest
import torch

from nlbench.errors import Undefined
from nlbench.studies.shared.baselines import elementwise_residual


def test_elementwise_residual_equals_channel_fits():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3)) + 5
    y = np.tanh(x - 5) + rng.normal(size=(200, 3))
    fits = [np.polyval(np.polyfit(a, b, 1), a) for a, b in zip(x.T, y.T, strict=True)]
    expected = np.square(y.T - fits).sum() / np.square(y - y.mean(0)).sum()
    value = elementwise_residual.function(torch.tensor(x), torch.tensor(y)).item()
    assert value == pytest.approx(expected, rel=1e-9)


def test_constant_output_is_undefined():
    with pytest.raises(Undefined):
        elementwise_residual.function(torch.randn(9, 2), torch.ones(9, 2))
