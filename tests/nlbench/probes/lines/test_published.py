"""Adaptive and sampled traces, compared with exact traces and known breakpoints."""

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from programs import record_checked_program
from torch import nn

from nlbench.errors import UnsupportedOperation
from nlbench.introspection.model_copy import double_copy
from nlbench.probes.lines import trace_segment, trace_segments
from nlbench.probes.lines.published import trace_adaptively

from segments import Functional, hostile_networks, mlp, networks, on_segment, outputs


def adaptive(net, start, end, **options):
    return trace_segment(net, start, end, method="adaptive", **options)


def two_kinks(apart):
    net = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1)).double()
    with torch.no_grad():
        net[0].weight.fill_(1.0)
        net[0].bias.copy_(torch.tensor([-0.5, -0.5 - apart], dtype=torch.float64))
        net[2].weight.fill_(1.0)
    return net


def assert_same_apart_from_short_regions(exact, adaptive_trace):
    """Assert that each traced boundary is exact and each missed one ends a short region."""
    sensitivity = adaptive_trace.notes["sensitivity"]
    nearest = (exact.t[:, None] - adaptive_trace.t).abs()
    assert (nearest.amin(0) < 1e-9).all()
    missed = nearest.amin(1) > 1e-9
    lengths = exact.t.diff()
    assert (lengths[missed[1:-1].nonzero().squeeze(1)] < sensitivity).all()
    assert (
        exact.regions - adaptive_trace.regions == adaptive_trace.notes["shorter_than_sensitivity"]
    )


@settings(max_examples=8)
@given(networks())
def test_regions_are_those_of_the_exact_trace(drawn):
    net, start, end = drawn
    exact, adaptive_trace = trace_segment(net, start, end), adaptive(net, start, end)
    assert_same_apart_from_short_regions(exact, adaptive_trace)
    if adaptive_trace.regions == exact.regions:
        torch.testing.assert_close(adaptive_trace.values, exact.values, rtol=1e-9, atol=1e-12)
        assert torch.equal(adaptive_trace.origins, exact.origins)


@settings(max_examples=12)
@given(hostile_networks())
def test_ties_and_zero_biases_make_no_difference(drawn):
    net, start, end = drawn
    assert_same_apart_from_short_regions(trace_segment(net, start, end), adaptive(net, start, end))


@settings(max_examples=8)
@given(networks())
def test_coarse_sensitivities_miss_short_regions(drawn):
    net, start, end = drawn
    exact = trace_segment(net, start, end)
    try:
        adaptive_trace = adaptive(net, start, end, sensitivity=1e-2)
    except UnsupportedOperation:
        # The check tolerates skipped regions unless one of them is the steepest.
        assert exact.t.diff().min() < 1e-2
        reject()
    nearest = (exact.t[:, None] - adaptive_trace.t).abs()
    assert (nearest.amin(0) < 1e-9).all()
    missed = (nearest.amin(1) > 1e-9).nonzero().squeeze(1)
    assert (exact.t.diff()[missed - 1] < 1e-2).all()
    assert bool(adaptive_trace.notes["shorter_than_sensitivity"]) == bool(len(missed))


def test_short_regions_are_skipped_and_counted():
    net, start, end = two_kinks(3e-8), torch.tensor([0.0]), torch.tensor([1.0])
    adaptive_trace = adaptive(net, start, end)
    assert adaptive_trace.t.tolist() == pytest.approx([0, 0.5, 1], abs=1e-14)
    assert adaptive_trace.notes == {"sensitivity": 1e-6, "shorter_than_sensitivity": 1.0}
    assert adaptive_trace.method == "adaptive"
    finer = adaptive(net, start, end, sensitivity=1e-9)
    assert finer.t.tolist() == pytest.approx([0, 0.5, 0.5 + 3e-8, 1], abs=1e-14)
    assert finer.notes["shorter_than_sensitivity"] == 0


def test_units_that_coincide_make_one_boundary():
    adaptive_trace = adaptive(two_kinks(0.0), torch.tensor([0.0]), torch.tensor([1.0]))
    assert adaptive_trace.t.tolist() == [0, 0.5, 1]
    assert adaptive_trace.notes["shorter_than_sensitivity"] == 0


def test_boundaries_very_close_to_the_end_are_found():
    start, end = torch.tensor([[-1.0 + 1e-8], [1e-8]], dtype=torch.float64)
    assert adaptive(nn.ReLU(), start, end).t.tolist() == pytest.approx([0, 1 - 1e-8, 1], abs=1e-14)
    assert adaptive(nn.ReLU(), end, start).t.tolist() == pytest.approx([0, 1e-8, 1], abs=1e-14)


@pytest.mark.parametrize("sign", [1, -1])
def test_starts_near_a_boundary_follow_their_direction(sign):
    net = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)).double()
    with torch.no_grad():
        net[0].weight.fill_(1.0)
        net[0].bias.fill_(-0.1)
        net[2].weight.fill_(1.0)
    boundary = torch.tensor([0.1], dtype=torch.float64)
    start = torch.nextafter(boundary, boundary + sign)
    for end, rise in ((-1.0, 0.0), (1.0, 0.9)):
        trace = adaptive(net, start, torch.tensor([end], dtype=torch.float64))
        assert trace.regions == 1
        assert float(trace.values[-1] - trace.values[0]) == pytest.approx(rise)


def test_t_does_not_drift_over_many_regions():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 400), nn.ReLU(), nn.Linear(400, 1)).double()
    zeros = torch.rand(400, dtype=torch.float64, generator=torch.manual_seed(0))
    with torch.no_grad():
        net[0].weight.fill_(1.0)
        net[0].bias.copy_(-zeros)
    adaptive_trace = adaptive(net, torch.tensor([0.0]), torch.tensor([1.0]), sensitivity=1e-8)
    torch.testing.assert_close(adaptive_trace.t[1:-1], zeros.sort().values, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("function", "bends"),
    [
        (torch.abs, [0]),
        (nn.functional.relu6, [0, 6]),
        (nn.functional.hardtanh, [-1, 1]),
        (lambda x: x.clamp(-2, 5), [-2, 5]),
        (nn.functional.hardsigmoid, [-3, 3]),
        (nn.functional.softshrink, [-0.5, 0.5]),
        (lambda x: nn.functional.threshold(x, 2, 2), [2]),
        (lambda x: nn.functional.leaky_relu(x, 0.5), [0]),
        (lambda x: nn.functional.rrelu(x), [0]),
        (lambda x: torch.maximum(x, 1 - x), [0.5]),
        (lambda x: torch.minimum(torch.tensor([2.0]), x), [2]),
        (lambda x: torch.max(2 * x, x), [0]),
        (lambda x: torch.relu(x) * 0 + torch.ones(1).double(), [0]),
        (lambda x: nn.functional.max_pool1d(torch.cat([x, 1 - x], 1)[:, None], 2)[:, 0], [0.5]),
        (lambda x: nn.functional.adaptive_max_pool1d(torch.cat([x, -x], 1)[:, None], 1)[:, 0], [0]),
    ],
)
def test_every_kind_of_unit_is_traced(function, bends):
    net, start, end = Functional(function), torch.tensor([-8.0]), torch.tensor([8.0])
    adaptive_trace = adaptive(net, start, end)
    assert (16 * adaptive_trace.t - 8).tolist() == pytest.approx([-8, *bends, 8], abs=1e-12)
    exact = trace_segment(net, start, end)
    torch.testing.assert_close(adaptive_trace.values, exact.values, rtol=1e-12, atol=1e-12)


@settings(max_examples=6)
@given(st.integers(1, 7), st.integers(0, 10**6))
def test_batch_of_segments_changes_nothing(together, seed):
    net = double_copy(mlp(seed))
    points = torch.randn(6, 2, 3, dtype=torch.float64)[:together]
    program = record_checked_program(net, points[0])
    traces = list(trace_adaptively(program, points))
    assert len(traces) == len(points)
    for adaptive_trace, ends in zip(traces, points, strict=True):
        (alone,) = trace_adaptively(program, ends[None])
        assert adaptive_trace.regions == alone.regions
        torch.testing.assert_close(adaptive_trace.t, alone.t, rtol=0, atol=1e-12)


def test_traces_come_in_order():
    net, ends = double_copy(mlp(0)), torch.randn(20, 2, 3, dtype=torch.float64)
    traces = trace_adaptively(record_checked_program(net, ends[0]), ends)
    lengths = [trace.length for trace in traces]
    assert lengths == pytest.approx([float(torch.dist(*pair)) for pair in ends])


def test_empty_segments_give_no_traces():
    assert list(trace_segments(mlp(0), torch.zeros(0, 3), torch.zeros(0, 3))) == []


def sampled(net, start, end, resolution=200, **options):
    return trace_segment(net, start, end, method="sampling", resolution=resolution, **options)


@given(st.one_of(networks(), hostile_networks()), st.sampled_from([7, 64, 200]))
def test_steps_with_boundaries_have_a_middle_breakpoint(drawn, resolution):
    net, start, end = drawn
    exact, trace = trace_segment(net, start, end), sampled(net, start, end, resolution)
    near = (exact.t[1:-1] * resolution - (exact.t[1:-1] * resolution).round()).abs() < 1e-6
    steps = torch.unique((exact.t[1:-1] * resolution).floor())
    indices = trace.t[1:-1] * resolution - 0.5
    if not bool(near.any()):
        # Units that bend twice between two samples are missed.
        assert set(indices.round().long().tolist()) <= set(steps.long().tolist())
        alone = [
            s for s in steps.tolist() if ((exact.t[1:-1] * resolution).floor() == s).sum() == 1
        ]
        assert {int(s) for s in alone} <= set(indices.round().long().tolist())
    torch.testing.assert_close(
        trace.values, outputs(net, on_segment(start, end, trace.t)), rtol=1e-9, atol=1e-12
    )


def test_regions_within_one_step_are_one():
    net = Functional(lambda x: torch.relu(x) + torch.relu(x - 0.01))
    ends = torch.tensor([-0.98]), torch.tensor([1.02])
    assert sampled(net, *ends, resolution=10).regions == 2
    assert sampled(net, *ends, resolution=1000).regions == 3


def test_steps_name_the_first_changed_site():
    net = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1), nn.ReLU()).double()
    with torch.no_grad():
        for layer, bias in ((net[0], -0.1), (net[2], -0.2)):
            layer.weight.fill_(1.0)
            layer.bias.fill_(bias)
    trace = sampled(net, *torch.tensor([[0.0], [1.0]], dtype=torch.float64), resolution=1)
    assert [trace.sites[origin] for origin in trace.origins[1:-1]] == ["1"]


@pytest.mark.parametrize("resolution", [1, 2, 3, 4, 61, 62, 63, 64, 65, 125, 126])
def test_a_sample_on_a_boundary_loses_no_region(resolution):
    # At 0 with a step that ends there, and between batches.
    inner = {1, 2, *range(60, 66), *range(122, 126), resolution - 1}
    for place in inner.intersection(range(1, resolution)):
        net = Functional(lambda x, c=place: torch.relu(x - c))
        trace = sampled(net, torch.tensor([0.0]), torch.tensor([float(resolution)]), resolution)
        assert trace.t.tolist() == pytest.approx([0, (place + 0.5) / resolution, 1])


def test_a_sampled_trace_reports_its_method():
    trace = sampled(mlp(0), *torch.randn(2, 3), resolution=50)
    assert (trace.method, trace.notes) == ("sampling", {"resolution": 50.0})
