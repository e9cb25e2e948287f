from functools import partial

import pytest
import torch
from torch import nn

from nlbench.introspection.model_copy import typed_copy
from nlbench.probes.lines.segment_image import SegmentImage


class Offset(nn.Module):
    """Adds a number, so that float32 loses the last digits of the input."""

    def __init__(self, offset):
        super().__init__()
        self.offset = offset

    def forward(self, x):
        return x + self.offset


@pytest.mark.parametrize(("offset", "dtype"), [(0.0, torch.float32), (1e4, torch.float64)])
def test_estimates_use_float32_where_it_resolves_the_steps(offset, dtype, monkeypatch):
    layers = nn.Linear(6, 50), Offset(offset), nn.ReLU(), nn.Linear(50, 9), nn.Tanh()
    network = partial(typed_copy, nn.Sequential(*layers))
    ends, t = torch.randn(2, 6).unbind(), torch.linspace(0, 1, 129, dtype=torch.float64)
    double = SegmentImage(network, ends, t, False, None).lengths
    assert list(double) == ["2", "4"]
    used, measure = [], SegmentImage._lengths_in
    monkeypatch.setattr(
        SegmentImage, "_lengths_in", lambda self, dtype: used.append(dtype) or measure(self, dtype)
    )
    assert SegmentImage(network, ends, t, True, None).lengths == pytest.approx(double, rel=1e-6)
    assert used[-1] == dtype


def test_exact_traces_use_float64_only():
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU())

    def in_float64(dtype):
        assert dtype == torch.float64
        return typed_copy(network, dtype)

    ends, t = torch.randn(2, 3).unbind(), torch.tensor([0.0, 0.4, 1.0], dtype=torch.float64)
    (length,) = SegmentImage(in_float64, ends, t, False, None).lengths.values()
    with torch.no_grad():
        image = network(torch.lerp(*ends, t[:, None].float()))
    assert length == pytest.approx(image.diff(dim=0).norm(dim=1).sum().item(), rel=1e-5)


def test_a_site_that_is_not_called_in_the_middle_is_measured_in_float64():
    class OnlyBefore(nn.Module):
        """Calls its second activation on the first half of the segment alone."""

        def __init__(self):
            super().__init__()
            self.act, self.other = nn.ReLU(), nn.ReLU()

        def forward(self, x):
            return self.other(self.act(x)) if bool((x[:, 0] < 0.4).any()) else self.act(x)

    ends = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 3.0])
    t = torch.linspace(0, 1, 65, dtype=torch.float64)
    network = partial(typed_copy, OnlyBefore())
    single, double = (SegmentImage(network, ends, t, is_estimate, None) for is_estimate in (1, 0))
    assert single.lengths == double.lengths
    assert set(single.lengths) == {"act", "other"}
