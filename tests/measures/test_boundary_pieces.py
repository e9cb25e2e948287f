"""Boundary pieces against constructed networks, dense sampling and upper envelopes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import nlbench
from nlbench.measures.boundary_pieces import boundary_crossings
from nlbench.probes.lines import trace_segment

from segments import polyline


@pytest.mark.parametrize("classes", [2, 3, 8])
def test_tangents_of_parabola_are_each_on_top_once(classes):
    # The tangents of t² at equal steps meet halfway between their points.
    points = np.linspace(0, 1, classes)
    lines = [points * (2 * t - points) for t in (0.0, 1.0)]
    expected = torch.tensor((points[1:] + points[:-1]) / 2)
    torch.testing.assert_close(boundary_crossings(polyline([0, 1], lines)), expected)


@pytest.mark.parametrize("teeth", [1, 4, 9])
def test_a_single_logit_is_a_sign(teeth):
    t = np.linspace(0, 1, teeth + 1)
    trace = polyline(t, np.where(np.arange(teeth + 1) % 2, 1.0, -1.0))
    expected = torch.tensor((t[1:] + t[:-1]) / 2)
    torch.testing.assert_close(boundary_crossings(trace), expected)


@given(st.integers(0, 9999), st.integers(2, 12), st.integers(2, 6))
def test_dense_sampling_sees_the_same_changes(seed, n, k):
    random = np.random.default_rng(seed)
    t = np.sort(np.append(random.uniform(0.01, 0.99, n - 2), [0, 1]))
    y = random.standard_normal((n, k))
    crossings = boundary_crossings(polyline(t, y)).numpy()
    assert np.all(np.diff(crossings) >= 0)
    dense = np.linspace(0, 1, 20_001)
    classes = np.stack([np.interp(dense, t, logit) for logit in y.T], 1).argmax(1)
    seen = dense[1:][np.diff(classes) != 0]
    # A class on top for less than a step may be passed over.
    hidden = np.count_nonzero(np.diff(crossings) < 1e-4)
    assert len(crossings) - 2 * hidden <= len(seen) <= len(crossings)
    for place in seen:
        assert np.abs(crossings - place).min() <= 5.1e-5


def test_logits_that_touch_do_not_cross():
    trace = polyline([0, 0.5, 1], [[1.0, 2.0], [3.0, 3.0], [1.0, 2.0]])
    assert len(boundary_crossings(trace)) == 0


def test_logits_that_are_equal_for_while_cross_once():
    trace = polyline([0, 0.25, 0.75, 1], [[0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    assert boundary_crossings(trace).tolist() == [0.75]


def test_three_logits_that_meet_are_one_crossing():
    trace = polyline([0, 1], [[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]])
    assert boundary_crossings(trace).tolist() == [0.5]


def test_a_network_along_a_line():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 50), nn.ReLU(), nn.Linear(50, 3, bias=False)).double()
    t, counts = torch.linspace(0, 1, 100_001).double()[:, None], []
    for start, end in 4 * torch.randn(8, 2, 2).double():
        counts.append(len(boundary_crossings(trace_segment(network, start, end))))
        changes = network(start + t * (end - start)).argmax(1).diff().count_nonzero()
        assert counts[-1] == changes
    assert sum(counts) > 3


def test_segments_of_a_path_are_summed():
    class Sign(nn.Module):
        def forward(self, x):
            return torch.cat([x, -x], 1)

    x = torch.tensor([[-1.0], [3.0], [1.0], [2.0]])
    result = nlbench.evaluate(Sign(), x, "boundary-pieces", settings={"lines.paths": "pairs"})
    values = result["boundary-pieces"].values
    assert [dict(value.statistics) for value in values] == [
        {"value": 1, "per_length": 0.25, "length": 4},
        {"value": 0, "per_length": 0, "length": 1},
    ]
