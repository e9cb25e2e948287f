import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from torch import nn

from nlbench.measures.absdev import deviation_parts
from nlbench.probes.lines import SegmentTrace, trace_segment
from nlbench.probes.lines.quadrature import integrate_along, smooth_estimate


def trace_of(t, values, length=1.0):
    t = torch.as_tensor(t, dtype=torch.float64)
    values = torch.as_tensor(values, dtype=torch.float64).reshape(len(t), -1)
    origins = torch.tensor([-1, *[0] * (len(t) - 2), -1])
    return SegmentTrace(t, values, length, origins, ("relu",))


@st.composite
def traces(draw):
    widths = draw(st.lists(st.floats(0.01, 1), min_size=1, max_size=8))
    t = np.cumsum([0, *widths]) / sum(widths)
    t[-1] = 1
    values = np.random.default_rng(draw(st.integers(0, 10**6))).normal(size=(len(t), 2))
    values *= draw(st.sampled_from([1e-6, 1.0, 1e6]))
    return trace_of(t, values, draw(st.floats(0.1, 10)))


def by_scipy(trace, logit, sign):
    """Area on one side of the chord: scipy on each region, told where the distance is 0."""
    t, f = trace.t.numpy(), trace.values[:, logit].numpy()
    d = sign * (f - (f[0] + t * (f[-1] - f[0])))
    total = 0.0
    for (a, da), (b, db) in itertools.pairwise(zip(t, d, strict=True)):
        zero = a + (b - a) * da / (da - db) if da * db < 0 else (a + b) / 2
        area = lambda s, a=a, b=b, da=da, db=db: max(da + (s - a) / (b - a) * (db - da), 0.0)  # noqa: E731
        total += quad(area, a, zero)[0] + quad(area, zero, b)[0]
    return trace.length * total


def alike(found, expected, scale):
    for one, other in zip(vars(found).values(), vars(expected).values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12 * scale)


def scale_of(trace):
    return float(trace.values.abs().max()) * max(1.0, trace.length)


@given(traces())
def test_area_of_each_side_equals_scipys(trace):
    found, scale = deviation_parts(trace), scale_of(trace)
    for logit in range(2):
        above, below = by_scipy(trace, logit, 1), by_scipy(trace, logit, -1)
        assert float(found.above[logit]) == pytest.approx(above, rel=1e-9, abs=1e-12 * scale)
        assert float(found.below[logit]) == pytest.approx(below, rel=1e-9, abs=1e-12 * scale)


@given(traces())
def test_the_variation_is_the_way_back_and_forth(trace):
    t = np.linspace(0, 1, 20001)
    t = np.sort(np.concatenate([t, trace.t.numpy()]))
    for logit in range(2):
        f = np.interp(t, trace.t.numpy(), trace.values[:, logit].numpy())
        distance = f - (f[0] + t * (f[-1] - f[0]))
        expected = np.abs(np.diff(distance)).sum()
        found = float(deviation_parts(trace).variation[logit])
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-11 * scale_of(trace))


@given(traces(), st.floats(0.01, 0.99))
def test_breakpoint_without_kink_changes_nothing(trace, share):
    for region in range(trace.regions):
        left, right = trace.t[region], trace.t[region + 1]
        point = torch.lerp(trace.values[region], trace.values[region + 1], share)
        middle = torch.lerp(left, right, share)[None]
        t = torch.cat([trace.t[: region + 1], middle, trace.t[region + 1 :]])
        values = torch.cat([trace.values[: region + 1], point[None], trace.values[region + 1 :]])
        cut = trace_of(t, values, trace.length)
        alike(deviation_parts(cut), deviation_parts(trace), scale_of(trace))


@given(traces(), st.floats(-5, 5), st.floats(-5, 5))
def test_added_affine_function_changes_nothing(trace, offset, slope):
    size = trace.values.abs().max()
    values = trace.values + size * (offset + slope * trace.t[:, None])
    moved = trace_of(trace.t, values, trace.length)
    alike(deviation_parts(moved), deviation_parts(trace), 10 * scale_of(trace))


def test_tiny_and_huge_outputs_keep_their_areas():
    for size in (1e-200, 1e200):
        found = deviation_parts(trace_of([0, 0.25, 0.75, 1], [0, size, -size, 0]))
        assert float(found.above) == pytest.approx(0.25 * size)
        assert float(found.below) == pytest.approx(0.25 * size)
        assert float(found.variation) == pytest.approx(4 * size)


def test_an_integrated_segment_is_taken_times_its_length():
    trace = smooth_estimate(lambda t: t[:, None] ** 2, length=6.0)
    found = deviation_parts(trace)
    assert float(found.below) == pytest.approx(1.0)
    assert float(found.above) == pytest.approx(0, abs=1e-15)
    assert float(found.variation) == pytest.approx(0.5)


def test_an_integrated_and_a_traced_network_agree():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    start, end = torch.randn(2, 3)
    traced = deviation_parts(trace_segment(net, start, end))
    (smooth,) = integrate_along(net, start[None], end[None], tolerance=1e-6, evaluations=20_000)
    integrated = deviation_parts(smooth)
    assert smooth.converged
    torch.testing.assert_close(integrated.above, traced.above, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(integrated.below, traced.below, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(integrated.variation, traced.variation, rtol=1e-2, atol=1e-7)
