"""Changes of slope, in networks with units that are known to change nothing."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nlbench.errors import Undefined
from nlbench.probes.lines import SegmentTrace, estimate_segment, slope_changes, trace_segment

from segments import mlp


def trace_of(t, values, **options):
    t, values = torch.tensor(t, dtype=torch.float64), torch.tensor(values, dtype=torch.float64)
    return SegmentTrace(t, values, 1.0, torch.zeros(len(t), dtype=torch.int64), ("a",), **options)


def test_straight_lines_have_no_change_of_slope():
    assert slope_changes(trace_of([0, 0.25, 0.5, 1], [[0, 1], [1, 1], [2, 1], [4, 1]])) == 0


def test_a_bend_of_any_output_counts_once():
    trace = trace_of([0, 0.25, 0.5, 1], [[0, 1, 0], [1, 1, 0], [2, 5, 7], [4, 5, 7]])
    assert slope_changes(trace) == 2


def test_short_region_hides_no_change_of_slope():
    t = [0, 0.5, 0.5 + 1e-15, 0.5 + 2e-15, 1]
    assert slope_changes(trace_of(t, [[1.0], [1.5], [1.5], [1.5], [1.5]])) == 1
    assert slope_changes(trace_of(t, [[1.0], [1.5], [1.5], [1.5], [2.0]])) == 0


def test_faintly_bent_curve_is_not_a_line():
    t = torch.linspace(0, 1, 10**5 + 1, dtype=torch.float64)
    curve = trace_of(t.tolist(), (1e-5 * t[:, None] ** 2).tolist())
    assert slope_changes(curve) > 1000


def test_a_constant_output_has_no_change_of_slope():
    assert slope_changes(trace_of([0, 0.5, 1], [[0.0], [0.0], [0.0]])) == 0


@given(st.integers(0, 10**6), st.sampled_from([1e-3, 1.0, 1e3]))
def test_unread_units_change_no_slope(seed, scale):
    """Half of the hidden units are read; a network of only these shows where slopes change."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 3)).double()
    small = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 3)).double()
    with torch.no_grad():
        net[2].weight[:, 10:] = 0
        net[2].weight *= scale
        small[0].weight.copy_(net[0].weight[:10])
        small[0].bias.copy_(net[0].bias[:10])
        small[2].weight.copy_(net[2].weight[:, :10])
        small[2].bias.copy_(net[2].bias)
    start, end = torch.randn(2, 4, dtype=torch.float64)
    full, reduced = trace_segment(net, start, end), trace_segment(small, start, end)
    assert slope_changes(full) == slope_changes(reduced) == reduced.crossings
    assert full.crossings >= reduced.crossings


@given(st.integers(0, 10**6))
def test_units_that_are_duplicated_or_dead_change_nothing(seed):
    net = mlp(seed, widths=(3, 8, 8, 2)).double()
    start, end = torch.randn(2, 3, dtype=torch.float64)
    before = slope_changes(trace_segment(net, start, end))
    wide = mlp(0, widths=(3, 17, 8, 2)).double()
    with torch.no_grad():
        for layer, old in ((wide[0], net[0]), (wide[2], net[2]), (wide[4], net[4])):
            layer.bias[: len(old.bias)] = old.bias
        wide[0].weight[:16] = net[0].weight.repeat(2, 1)
        wide[0].bias[8:16] = net[0].bias
        wide[0].weight[16], wide[0].bias[16] = 0, -1
        wide[2].weight[:, :16] = net[2].weight.repeat(1, 2) / 2
        wide[2].weight[:, 16] = 5
        wide[4].weight.copy_(net[4].weight)
    assert slope_changes(trace_segment(wide, start, end)) == before


def test_unresolved_slopes_are_undefined():
    ends = torch.tensor([-1.0]), torch.tensor([2.0])
    with pytest.raises(Undefined):
        slope_changes(trace_segment(nn.ReLU(), *ends, method="sampling"))
    with pytest.raises(Undefined):
        slope_changes(trace_segment(nn.ReLU(), *ends, dtype=torch.float32))


def test_estimates_have_their_worst_outputs_error():
    estimate = estimate_segment(mlp(0, widths=(3, 8, 3)), torch.zeros(3), torch.ones(3))
    above, below = torch.tensor([[1.0, 0.0, 0.0], [1.0, 4.0, 0.0]], dtype=torch.float64)
    error = torch.tensor([0.1, 0.8, 0.0]).double()
    estimate = replace(estimate, above=above, below=below, deviation_error=error)
    assert estimate.relative_error == pytest.approx(0.2)
    nothing = replace(estimate, above=0 * above, below=0 * below)
    assert nothing.relative_error == 0
