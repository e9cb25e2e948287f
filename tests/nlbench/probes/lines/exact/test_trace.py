"""Traces of random networks and of VGG8 are exact and complete."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import record_checked_program, trace_program

from nlbench.introspection.model_copy import double_copy
from nlbench.models.networks.vgg import vgg8
from nlbench.probes.lines import trace_segment
from nlbench.probes.lines.exact import trace as exact
from nlbench.probes.lines.exact.trace import trace_exactly
from nlbench.probes.lines.paths import closed_paths

from segments import (
    assert_complete,
    assert_exact,
    assert_patterns,
    boundaries,
    hostile_networks,
    mlp,
    networks,
)


@given(networks())
def test_a_random_network_is_exactly_affine_between_breakpoints(drawn):
    net, start, end = drawn
    assert_exact(net, start, end, trace_segment(net, start, end))


@settings(max_examples=12)
@given(networks())
def test_patterns_change_at_breakpoints_and_nowhere_else(drawn):
    net, start, end = drawn
    assert_patterns(net, start, end, trace_segment(net, start, end))


@settings(max_examples=8)
@given(networks())
def test_boundaries_by_brute_force_are_breakpoints(drawn):
    net, start, end = drawn
    assert_complete(net, start, end, trace_segment(net, start, end))


@settings(max_examples=10)
@given(networks(), st.integers(2, 9))
def test_the_limit_changes_nothing(drawn, limit):
    net, start, end = drawn
    start, end = start.double(), end.double()
    program = record_checked_program(double_copy(net), torch.stack([start, end]))
    whole = trace_program(program, start, end, limit=10**6)
    cut = trace_program(program, start, end, limit=limit)
    assert len(cut.t) == len(whole.t)
    torch.testing.assert_close(cut.t, whole.t, rtol=0, atol=1e-11)
    torch.testing.assert_close(cut.values, whole.values, rtol=1e-9, atol=1e-9)
    assert torch.equal(cut.origins, whole.origins)


def test_computed_points_stay_within_the_limit():
    net = double_copy(mlp(0, widths=(3, 32, 32, 2)))
    ends = torch.randn(2, 3, dtype=torch.float64)
    program = record_checked_program(net, ends)
    sizes = []

    def counting(apply):
        def counted(points, *bounds):
            sizes.append(len(points[0]))
            return apply(points, *bounds)

        return counted

    def watched(rule):
        snap = counting(rule.snap) if rule.snap else None
        return replace(rule, apply=counting(rule.apply), snap=snap)

    steps = tuple(replace(step, rule=watched(step.rule)) for step in program.steps)
    trace = trace_program(replace(program, steps=steps), *ends, limit=5)
    assert trace.regions > 20
    assert max(sizes) == 5


@settings(max_examples=8)
@given(networks())
def test_a_reversed_segment_has_the_same_regions(drawn):
    net, start, end = drawn
    forward, reverse = trace_segment(net, start, end), trace_segment(net, end, start)
    assert forward.regions == reverse.regions
    torch.testing.assert_close(reverse.t, 1 - forward.t.flip(0), rtol=0, atol=1e-10)


@pytest.fixture(scope="module")
def vgg_segment():
    """Return VGG8 with biases, and a short segment between two translations of an image."""
    torch.manual_seed(0)
    net = vgg8()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
    path = closed_paths(torch.rand(1, 3, 32, 32))[0]
    return net, path[0], torch.lerp(path[0], path[1], 0.02)


def test_vgg8_is_exactly_affine_between_breakpoints(vgg_segment):
    net, start, end = vgg_segment
    trace = trace_segment(net, start, end)
    assert trace.regions > 50
    assert_exact(net, start, end, trace)
    assert_patterns(net, start, end, trace)


def test_boundaries_of_vgg8_by_brute_force_are_breakpoints(vgg_segment):
    net, start, end = vgg_segment
    trace = trace_segment(net, start, end)
    brackets = boundaries(net, start, end, samples=100, width=1e-8)
    assert len(brackets) > 50
    assert trace.t.diff().min() > 1e-5
    for left, right in brackets.tolist():
        assert ((trace.t > left - 1e-7) & (trace.t < right + 1e-7)).any()


@given(hostile_networks())
def test_segments_on_boundaries_are_exact(drawn):
    net, start, end = drawn
    trace = trace_segment(net, start, end)
    assert_exact(net, start, end, trace)
    back = trace_segment(net, end, start)
    assert back.regions == trace.regions
    torch.testing.assert_close(back.t, 1 - trace.t.flip(0), rtol=0, atol=1e-10)


@settings(max_examples=8)
@given(networks(), st.integers(1, 6), st.integers(2, 9))
def test_batched_segments_equal_single_ones(drawn, together, limit):
    net, start, end = drawn
    torch.manual_seed(0)
    start, end = start.double(), end.double()
    random = torch.randn(3, 2, *start.shape).double()
    pairs = [(start, end), (end, start), (start, start)]
    points = torch.stack([*(torch.stack(pair) for pair in pairs), *random])[:together]
    program = record_checked_program(double_copy(net), points[0])
    traces = trace_exactly(program, points, limit=limit)
    assert len(traces) == len(points)
    for trace, ends_of in zip(traces, points, strict=True):
        alone = trace_program(program, *ends_of)
        assert torch.equal(trace.origins, alone.origins)
        assert trace.length == alone.length
        torch.testing.assert_close(trace.t, alone.t, rtol=0, atol=1e-11)
        torch.testing.assert_close(trace.values, alone.values, rtol=1e-9, atol=1e-9)


def test_a_trace_keeps_no_memory_of_its_neighbours():
    net, ends = double_copy(mlp(0)), torch.randn(3, 2, 3, dtype=torch.float64)
    for trace in trace_exactly(record_checked_program(net, ends[0]), ends):
        for tensor in (trace.t, trace.values, trace.origins):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


@settings(max_examples=8)
@given(networks())
def test_contributions_add_up_to_the_crossings(drawn):
    net, start, end = drawn
    trace = trace_segment(net, start, end)
    assert tuple(trace.contributions) == trace.sites
    assert sum(trace.contributions.values()) == trace.crossings
    for name, count in trace.contributions.items():
        origins = [trace.sites[i] for i in trace.origins[1:-1].tolist()]
        assert origins.count(name) == count


def test_out_of_memory_halves_the_points(monkeypatch):
    torch.manual_seed(3)
    network = mlp(0, widths=(3, 16, 16, 2)).double()
    points = 3 * torch.randn(3, 2, 3, dtype=torch.float64)
    program = record_checked_program(network, points[0])
    expected = trace_exactly(program, points)
    assert sum(trace.regions for trace in expected) > 24
    sizes, advance = [], exact._advance

    def cramped(program, chunk, *rest):
        sizes.append(len(chunk.t))
        if len(chunk.t) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return advance(program, chunk, *rest)

    monkeypatch.setattr(exact, "_advance", cramped)
    traces = trace_exactly(program, points, limit=16)
    assert max(sizes) > 8
    for trace, other in zip(traces, expected, strict=True):
        torch.testing.assert_close(trace.t, other.t, rtol=0, atol=1e-12)
        torch.testing.assert_close(trace.values, other.values, rtol=1e-10, atol=1e-10)
