"""Tracing is checked against networks evaluated and observed by plain PyTorch."""

import copy
import inspect
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from nlbench.errors import NotFinite, UnsupportedOperation
from nlbench.probes.lines import (
    SegmentTrace,
    TracedSegment,
    estimate_segment,
    observe_paths,
    trace_segment,
    trace_segments,
)
from nlbench.probes.lines.lines_probe import LINES

from segments import Functional, assert_exact, mlp, networks, on_segment, small_residual


def test_a_unit_bends_at_its_zero():
    trace = trace_segment(nn.ReLU(), torch.tensor([-1.0]), torch.tensor([3.0]))
    assert trace.t.tolist() == [0, 0.25, 1]
    assert trace.values.tolist() == [[0], [0], [3]]
    assert (trace.regions, trace.crossings, trace.length) == (2, 1, 4)
    assert trace.origins.tolist() == [-1, 0, -1]
    assert trace.sites == ("relu",)


@pytest.mark.parametrize(
    ("function", "bends"),
    [
        (torch.abs, [0]),
        (torch.relu, [0]),
        (lambda x: x.relu_(), [0]),
        (nn.functional.relu6, [0, 6]),
        (nn.functional.hardtanh, [-1, 1]),
        (lambda x: x.clamp(-2, 5), [-2, 5]),
        (lambda x: x.clamp(min=1), [1]),
        (lambda x: x.clamp_max(2), [2]),
        (lambda x: x.clamp_min_(3), [3]),
        (lambda x: torch.clip(x, -1), [-1]),
        (nn.functional.hardsigmoid, [-3, 3]),
        (nn.functional.softshrink, [-0.5, 0.5]),
        (lambda x: nn.functional.threshold(x, 2, 2), [2]),
        (lambda x: nn.functional.leaky_relu(x, 0.5), [0]),
        (lambda x: nn.functional.leaky_relu(x, 1.0), []),
        (lambda x: nn.functional.rrelu(x), [0]),
        (lambda x: torch.maximum(x, 1 - x), [0.5]),
        (lambda x: torch.minimum(x, torch.tensor([2.0])), [2]),
        (lambda x: torch.max(2 * x, x), [0]),
        (lambda x: 3 - 2 * x / 4, []),
        (lambda x: (x - 1).abs() + (x + 1).abs(), [-1, 1]),
        (lambda x: torch.clamp(x, 4, 4), []),
    ],
)
def test_functions_bend_where_they_are_known_to(function, bends):
    start, end = torch.tensor([-8.0]), torch.tensor([8.0])
    trace = trace_segment(Functional(function), start, end)
    assert (16 * trace.t - 8).tolist() == pytest.approx([-8, *bends, 8], abs=1e-12)
    expected = function(on_segment(start, end, trace.t).clone())
    torch.testing.assert_close(trace.values, expected, rtol=1e-12, atol=1e-12)


def test_max_pooling_bends_at_every_overtake():
    # One window of four lines; the envelope is that of 1 - 2t, 0.4, t, in this order.
    start = torch.tensor([[[1.0, 0.4], [0.0, 0.3]]])
    end = torch.tensor([[[-1.0, 0.4], [1.0, 0.3]]])
    trace = trace_segment(nn.MaxPool2d(2), start, end)
    assert trace.t.tolist() == pytest.approx([0, 0.3, 0.4, 1])
    assert trace.values.flatten().tolist() == pytest.approx([1, 0.4, 0.4, 1])


@given(
    st.integers(0, 10**6),
    st.sampled_from(
        [
            (nn.MaxPool1d(2), 1),
            (nn.MaxPool1d(3, 2, 1), 1),
            (nn.MaxPool2d(2), 2),
            (nn.MaxPool2d(3, 2, 1), 2),
            (nn.MaxPool2d(3, 2, ceil_mode=True), 2),
            (nn.MaxPool2d(2, 1, dilation=2), 2),
            (nn.MaxPool2d((1, 3), (2, 1), (0, 1)), 2),
            (nn.MaxPool3d(2), 3),
            (nn.AdaptiveMaxPool1d(3), 1),
            (nn.AdaptiveMaxPool2d((2, 3)), 2),
        ]
    ),
)
def test_max_pooling_has_no_extra_breakpoints(seed, drawn):
    pool, axes = drawn
    torch.manual_seed(seed)
    start, end = torch.randn(2, 2, *[5] * axes)
    trace = trace_segment(pool, start, end)
    assert_exact(pool, start, end, trace)
    slopes = trace.values.diff(dim=0) / trace.t.diff()[:, None]
    wide = trace.t.diff() > 1e-6
    # A convex function's slope rises where it bends.
    assert ((slopes.diff(dim=0) > 1e-6).any(1) | ~(wide[1:] & wide[:-1])).all()


def test_units_that_tie_make_one_breakpoint():
    net = nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1)).double()
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[3.0], [0.7], [-1.1]]))
        net[0].bias.copy_(-0.3 * net[0].weight[:, 0])
    trace = trace_segment(net, torch.tensor([0.0]), torch.tensor([1.0]))
    assert trace.t.tolist() == pytest.approx([0, 0.3, 1], abs=1e-14)


def test_a_segment_without_length_is_one_region():
    net, x = mlp(0), torch.randn(3)
    trace = trace_segment(net, x, x)
    assert trace.t.tolist() == [0, 1]
    assert (trace.regions, trace.crossings, trace.length) == (1, 0, 0)
    assert torch.equal(trace.values[0], trace.values[1])


def test_start_on_boundary_is_not_a_crossing():
    trace = trace_segment(nn.ReLU(), torch.tensor([0.0, 1.0]), torch.tensor([2.0, -1.0]))
    assert trace.t.tolist() == [0, 0.5, 1]


def test_linearised_channels_have_no_boundary():
    net = nn.Sequential(nn.PReLU(2, init=0.0))
    start, end = torch.tensor([-1.0, -3.0]), torch.tensor([1.0, 1.0])
    assert trace_segment(net, start, end).t.tolist() == [0, 0.5, 0.75, 1]
    with torch.no_grad():
        net[0].weight[1] = 1
    assert trace_segment(net, start, end).t.tolist() == [0, 0.5, 1]


def test_regions_shorter_than_a_millionth_are_found():
    # Kinks 3e-8 apart: a search in steps of 1e-6 passes over the region between them.
    net = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1)).double()
    with torch.no_grad():
        net[0].weight.fill_(1.0)
        net[0].bias.copy_(torch.tensor([-0.5, -0.5 - 3e-8], dtype=torch.float64))
    trace = trace_segment(net, torch.tensor([0.0]), torch.tensor([1.0]))
    assert trace.t.tolist() == pytest.approx([0, 0.5, 0.5 + 3e-8, 1], abs=1e-14)


def test_in_place_relu_before_anything_sees_the_preactivation():
    plain = nn.Sequential(nn.ReLU(), nn.Linear(2, 1))
    inplace = nn.Sequential(nn.ReLU(inplace=True), plain[1])
    start, end = torch.tensor([-1.0, 2.0]), torch.tensor([3.0, -2.0])
    before = start.clone(), end.clone()
    trace = trace_segment(inplace, start, end)
    assert trace.t.tolist() == [0, 0.25, 0.5, 1]
    assert torch.equal(trace.values, trace_segment(plain, start, end).values)
    assert torch.equal(start, before[0])
    assert torch.equal(end, before[1])


def test_origins_name_the_site_whose_unit_bends():
    net = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1), nn.ReLU())
    with torch.no_grad():
        for layer, bias in ((net[0], -0.25), (net[2], -0.5)):
            layer.weight.fill_(1.0)
            layer.bias.fill_(bias)
    trace = trace_segment(net, torch.tensor([0.0]), torch.tensor([1.0]))
    assert trace.t.tolist() == [0, 0.25, 0.75, 1]
    assert trace.sites == ("1", "3")
    assert trace.origins.tolist() == [-1, 0, 1, -1]


def test_the_model_is_left_as_it_was():
    net = small_residual(act=lambda: nn.ReLU(inplace=True))
    net.train()
    net[3].eval()
    net[0].weight.requires_grad_(False)
    calls = []
    net[1].register_forward_hook(lambda *_: calls.append(1))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    modes = [m.training for m in net.modules()]
    flags = [p.requires_grad for p in net.parameters()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()]
    trace_segment(net, *torch.randn(2, 2, 4, 4))
    assert [m.training for m in net.modules()] == modes
    assert [p.requires_grad for p in net.parameters()] == flags
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()] == hooks
    assert all(p.grad is None for p in net.parameters())
    after = net.state_dict()
    assert all(value.dtype == after[name].dtype for name, value in before.items())
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_nan_weight_raises():
    net = mlp(0)
    with torch.no_grad():
        net[0].weight[0, 0] = math.nan
    with pytest.raises(NotFinite):
        trace_segment(net, *torch.randn(2, 3))


def test_a_hidden_overflow_is_refused():
    # relu6 clips the overflow to 6, so the output is finite.
    net = nn.Sequential(nn.Linear(1, 2, bias=False), nn.ReLU6()).double()
    with torch.no_grad():
        net[0].weight.fill_(1.5e308)
    with pytest.raises(NotFinite, match="linear at 0"):
        trace_segment(net, torch.tensor([2.0]), torch.tensor([3.0]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_end_raises(bad):
    with pytest.raises(NotFinite):
        trace_segment(mlp(0), torch.zeros(3), torch.tensor([0.0, bad, 0.0]))


def test_smooth_activations_are_refused_by_name():
    net = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), nn.GELU()))
    with pytest.raises(UnsupportedOperation, match=r"gelu at 1\.1"):
        trace_segment(net, *torch.randn(2, 3))


def test_several_segments_have_the_traces_of_each():
    net = mlp(3)
    starts, ends = torch.randn(2, 4, 3)
    for trace, start, end in zip(trace_segments(net, starts, ends), starts, ends, strict=True):
        alone = trace_segment(net, start, end)
        torch.testing.assert_close(trace.t, alone.t, rtol=0, atol=1e-13)
        torch.testing.assert_close(trace.values, alone.values, rtol=1e-12, atol=1e-12)
        assert torch.equal(trace.origins, alone.origins)


def test_observations_name_path_and_segment():
    paths = torch.randn(2, 4, 3)
    observations = list(observe_paths(mlp(3), paths))
    assert [(observation.path, observation.segment) for observation in observations] == [
        (p, s) for p in range(2) for s in range(3)
    ]
    assert [observation.place for observation in observations] == ["path0"] * 3 + ["path1"] * 3
    assert all(isinstance(observation, TracedSegment) for observation in observations)
    last = trace_segment(mlp(3), paths[1, 2], paths[1, 3])
    assert isinstance(last, SegmentTrace)
    values = observations[-1].trace.values
    torch.testing.assert_close(values, last.values, rtol=1e-12, atol=1e-12)


def test_changed_control_flow_is_detected():
    class Turns(nn.Module):
        def forward(self, x):
            return 2 * x if float(x.data.numpy().sum()) > 10 else x

    with pytest.raises(UnsupportedOperation):
        list(trace_segments(Turns(), torch.zeros(2, 1), torch.tensor([[1.0], [20.0]])))


@settings(max_examples=10)
@given(networks(), st.floats(0.1, 0.9))
def test_parts_of_segments_have_their_breakpoints(drawn, fraction):
    net, start, end = drawn
    net, start, end = net.double(), start.double(), end.double()
    full = trace_segment(net, start, end)
    part = trace_segment(net, start, torch.lerp(start, end, fraction))
    inside = full.t[full.t < fraction - 1e-6]
    assume(bool((full.t - fraction).abs().min() > 1e-6))
    torch.testing.assert_close(part.t[:-1] * fraction, inside, rtol=0, atol=1e-10)


@pytest.mark.parametrize("head", [lambda y: y[:, 0], lambda y: y[:, :1].squeeze(-1)])
def test_a_head_of_one_number_is_traced(head):
    net = mlp(0)
    single = nn.Sequential(net, Functional(head))
    start, end = torch.randn(2, 3)
    trace, full = trace_segment(single, start, end), trace_segment(net, start, end)
    assert trace.values.shape == (len(full.t), 1)
    torch.testing.assert_close(trace.values[:, 0], full.values[:, 0])


class Sneaky(nn.Module):
    """Multiplies its output by `factor`, a function of the input that is not recorded."""

    def __init__(self, factor):
        super().__init__()
        self.net, self.factor = mlp(0), factor

    def forward(self, x):
        return self.net(x) * self.factor(self, x)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.calls = mlp(0), 0

    def forward(self, x):
        self.calls += 1
        return self.net(x) * (1.0 if self.calls < 6 else 2.0)


def _factor(value):
    return 1.0 if float(value) in (0, 0.5, 1) else 2.0


def _by_copy(module, x):
    return _factor(copy.deepcopy(x)[0, 0])


def _by_numpy(module, x):
    return _factor(np.from_dlpack(x)[0, 0])


def _by_storage(module, x):
    return _factor(torch.tensor([], dtype=x.dtype).set_(x.untyped_storage())[0])


@pytest.mark.parametrize(
    "net", [Sneaky(_by_copy), Sneaky(_by_numpy), Sneaky(_by_storage), Counting()]
)
def test_unrecorded_reads_are_detected_inside_the_segment(net):
    # The program is recorded and checked at 0, 1/2 and 1, where the factor is 1.
    start, end = torch.zeros(3), torch.tensor([1.0, 0.5, -1.0])
    with pytest.raises(UnsupportedOperation):
        trace_segment(net, start, end)


def test_observations_use_the_requested_method():
    paths = torch.randn(2, 3, 3)
    for method in ("exact", "adaptive", "sampling"):
        observations = list(observe_paths(mlp(3), paths, method=method, resolution=20))
        assert [observation.trace.method for observation in observations] == [method] * 4


@pytest.mark.parametrize("method", ["exact", "adaptive", "sampling"])
def test_traces_in_inference_mode_are_the_same(method):
    net, ends = mlp(0), torch.randn(2, 3)
    options = {"method": method, "resolution": 100}
    expected = trace_segment(net, *ends, **options)
    with torch.inference_mode():
        trace = trace_segment(copy.deepcopy(net), *ends.clone(), **options)
    assert torch.equal(trace.t, expected.t)
    assert torch.equal(trace.values, expected.values)


@pytest.mark.parametrize("scale", [1e-12, 1e12, 1e30])
@pytest.mark.parametrize("method", ["exact", "adaptive", "sampling"])
def test_large_and_small_inputs_are_traced(scale, method):
    net = mlp(2).double()
    with torch.no_grad():
        for layer in (net[0], net[2]):
            layer.bias.zero_()
    start, end = torch.randn(2, 3, generator=torch.Generator().manual_seed(1)).double()
    expected = trace_segment(net, start, end, method=method)
    trace = trace_segment(net, scale * start, scale * end, method=method)
    assert trace.crossings == expected.crossings > 3
    torch.testing.assert_close(trace.t, expected.t, rtol=0, atol=1e-10)


@pytest.mark.parametrize("scale", [1e-250, 1e-160, 1.0, 1e160, 1e300])
def test_length_is_right_for_ends_of_any_size(scale):
    start = scale * torch.tensor([3.0, 0.0]).double()
    end = scale * torch.tensor([0.0, 4.0]).double()
    for method in ("exact", "adaptive", "sampling"):
        trace = trace_segment(nn.Identity(), start, end, method=method)
        assert trace.length == pytest.approx(5 * scale, rel=1e-12)


@pytest.mark.parametrize("method", ["exact", "adaptive"])
def test_close_kinks_are_thinned_not_merged(method):
    # 2,000 kinks, each 5e-13 after the last, over 1e-9 in all.
    net = nn.Sequential(nn.Linear(1, 2000), nn.ReLU(), nn.Linear(2000, 1)).double()
    with torch.no_grad():
        net[0].weight.fill_(1.0)
        net[0].bias.copy_(-0.25 - 5e-13 * torch.arange(2000).double())
    ends = torch.tensor([[0.0], [1.0]]).double()
    trace = trace_segment(net, *ends, method=method, sensitivity=1e-12)
    assert 500 <= trace.crossings <= 1000
    assert trace.t[1:-1].amax() - trace.t[1:-1].amin() == pytest.approx(1e-9, rel=1e-2)


@pytest.mark.parametrize("read", [lambda x: x.data_ptr(), np.from_dlpack, copy.deepcopy])
def test_access_to_memory_is_refused(read):
    def forward(x):
        read(x)
        return torch.relu(x)

    with pytest.raises(UnsupportedOperation):
        trace_segment(Functional(forward), *torch.randn(2, 3))


@pytest.mark.parametrize(
    "function", [trace_segment, trace_segments, estimate_segment, observe_paths]
)
def test_defaults_are_those_of_the_probes_options(function):
    parameters = inspect.signature(function).parameters
    shared = {"sensitivity", "resolution", "tolerance", "evaluations"} & set(parameters)
    assert shared
    for name in shared:
        assert parameters[name].default == LINES.options[name].default


def test_segments_before_one_that_fails_are_traced():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).double()
    with torch.no_grad():
        net[0].weight.fill_(10.0)
    starts, ends = torch.randn(2, 3, 3, dtype=torch.float64)
    ends[2] = torch.finfo(torch.float64).max
    traces = trace_segments(net, starts, ends)
    assert next(traces).regions > 0
    assert next(traces).regions > 0
    with pytest.raises(NotFinite):
        next(traces)
