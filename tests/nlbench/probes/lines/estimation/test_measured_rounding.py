"""Measured rounding errors replace the expected ones where they are much larger."""

from types import SimpleNamespace

import pytest
import torch

from nlbench.probes.lines.estimation import piecewise
from nlbench.probes.lines.estimation.estimator import _SegmentState
from nlbench.probes.lines.estimation.patterns import Margins
from nlbench.probes.lines.estimation.piecewise import PiecewiseNetwork

EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize(("ratio", "is_measured"), [(0.0, 0), (1.0, 0), (1.9, 0), (2.1, 1), (3, 1)])
def test_noise_is_measured_above_twice_the_expected_noise(monkeypatch, ratio, is_measured):
    noise, values = torch.tensor([[2.0**-10]]), torch.zeros(1, 5)
    perturbed = values.clone()
    perturbed[0, 3] = -ratio * noise.item()
    step = SimpleNamespace(output=1)
    computed = SimpleNamespace(step=step, inputs=[values], copies=[[perturbed]])
    monkeypatch.setattr(piecewise, "walk_measured", lambda program, point: [computed])
    monkeypatch.setattr(
        PiecewiseNetwork, "_patterns", lambda self, step, x: [Margins(x[0], 0.5, noise)]
    )
    network = PiecewiseNetwork(SimpleNamespace(output=2), {1: None}, torch.zeros(1), True)
    (floor,) = network.measure_rounding(torch.zeros(1, 3)).min_tolerance
    assert float(floor) == pytest.approx(is_measured * 2 * ratio * noise.item())


@pytest.mark.parametrize(("ratio", "is_measured"), [(0.0, 0), (3.9, 0), (4.1, 1), (6.0, 1)])
def test_large_output_errors_are_measured(ratio, is_measured):
    values = torch.tensor([[1.0, -8.0], [3.0, 2.0]])
    expected = 2 * EPS * 8.0
    rounding = SimpleNamespace(output_error=torch.tensor([0.0, ratio * expected]))
    state = _SegmentState(SimpleNamespace(dtype=torch.float32), None, rounding, values=values)
    other = 2 * ratio * expected if is_measured else expected
    assert state.rounding_error().tolist() == pytest.approx([expected, other])
