"""Memory per point, and traces within a memory limit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import record_checked_program
from torch import nn

from nlbench.errors import RequestError
from nlbench.introspection.memory import LiveBytes
from nlbench.introspection.model_copy import double_copy
from nlbench.probes.lines import trace_segment
from nlbench.probes.lines.published import TENSORS_PER_VALUE
from nlbench.probes.lines.recording.point_memory import PointMemory, measure_point_memory, share_out
from nlbench.probes.lines.recording.recorder import record_program

from segments import mlp, networks, small_residual

CPU = torch.device("cpu")


def load(net, x):
    return measure_point_memory(record_checked_program(double_copy(net), x), x)


def test_a_point_takes_the_memory_of_live_values():
    x = torch.zeros(2, 4, dtype=torch.float64)
    net = nn.Sequential(nn.Linear(4, 10, bias=False), nn.ReLU())
    needs = load(net, x)
    # Input and output of the ReLU, with a bound for each unit of either.
    assert needs.width == 8 * 2 * (10 + 10)
    assert needs.waiting == 8 * (10 + 10)
    assert needs.step > needs.width


def test_deeper_networks_keep_more_points_waiting():
    x = torch.zeros(1, 3, dtype=torch.float64)
    shallow, deep = (load(mlp(0, widths=(3, *[8] * n, 2)), x) for n in (2, 6))
    assert deep.waiting == pytest.approx(3 * shallow.waiting)
    assert deep.width == shallow.width


@settings(max_examples=8)
@given(networks(), st.sampled_from(["exact", "adaptive", "sampling"]))
def test_memory_does_not_change_the_trace(drawn, method):
    net, start, end = drawn
    options = {"method": method, "resolution": 50}
    plenty = trace_segment(net, start, end, **options)
    needed = load(net, torch.stack([start, end]).double())
    tensors = TENSORS_PER_VALUE if method == "adaptive" else 1
    weights = sum(8 * tensor.numel() for tensor in net.state_dict().values())
    memory = 2 * tensors * (4 * (needed.step + needed.waiting) + needed.reserve) + 4 * weights
    tight = trace_segment(net, start, end, memory=memory, **options)
    assert tight.regions == plenty.regions
    torch.testing.assert_close(tight.t, plenty.t, rtol=0, atol=1e-11)
    torch.testing.assert_close(tight.values, plenty.values, rtol=1e-9, atol=1e-9)


class Scaled(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, dtype=torch.float64))

    def forward(self, x):
        return torch.relu(x * self.weight + 0.1)


def layers_of(units, depth):
    torch.manual_seed(0)
    net = nn.Sequential(*(Scaled(units) for _ in range(depth)), nn.Linear(units, 2)).double()
    start = torch.randn(units, dtype=torch.float64)
    return net, start, torch.lerp(start, -start, 0.1), 8 * units * (depth + 3)


def test_recording_holds_no_more_than_running_does():
    net, start, _, model = layers_of(256, 10)
    with torch.inference_mode(), LiveBytes() as running:
        net(start[None].clone())
    with LiveBytes() as recording:
        program = record_program(net, start[None].clone())
    assert len(program.steps) == 31
    # The constants of the rules are as large as the weights.
    assert recording.peak - recording.now <= running.peak < 5 * 8 * 256
    assert recording.now <= model


@pytest.mark.parametrize("method", ["exact", "adaptive", "sampling"])
def test_recording_checking_and_tracing_stay_within_the_memory(method):
    net, start, end, model = layers_of(256, 10)
    options = {"method": method, "resolution": 20, "sensitivity": 1e-2}
    needs = load(net, torch.stack([start, end]))
    tensors = TENSORS_PER_VALUE if method == "adaptive" else 1
    waiting = needs.waiting if method == "exact" else 0
    memory = 2 * (2 * model + tensors * 4 * (needs.step + waiting))
    with LiveBytes() as live:
        trace = trace_segment(net, start, end, memory=memory, **options)
    assert trace.crossings > 0
    # All values of the pass are 31 times 2 KiB. The model is copied.
    assert live.peak <= memory / 2 + model
    with pytest.raises(RequestError), LiveBytes() as live:
        trace_segment(net, start, end, memory=16 * 2**10, **options)
    # A copy of the model, that of its recording, the rules' constants, and a pass of one point.
    assert live.peak < 3 * model + 5 * 8 * 256


@pytest.mark.parametrize("method", ["exact", "adaptive", "sampling"])
def test_too_little_memory_raises_in_one_line(method):
    ends = torch.randn(2, 2, 4, 4)
    with pytest.raises(RequestError, match=r"^memory") as caught:
        trace_segment(small_residual(), *ends, method=method, memory=1000)
    assert "\n" not in str(caught.value)


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(1, 64), st.integers(1, 10**10))
def test_shared_points_fit(step, reserve, threads, memory):
    needs = PointMemory(step, step, 2 * step, reserve)
    options = {"threads": threads, "min_points": 8, "needed": 2, "waiting": True}
    usable = memory - min(32 * 2**20, memory / 2)
    if usable < reserve + 2 * 3 * step:
        with pytest.raises(RequestError):
            share_out(needs, CPU, memory, 128, **options)
        return
    count, points = share_out(needs, CPU, memory, 128, **options)
    assert 1 <= count <= threads
    assert 2 <= points <= 128
    assert count * (reserve + points * 3 * step) <= usable
    assert count == 1 or points >= 8


@pytest.mark.parametrize("method", ["exact", "adaptive", "sampling"])
def test_a_network_that_does_nothing_is_one_region(method):
    options = {"resolution": 10} if method == "sampling" else {}
    trace = trace_segment(nn.Identity(), torch.zeros(3), torch.ones(3), method=method, **options)
    assert trace.regions == 1
    assert trace.values.tolist() == [[0, 0, 0], [1, 1, 1]]
