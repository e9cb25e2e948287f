from functools import partial

import pytest
import torch
from torch import nn

from nlbench.introspection.model_copy import typed_copy
from nlbench.probes.lines import segment_image
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
    ends = torch.randn(2, 6).unbind()
    double = SegmentImage(network, ends, None, False, None).lengths
    assert list(double) == ["2", "4"]
    used, measure = [], SegmentImage._lengths_in
    monkeypatch.setattr(
        SegmentImage,
        "_lengths_in",
        lambda self, dtype, *grid: used.append(dtype) or measure(self, dtype, *grid),
    )
    assert SegmentImage(network, ends, None, True, None).lengths == pytest.approx(double, rel=1e-6)
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


def test_sites_called_at_times_are_measured_in_float64():
    class NotAlone(nn.Module):
        """Calls its second activation unless the batch is the middle of the segment alone."""

        def __init__(self):
            super().__init__()
            self.act, self.other = nn.ReLU(), nn.ReLU()

        def forward(self, x):
            is_called = bool(((x[:, 0] - 0.5).abs() > 0.1).any())
            return self.other(self.act(x)) if is_called else self.act(x)

    ends = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 3.0])
    network = partial(typed_copy, NotAlone())
    single, double = (SegmentImage(network, ends, None, is_single, None) for is_single in (1, 0))
    assert single.lengths == double.lengths
    assert set(single.lengths) == {"act", "other"}


@pytest.mark.parametrize("batch", [1, 7, 32])
def test_batches_do_not_change_lengths(batch, monkeypatch):
    network = partial(typed_copy, nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 2)))
    ends = torch.randn(2, 3).unbind()
    expected = SegmentImage(network, ends, None, False, None).lengths
    monkeypatch.setattr(segment_image, "MIN_BATCH", batch)
    monkeypatch.setattr(segment_image, "MAX_BATCH", batch)
    assert SegmentImage(network, ends, None, False, None).lengths == pytest.approx(expected)


@pytest.mark.parametrize(
    ("activation", "width"),
    [(nn.ReLU, 300), (nn.Tanh, 30), (nn.GELU, 300), (nn.Hardtanh, 30), (nn.ReLU6, 30),
     (nn.ELU, 30)],
)  # fmt: skip
def test_estimated_lengths_match_finely_sampled_curves(activation, width):
    layers = [nn.Linear(8, width), activation(), nn.Linear(width, width), activation()]
    network = nn.Sequential(*layers).double()
    start, end = 5 * torch.randn(2, 8, dtype=torch.float64)
    estimate = SegmentImage(partial(typed_copy, network), (start, end), None, False, None).lengths
    x = torch.lerp(start, end, torch.linspace(0, 1, 2**14 + 1, dtype=torch.float64)[:, None])
    with torch.no_grad():
        images = {"1": network[:2](x), "3": network(x)}
    for site, image in images.items():
        length = image.diff(dim=0).norm(dim=1).sum().item()
        polygon = image[:: 2**8].diff(dim=0).norm(dim=1).sum().item()
        assert estimate[site] == pytest.approx(length, rel=segment_image.TOLERANCE)
        assert abs(estimate[site] - length) < max(abs(polygon - length), 2e-4 * length)
