"""Sampled regions are checked against the breakpoints that lie in each step."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nlbench.errors import RequestError, UnsupportedOperation
from nlbench.probes.lines.lines import trace_segment

from segments import Functional, hostile_networks, mlp, networks, on_segment, outputs


def sampled(net, start, end, resolution=200, **options):
    return trace_segment(net, start, end, method="sampling", resolution=resolution, **options)


@settings(max_examples=30, deadline=None)
@given(st.one_of(networks(), hostile_networks()), st.sampled_from([7, 64, 200]))
def test_a_step_has_a_breakpoint_in_its_middle_if_boundaries_lie_in_it(drawn, resolution):
    net, start, end = drawn
    exact, trace = trace_segment(net, start, end), sampled(net, start, end, resolution)
    near = (exact.t[1:-1] * resolution - (exact.t[1:-1] * resolution).round()).abs() < 1e-6
    steps = torch.unique((exact.t[1:-1] * resolution).floor())
    found = trace.t[1:-1] * resolution - 0.5
    if not bool(near.any()):
        # Units that bend and bend back between two samples leave no trace.
        assert set(found.round().long().tolist()) <= set(steps.long().tolist())
        alone = [
            s for s in steps.tolist() if ((exact.t[1:-1] * resolution).floor() == s).sum() == 1
        ]
        assert {int(s) for s in alone} <= set(found.round().long().tolist())
    torch.testing.assert_close(
        trace.values, outputs(net, on_segment(start, end, trace.t)), rtol=1e-9, atol=1e-12
    )


def test_regions_within_one_step_are_one():
    net = Functional(lambda x: torch.relu(x) + torch.relu(x - 0.01))
    ends = torch.tensor([-0.98]), torch.tensor([1.02])
    assert sampled(net, *ends, resolution=10).regions == 2
    assert sampled(net, *ends, resolution=1000).regions == 3


@pytest.mark.parametrize("resolution", [1, 2, 3, 4, 61, 62, 63, 64, 65, 125, 126])
def test_a_sample_on_a_boundary_loses_no_region(resolution):
    # At 0 with a step that ends there, and between batches.
    for place in range(1, resolution):
        net = Functional(lambda x, c=place: torch.relu(x - c))
        trace = sampled(net, torch.tensor([0.0]), torch.tensor([float(resolution)]), resolution)
        assert trace.t.tolist() == pytest.approx([0, (place + 0.5) / resolution, 1])


def test_a_trace_by_sampling_says_so():
    trace = sampled(mlp(0), *torch.randn(2, 3), resolution=50)
    assert (trace.method, trace.notes) == ("sampling", {"resolution": 50.0})


def test_a_network_that_is_not_piecewise_affine_is_refused():
    with pytest.raises(UnsupportedOperation, match="tanh"):
        sampled(nn.Sequential(nn.Tanh()), torch.zeros(1), torch.ones(1))


def test_no_steps_are_refused():
    with pytest.raises(RequestError, match="resolution of 0 steps"):
        sampled(mlp(0), *torch.randn(2, 3), resolution=0)
