"""A network is recorded once, and again after any change."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from nlbench.probes.lines import trace_segment, trace_segments
from nlbench.probes.lines.recording import recorded_network

SCALE = 1.0
START, END = torch.tensor([-1.0, 2.0, 0.5]), torch.tensor([3.0, -1.0, -2.0])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU())
        self.head = nn.Linear(6, 2)
        self.factor = 1.0
        self.slopes = [0.5]
        self.offset = torch.zeros(2)
        self.act = torch.relu

    def forward(self, x):
        x = self.act(self.body(x) - self.slopes[0])
        return SCALE * self.factor * self.head(x) + self.offset


@pytest.fixture
def recordings(monkeypatch):
    """Return a list of the networks that are recorded during a test."""
    recorded, record = [], recorded_network.record_program

    def counting(network, example):
        recorded.append(network)
        return record(network, example)

    monkeypatch.setattr(recorded_network, "record_program", counting)
    return recorded


def traced(net, **options):
    return trace_segment(net, START, END, **options)


def test_an_unchanged_network_is_recorded_once(recordings):
    net = Net()
    first = traced(net)
    again = traced(net)
    trace_segment(net, END, START)
    list(trace_segments(net, START[None], END[None]))
    assert len(recordings) == 1
    assert torch.equal(again.t, first.t)
    assert torch.equal(again.values, first.values)


def _write_in_place(net):
    with torch.no_grad():
        net.head.weight.mul_(2)


def _write_through_data(net):
    net.body[0].weight.data[0] *= -1


def _permute_through_data(net):
    # The sum of the weights does not change, nor do version, address and shape.
    net.head.weight.data.copy_(net.head.weight.data.flip(1))


def _replace_parameter(net):
    net.head.bias = nn.Parameter(torch.ones(2))


def _swap_module(net):
    net.body[1] = nn.LeakyReLU(0.2)


def _add_module(net):
    net.body.append(nn.Hardtanh(0.0, 0.1))


def _share_module(net):
    net.body[2] = nn.Linear(6, 6)
    net.body.append(net.body[2])


def _add_hook(net):
    net.body[0].register_forward_hook(lambda module, args, output: 2 * output)


def _add_pre_hook(net):
    net.head.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def _patch_forward(net):
    net.forward = lambda x: 2 * Net.forward(net, x)


def _set_attribute(net):
    net.factor = 3.0


def _change_list(net):
    net.slopes[0] = 0.25


def _write_to_tensor_attribute(net):
    net.offset += 1


def _set_function(net):
    net.act = torch.abs


def _set_global(net):
    global SCALE
    SCALE = 2.0


CHANGES = [
    _write_in_place, _write_through_data, _permute_through_data, _replace_parameter, _swap_module,
    _add_module, _share_module, _add_hook, _add_pre_hook, _patch_forward, _set_attribute,
    _change_list, _write_to_tensor_attribute, _set_function, _set_global,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_network_is_recorded_again(change, recordings, monkeypatch):
    monkeypatch.setattr(f"{__name__}.SCALE", 1.0)
    net = Net().eval()
    before = traced(net)
    change(net)
    trace = traced(net)
    assert len(recordings) == 2
    with torch.no_grad():
        expected = net.double()(torch.lerp(START.double(), END.double(), trace.t[:, None]))
    torch.testing.assert_close(trace.values, expected, rtol=1e-6, atol=1e-6)
    assert trace.regions != before.regions or not torch.allclose(trace.values, before.values)


def test_another_mode_shape_or_precision_is_recorded_again(recordings):
    net = nn.Sequential(nn.ReLU(), nn.Dropout())
    trace_segment(net, START, END)
    net.eval()
    trace_segment(net, START, END)
    trace_segment(net, START[:2], END[:2])
    trace_segment(net, START[:2], END[:2], dtype=torch.float32)
    assert len(recordings) == 4


def test_networks_of_unknown_state_are_recorded_each_time(recordings):
    inner = Net()
    net = Net()
    net.act = lambda x: inner.body[2](x)
    traced(net)
    traced(net)
    assert len(recordings) == 2


def test_a_recording_is_released_with_its_network(recordings):
    net = Net()
    traced(net)
    recorded = weakref.ref(recordings.pop())
    assert recorded() is not None
    del net
    gc.collect()
    assert recorded() is None


def test_few_recordings_are_kept():
    nets = [Net() for _ in range(recorded_network.MAX_RECORDINGS + 2)]
    for net in nets:
        traced(net)
    assert len(recorded_network._RECORDINGS) <= recorded_network.MAX_RECORDINGS


def test_a_large_network_is_not_kept(recordings, monkeypatch):
    monkeypatch.setattr(recorded_network, "MAX_RECORDED_BYTES", 100)
    net = Net()
    traced(net)
    traced(net)
    assert len(recordings) == 2


def test_a_copy_is_another_network(recordings):
    net = Net()
    traced(net)
    traced(copy.deepcopy(net))
    assert len(recordings) == 2
