import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nlbench.errors import RequestError
from nlbench.measure import Value
from nlbench.measures.absdev import AbsoluteDeviation, absolute_deviation, deviation_scale
from nlbench.measures.path_measure import _relative_error, format_percent
from nlbench.probes.lines import (
    SegmentTrace,
    TracedSegment,
    estimate_segment,
    observe_paths,
    trace_segment,
)
from nlbench.probes.lines.quadrature import integrate_along, smooth_estimate


def trace_of(t, values, length=1.0):
    t = torch.tensor(t, dtype=torch.float64)
    values = torch.tensor(values, dtype=torch.float64).reshape(len(t), -1)
    origins = torch.tensor([-1, *[0] * (len(t) - 2), -1])
    return SegmentTrace(t, values, length, origins, ("relu",))


@pytest.mark.parametrize("a", [0.1, 1.0, 3.0])
def test_relu_bending_off_middle_has_closed_form(a):
    # On [-a, 1] the triangle has height a / (1 + a) over a length of 1 + a.
    trace = trace_segment(nn.ReLU(), torch.tensor([-a]), torch.tensor([1.0]))
    assert float(absolute_deviation(trace)) == pytest.approx(a / 2, rel=1e-6)


def test_sign_change_within_a_region_is_split():
    # From 1 to -1 within a region: two triangles, 1/2 of what |a| + |b| t would give.
    trace = trace_of([0, 0.25, 0.75, 1], [0, 1, -1, 0])
    assert float(absolute_deviation(trace)) == pytest.approx(0.125 + 0.25 + 0.125)


def test_the_last_region_counts():
    trace = trace_of([0, 0.5, 0.5 + 1e-9, 1], [0, 0, 1, 1])
    # Between the chord t and the step at 1/2: two triangles of 1/8.
    assert float(absolute_deviation(trace)) == pytest.approx(0.25, rel=1e-6)


def test_affine_network_has_no_deviation():
    assert float(absolute_deviation(trace_of([0, 1], [3, -5], 7.0))) == 0


def test_zero_length_segment_has_no_deviation():
    x = torch.randn(3)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    assert absolute_deviation(trace_segment(net, x, x)).tolist() == [0, 0, 0, 0]


def test_traced_network_has_integral_of_network_itself():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    net = net.double()
    start, end = torch.randn(2, 3, dtype=torch.float64)
    trace = trace_segment(net, start, end)
    assert trace.crossings > 3
    with torch.no_grad():
        # Midpoints of 10^6 intervals, from the network alone.
        t = (torch.arange(10**6, dtype=torch.float64)[:, None] + 0.5) / 10**6
        f = net(torch.lerp(start, end, t))
        chord = torch.lerp(net(start), net(end), t)
    expected = float((end - start).norm()) * (f - chord).abs().mean(0)
    torch.testing.assert_close(absolute_deviation(trace), expected, rtol=1e-6, atol=0)


def test_reading_sums_segments_per_logit_and_takes_norm():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    paths = torch.randn(2, 4, 3)
    measure = AbsoluteDeviation()
    measure.reset()
    for observation in observe_paths(net, paths):
        measure.update(observation)
    result = measure.compute()
    for path, value in zip(paths, result.values, strict=True):
        pairs = itertools.pairwise(path)
        sums = sum(absolute_deviation(trace_segment(net, a, b)) for a, b in pairs)
        assert value.parts["logit"] == pytest.approx(sums.tolist())
        assert value.statistics["value"] == pytest.approx(math.hypot(*sums.tolist()))
        length = float(path.diff(dim=0).norm(dim=1).sum())
        assert value.statistics["length"] == pytest.approx(length)
        assert value.n == 3
    assert [value.place for value in result.values] == ["path0", "path1"]
    numbers = [value.statistics["value"] for value in result.values]
    assert result.summary["value"] == pytest.approx(np.mean(numbers))
    assert result.n == 6
    assert result.notes == {"method": "exact"}


def reading_of(observations):
    measure = AbsoluteDeviation()
    measure.reset()
    for observation in observations:
        measure.update(observation)
    return measure.compute()


def test_reading_parts_deviation_by_sign_and_by_segment():
    observations = [
        TracedSegment(0, 0, trace_of([0, 0.5, 1], [[0, 0], [3, -1], [0, 0]], 2.0)),
        TracedSegment(0, 1, trace_of([0, 0.5, 1], [[0, 0], [-4, 0], [0, 0]], 1.0)),
    ]
    (value,) = reading_of(observations).values
    found, parts = value.statistics, value.parts
    assert parts["logit"] == (5, 1)
    assert parts["above"] == (3, 0)
    assert found["above"] == 3
    assert found["below"] == pytest.approx(math.hypot(2, 1))
    assert parts["segment"] == pytest.approx((math.hypot(3, 1), 2))
    assert found["variation"] == pytest.approx(math.hypot(6 + 8, 2))
    assert "numerical_error" not in found


def test_the_summary_has_the_means_of_the_parts():
    observations = [
        TracedSegment(0, 0, trace_of([0, 0.5, 1], [0, 2, 0])),
        TracedSegment(1, 0, trace_of([0, 0.5, 1], [0, -6, 0])),
    ]
    summary = reading_of(observations).summary
    assert summary["value"] == 2
    assert summary["above"] == 0.5
    assert summary["below"] == 1.5
    assert summary["variation"] == 8


def test_smooth_network_is_ranked_with_a_remark():
    ends = torch.tensor([[-2.0], [2.0]])
    (trace,) = integrate_along(nn.Tanh(), ends[:1], ends[1:], tolerance=1e-7)
    result = reading_of([TracedSegment(0, 0, trace)])
    area = math.log(math.cosh(2)) - math.tanh(2)
    assert result.summary["value"] == pytest.approx(2 * area, rel=1e-7)
    assert result.status == "ok"
    error = result.values[0].statistics["numerical_error"] / result.summary["value"]
    assert result.reason == f"by quadrature, relative error ≤ {format_percent(error)}"
    assert result.notes["method"] == "quadrature"
    assert result.values[0].statistics["numerical_error"] <= 1e-7 * result.summary["value"]


def test_shortfall_of_other_numbers_is_not_remarked_on():
    # Crossings may be above the target where the deviation is far below it.
    precise = replace(smooth_estimate(lambda t: np.sin(t)[:, None]), converged=False)
    result = reading_of([TracedSegment(0, 0, precise)])
    assert result.notes["segments_short_of_tolerance"] == 1
    assert "above the target" not in result.reason


def test_a_quadrature_that_fell_short_is_remarked_on():
    trace = smooth_estimate(lambda t: np.sin(1000 * t)[:, None], evaluations=64)
    exact = trace_of([0, 0.5, 1], [0, 1, 0])
    result = reading_of([TracedSegment(0, 0, exact), TracedSegment(0, 1, trace)])
    error = result.values[0].statistics["numerical_error"] / result.summary["value"]
    assert result.reason == (
        f"exact and by quadrature, relative error ≤ {format_percent(error)}, "
        "above the target of 0.2 % on 1 of 2 segments"
    )
    assert result.notes["segments_short_of_tolerance"] == 1


def test_missing_observations_are_undefined():
    measure = AbsoluteDeviation()
    measure.reset()
    assert measure.compute().status == "undefined"


def test_estimate_is_read_like_trace():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 30), nn.ReLU(), nn.Linear(30, 2))
    start, end = torch.randn(2, 3)
    estimate, trace = estimate_segment(network, start, end), trace_segment(network, start, end)
    exact = absolute_deviation(trace)
    torch.testing.assert_close(absolute_deviation(estimate), exact, rtol=3e-3, atol=1e-4)
    result = reading_of([TracedSegment(0, 0, estimate)])
    assert result.notes["method"] == "refined"
    assert result.summary["numerical_error"] == pytest.approx(
        estimate.length * float(estimate.deviation_error.norm())
    )
    assert "estimated" in result.reason


def measured(traces, normalize):
    measure = AbsoluteDeviation(normalize=normalize)
    measure.reset()
    for segment, trace in enumerate(traces):
        measure.update(TracedSegment(0, segment, trace))
    return measure.compute()


def test_normalized_deviation_has_closed_form_of_path():
    # A bend of height 1/2 to one side: 2 · 1/4 over a range and a rise of 1. Then a tent of
    # height 3 over a level chord: 1/2 · 3/2 · 4 over a range of 3.
    bend, tent = trace_of([0, 0.5, 1], [0, 0, 1], 2.0), trace_of([0, 0.5, 1], [1, 4, 1], 4.0)
    assert measured([bend, tent], "none").summary["value"] == pytest.approx(0.5 + 6)
    of_range = measured([bend, tent], "range")
    assert of_range.summary["value"] == pytest.approx(6.5 / (2 * 1 + 4 * 3))
    assert measured([bend, tent], "chord").summary["value"] == pytest.approx(6.5 / 2)
    (path,) = of_range.values
    assert path.numbers["logit0"] == path.statistics["value"]
    assert sum(path.parts["segment"]) == pytest.approx(path.statistics["value"])
    assert path.statistics["length"] == 6
    assert path.statistics["variation"] == measured([bend, tent], "none").summary["variation"] > 0
    of_none = measured([bend, tent], "none").summary
    assert of_none["over_range"] == pytest.approx(of_range.summary["value"], rel=1e-15)
    assert of_none["over_chord"] == pytest.approx(6.5 / 2)
    assert of_range.summary["over_range"] == of_none["over_range"]


def test_scales_are_positive_wherever_logit_begins_and_ends():
    falling = trace_of([0, 0.5, 1], [[3, 1], [0, 5], [1, 2]], 2.0)
    assert deviation_scale(falling, "range").tolist() == [6, 8]
    assert deviation_scale(falling, "chord").tolist() == [4, 2]
    rising = trace_of([0, 0.5, 1], [[1, 2], [0, 5], [3, 1]], 2.0)
    there_and_back = measured([falling, rising], "none").summary
    assert there_and_back["over_chord"] == pytest.approx(there_and_back["value"] / math.hypot(8, 4))


def test_normalized_deviation_divides_norms_over_logits():
    trace = trace_of([0, 0.5, 1], [[0, 0], [0, 4], [1, 8]])
    assert deviation_scale(trace, "range").tolist() == [1, 8]
    expected = 0.25 / math.hypot(1, 8)
    assert measured([trace], "range").summary["value"] == pytest.approx(expected)


@pytest.mark.parametrize("normalize", ["range", "chord"])
@given(st.integers(0, 10**6), st.floats(1e-3, 1e3), st.floats(-100, 100), st.floats(0.1, 10))
def test_normalized_deviation_has_no_units(normalize, seed, factor, offset, length):
    values = np.random.default_rng(seed).normal(size=(6, 2))
    t = np.linspace(0, 1, 6)
    plain = measured([trace_of(t, values)], normalize).summary["value"]
    moved = measured([trace_of(t, factor * values + offset, length)], normalize).summary["value"]
    assert moved == pytest.approx(plain, rel=1e-6)
    assert normalize == "chord" or 0 < plain <= 1


def test_normalized_deviation_of_what_is_constant_is_undefined():
    level = trace_of([0, 0.5, 1], [1, 4, 1])
    assert measured([level], "chord").reason == "the path's chords are level"
    assert "over_chord" not in measured([level], "none").summary
    assert measured([trace_of([0, 1], [2, 2])], "range").reason == "the path's logits are constant"
    assert measured([trace_of([0, 1], [2, 3])], "range").summary["value"] == 0
    with pytest.raises(RequestError):
        deviation_scale(level, "rang")


def test_normalized_deviation_of_estimate_is_that_of_trace():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    ends = torch.randn(2, 3, dtype=torch.float64)
    traced, estimated = trace_segment(net, *ends), estimate_segment(net, *ends, tolerance=1e-4)
    for normalize in ("range", "chord"):
        expected = measured([traced], normalize).summary["value"]
        found = measured([estimated], normalize).summary["value"]
        assert found == pytest.approx(expected, rel=1e-2)


def test_stated_error_ignores_the_relative_error_of_rounding():
    def path(value, error):
        return Value("path", {"value": value, "numerical_error": error})

    exact = [path(1.0, 1e-3), path(2.0, 1e-3)]
    assert _relative_error(exact) == pytest.approx(1e-3)
    assert _relative_error([*exact, path(1e-16, 3e-16)]) == pytest.approx(1e-3)
    assert _relative_error([*exact, path(0.0, 0.3)]) == pytest.approx(0.3)
    assert math.isnan(_relative_error([path(0.0, 0.0)]))
