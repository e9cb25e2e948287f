"""Networks that compute in another type than their own, compared with themselves."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nlbench.introspection.model_copy import (
    FloatTypeMode,
    cpu_copy,
    double_copy,
    shape_copy,
    typed_copy,
)
from nlbench.probes.lines import estimate_segment, trace_segment

OTHER = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
OTHER_DOUBLE = OTHER.double()


class Net(nn.Module):
    """A forward function, with tensors that are no parameters of the network."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.layer = nn.Linear(4, 4)
        self.matrix = OTHER.clone()
        self.nested = {"list": [OTHER.clone()], "object": SimpleNamespace(matrix=OTHER.clone())}
        self.parameters_in_list = [nn.Parameter(OTHER.clone())]
        self.computed = (2 * nn.Parameter(OTHER.clone()),)
        self.array = OTHER.numpy()
        self.index = torch.tensor([3, 1, 0, 2])

    def forward(self, x):
        return self.function(self, self.layer(x))


def written(m, h):
    y = torch.zeros(len(h), 4)
    y[:, 1:] = h[:, 1:]
    y += OTHER[0]
    return y


FORWARD = {
    "attribute": lambda m, h: h @ m.matrix,
    "list": lambda m, h: h @ m.nested["list"][0],
    "object": lambda m, h: h @ m.nested["object"].matrix,
    "unregistered parameter": lambda m, h: h @ m.parameters_in_list[0],
    "computed": lambda m, h: h @ m.computed[0],
    "numpy": lambda m, h: h @ torch.from_numpy(m.array),
    "variable of the file": lambda m, h: F.linear(h, OTHER),
    "in a list": lambda m, h: torch.einsum("bi,ij->bj", [h, OTHER]),
    "by name": lambda m, h: torch.matmul(input=h, other=OTHER),
    "constant": lambda m, h: h @ torch.ones(4, 4),
    "integers": lambda m, h: h @ (torch.arange(16.0).reshape(4, 4) / 7),
    "index": lambda m, h: h[:, m.index],
    "like": lambda m, h: h @ torch.ones(4, 4).type_as(h) + torch.zeros_like(h, dtype=h.dtype),
    "to another": lambda m, h: h.to(m.matrix) @ OTHER.to(h),
    "float": lambda m, h: h.float() @ OTHER,
    "to": lambda m, h: h.to(torch.float32).to(dtype=torch.float32) @ m.matrix,
    "type": lambda m, h: h.type(torch.float32).type(torch.FloatTensor).type("torch.FloatTensor"),
    "sum in a type": lambda m, h: h.sum(1, keepdim=True, dtype=torch.float32) @ OTHER[:1],
    "there and back": lambda m, h: h.double().exp().float() @ OTHER,
    "convolution": lambda m, h: F.conv1d(h[:, None], OTHER[None, :1, :3])[:, 0],
    "written": written,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", FORWARD)
def test_a_copy_in_another_type_computes_the_same(name, dtype):
    torch.manual_seed(0)
    net, x = Net(FORWARD[name]), torch.randn(3, 4)
    with torch.no_grad():
        expected = net(x)
        output = typed_copy(net, dtype)(x.to(dtype))
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), expected, rtol=1e-5, atol=1e-5)
    assert net.matrix.dtype == net.computed[0].dtype == torch.float32


def test_a_double_network_computes_in_single_precision():
    net = Net(lambda m, h: h.double() @ OTHER_DOUBLE + torch.ones(4, dtype=torch.float64)).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    output = typed_copy(net, torch.float32)(x.float())
    assert output.dtype == torch.float32
    torch.testing.assert_close(output.double(), net(x), rtol=1e-5, atol=1e-5)


def test_a_half_network_computes_in_double_precision():
    net = Net(lambda m, h: (h.half() * torch.ones(4, dtype=torch.float16)).float()).half()
    x = torch.randn(3, 4, dtype=torch.float64)
    h = F.linear(x, net.layer.weight.double(), net.layer.bias.double())
    torch.testing.assert_close(double_copy(net)(x), h)


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
def test_a_narrower_type_still_rounds(narrow):
    net, x = Net(lambda m, h: h.to(narrow).float()), torch.randn(3, 4, dtype=torch.float64)
    twin = double_copy(net)
    assert torch.equal(twin(x), twin.layer(x).to(narrow).double())


def test_constants_have_the_precision_of_the_network():
    x = torch.zeros(3, 4, dtype=torch.float64)
    added = double_copy(Net(lambda m, h: 0 * h + torch.tensor(0.1)))(x)
    assert torch.equal(added, torch.full_like(x, float(torch.tensor(0.1))))
    random = double_copy(Net(lambda m, h: 0 * h + torch.randn(4)))
    torch.manual_seed(0)
    expected = torch.randn(4).double()
    torch.manual_seed(0)
    assert torch.equal(random(x)[0], expected)


def test_a_tensor_that_is_written_is_not_copied():
    log = torch.zeros(4)
    double_copy(Net(lambda m, h: (log.copy_(h[0]), h)[1]))(torch.ones(1, 4).double())
    assert log.abs().sum() > 0


def test_the_mode_ends_with_the_call():
    def interrupted(m, h):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        double_copy(Net(interrupted))(torch.ones(1, 4).double())
    assert torch.ones(2).dtype == torch.float32


def test_copies_of_a_copy():
    net = Net(lambda m, h: h @ torch.ones(4, 4))
    twin = copy.deepcopy(typed_copy(net, torch.float64))
    assert twin(torch.ones(1, 4).double()).dtype == torch.float64
    again = typed_copy(twin, torch.float32)
    assert again(torch.ones(1, 4)).dtype == torch.float32
    assert isinstance(again, Net)
    assert type(again).__name__ == "Net"


def test_shapes_and_devices_reach_nested_tensors():
    net = Net(lambda m, h: h @ m.nested["list"][0])
    assert shape_copy(net)(torch.ones(1, 4, device="meta").double()).shape == (1, 4)
    twin = cpu_copy(net)
    assert twin.nested["list"][0] is not net.nested["list"][0]
    assert twin.nested["list"][0].dtype == torch.float32


def test_shared_tensor_stays_shared():
    net = Net(lambda m, h: h)
    net.nested["list"].append(net.matrix)
    twin = double_copy(net)
    assert twin.nested["list"][1] is twin.matrix


@pytest.mark.parametrize(("own", "other"), [(torch.float32, OTHER), (torch.float64, OTHER_DOUBLE)])
def test_lines_through_networks_with_constants(own, other):
    torch.manual_seed(1)
    net = Net(lambda m, h: F.relu(h.to(own) @ other + torch.full((4,), 0.01, dtype=own))).to(own)
    start, end = torch.randn(2, 4)
    trace = trace_segment(net, start, end)
    assert trace.crossings > 0
    assert estimate_segment(net, start, end).crossings == trace.crossings


def test_non_float_types_are_unchanged():
    with FloatTypeMode(torch.float32, torch.float64):
        assert torch.arange(3).dtype == torch.int64
        assert torch.ones(3).to(torch.int32).dtype == torch.int32
        assert torch.ones(3).to(torch.complex64).dtype == torch.complex64
        assert (torch.ones(3) > 0).dtype == torch.bool


def test_float64_copies_are_contiguous():
    depthwise = nn.Conv2d(6, 6, 3, groups=6).to(memory_format=torch.channels_last)
    # Its only channel is first and last.
    assert depthwise.weight.stride() == (9, 1, 3, 1)
    assert typed_copy(depthwise, torch.float64).weight.stride() == (9, 9, 3, 1)
    assert typed_copy(depthwise, torch.float32).weight.stride() == (9, 1, 3, 1)
