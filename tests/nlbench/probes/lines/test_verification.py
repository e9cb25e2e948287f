"""Traces are compared with the network, independently of their error estimates."""

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from programs import record_checked_program, trace_program
from torch import nn

from nlbench.errors import UnsupportedOperation
from nlbench.introspection.model_copy import double_copy
from nlbench.probes.lines import verification as check
from nlbench.probes.lines.published import trace_by_sampling
from nlbench.probes.lines.recording.program import Program, walk, walk_measured
from nlbench.probes.lines.rules.pieces import Kinks

from segments import Functional, mlp


def traced(seed=0):
    net = double_copy(mlp(seed))
    points = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)).double()
    program = record_checked_program(net, points)
    return program, net, points, trace_program(program, *points)


def test_a_correct_trace_passes():
    program, net, points, trace = traced()
    assert trace.crossings > 2
    check.check_traces(program, net, points[None], [trace])


def test_empty_traces_are_refused_for_any_bounds():
    program, net, points, trace = traced()
    huge = tuple(
        replace(s, rule=replace(s.rule, bound=lambda x, b, y: torch.full_like(y, 1e30)))
        for s in program.steps
    )
    blind = Program(huge, program.output, program.shape)
    empty = trace_program(blind, *points)
    assert empty.crossings == 0
    with pytest.raises(UnsupportedOperation):
        check.check_traces(blind, net, points[None], [empty])
    # Also where the values reveal nothing.
    ends = replace(trace, t=trace.t[[0, -1]], values=trace.values[[0, -1]])
    ends = replace(ends, origins=trace.origins[[0, -1]])
    flat = Functional(lambda x: 0 * net(x))
    flat_program = record_checked_program(flat, points)
    ends = replace(ends, values=0 * ends.values)
    with pytest.raises(UnsupportedOperation):
        check.check_traces(flat_program, flat, points[None], [ends])


def test_a_spurious_breakpoint_is_refused():
    program, net, points, trace = traced()
    i = int(trace.t.diff().argmax())
    middle = (trace.t[i] + trace.t[i + 1]) / 2
    more = replace(
        trace,
        t=torch.cat([trace.t[: i + 1], middle[None], trace.t[i + 1 :]]),
        values=torch.cat(
            [trace.values[: i + 1], trace.values[i : i + 2].mean(0)[None], trace.values[i + 1 :]]
        ),
        origins=torch.cat([trace.origins[: i + 1], trace.origins[1:2], trace.origins[i + 1 :]]),
    )
    with pytest.raises(UnsupportedOperation):
        check.check_traces(program, net, points[None], [more])


def test_sampling_uses_no_bounds():
    program, _, points, _ = traced()

    def refuse(x, bounds, output):
        raise AssertionError("a bound was computed")

    steps = tuple(replace(s, rule=replace(s.rule, bound=refuse)) for s in program.steps)
    blind = Program(steps, program.output, program.shape)
    from nlbench.probes.lines.recording.point_memory import measure_point_memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "nlbench.probes.lines.published.measure_point_memory",
            lambda p, x, **how: measure_point_memory(program, x, **how),
        )
        (trace,) = trace_by_sampling(blind, points[None], resolution=300)
    (expected,) = trace_by_sampling(program, points[None], resolution=300)
    assert torch.equal(trace.t, expected.t)
    assert trace.crossings > 2


def deep():
    layers = [nn.Conv2d(2, 4, 3, padding=1)]
    for _ in range(39):
        layers += [nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)]
    return nn.Sequential(*layers, nn.Flatten())


def test_walks_keep_only_needed_values():
    net = double_copy(deep())
    points = torch.randn(2, 2, 8, 8).double()
    outputs, max_alive = [], 0
    with torch.inference_mode():
        for computed in walk(record_checked_program(net, points), points):
            outputs.append(weakref.ref(computed.output))
            del computed
            gc.collect(0)
            max_alive = max(max_alive, sum(ref() is not None for ref in outputs))
    assert len(outputs) > 75
    assert max_alive <= 4


@pytest.mark.parametrize("limit", [2, 4, 64])
def test_checked_points_are_limited(limit, monkeypatch):
    sizes = []

    def counted(function, copies):
        def counting(program, inputs, *rest):
            sizes.append(copies * len(inputs))
            return function(program, inputs, *rest)

        return counting

    program, net, points, trace = traced(2)
    monkeypatch.setattr(check, "walk", counted(walk, 1))
    monkeypatch.setattr(check, "walk_measured", counted(walk_measured, 2))
    check.check_traces(program, net, points[None], [trace], batch_points=limit)
    assert max(sizes) <= max(4, limit)  # A pair of points, and its copy.
    assert len(sizes) > 2 or limit == 64


@pytest.mark.parametrize(
    ("x", "bound", "is_refused"),
    [
        ([[-1e-12], [1e-12]], 0.0, True),
        # Within the error of the inputs, or within rounding of the largest of them.
        ([[-1e-12], [1e-12]], 1e6, False),
        ([[-1e-15, 5.0], [1e-15, 5.0]], 0.0, False),
        ([[-1.0, 5.0], [1.0, 5.0]], 0.0, True),
    ],
)
def test_units_within_rounding_have_no_side(x, bound, is_refused):
    x = torch.tensor(x, dtype=torch.float64)
    computed = SimpleNamespace(inputs=[x], bounds=[torch.full_like(x, bound)])
    is_inside = torch.ones(2, dtype=torch.bool)
    is_apart = check._are_apart(computed, Kinks(lambda inputs: inputs[0]), is_inside)
    assert is_apart.tolist() == [is_refused]


def without_last_breakpoint(trace):
    kept = [*range(trace.regions - 1), trace.regions]
    return replace(trace, t=trace.t[kept], values=trace.values[kept], origins=trace.origins[kept])


@pytest.mark.parametrize(
    "wrong", [lambda trace: replace(trace, values=1.001 * trace.values), without_last_breakpoint]
)
def test_traces_are_checked_together(wrong, monkeypatch):
    program, net, points, trace = traced()
    ends = torch.stack([points, points.flip(0), points])
    traces = [trace, trace_program(program, *points.flip(0)), trace]
    run = check._run_together
    with monkeypatch.context() as patch:
        networks = []
        patch.setattr(check, "_run_together", lambda *call: networks.append(call) or run(*call))
        check.check_traces(program, net, ends, traces, batch_points=96)
    assert len(networks) == 1
    with pytest.raises(UnsupportedOperation):
        check.check_traces(program, net, ends, [*traces[:2], wrong(trace)], batch_points=96)


def test_networks_without_batches_are_checked_alone():
    program, net, points, trace = traced()
    alone = Functional(lambda x: net(x) if len(x) == 1 else net(x.unsqueeze(7)))
    check.check_traces(program, alone, torch.stack([points] * 2), [trace] * 2)
