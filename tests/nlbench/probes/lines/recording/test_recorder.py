"""Recorded programs are compared with the network, and their sites with those of `sites`."""

import copy

import pytest
import torch
from programs import Net, assert_reproduces, record_checked_program, record_network
from torch import nn
from torch.nn import functional as F

from nlbench.errors import UnsupportedOperation
from nlbench.introspection.model_copy import double_copy
from nlbench.models.sparsified.sparsification import sparsify
from nlbench.probes.lines.recording.agreement import agree, is_same
from nlbench.probes.lines.recording.program import run_program
from nlbench.probes.lines.recording.recorder import record_program
from nlbench.probes.sites.sites_observation import list_sites

CONV = {"c": nn.Conv2d(3, 4, 3)}


@pytest.mark.parametrize(
    ("function", "modules", "shape"),
    [
        (lambda m, x: m.c(x).view(x.size(0), -1), CONV, (3, 6, 6)),
        (lambda m, x: m.c(x).reshape(1, -1), CONV, (3, 6, 6)),
        (lambda m, x: m.c(x).flatten(1), CONV, (3, 6, 6)),
        (lambda m, x: x.permute(0, 2, 3, 1).mean((1, 2)), {}, (3, 4, 4)),
        (lambda m, x: x.transpose(1, 2).contiguous().sum(1), {}, (3, 4)),
        (lambda m, x: x[:, 0] - x[:, 1:].sum(1) + x[:, [1, 2]].mean(1), {}, (3, 4)),
        (lambda m, x: torch.cat([x, x.unsqueeze(2).squeeze(2)], 1), {}, (3,)),
        (lambda m, x: torch.stack(x.chunk(3, 1), 2).flatten(1), {}, (6,)),
        (lambda m, x: sum(x.split(2, 1)), {}, (6,)),
        (lambda m, x: torch.hstack(list(x.unbind(1))[::-1]), {}, (2, 3)),
        (lambda m, x: torch.cat([x, torch.ones(1, 2).double()], 1), {}, (3,)),
        (lambda m, x: torch.cat([torch.zeros_like(x), x], 1), {}, (3,)),
        (lambda m, x: x + torch.arange(3.0).double().expand_as(x), {}, (3,)),
        (lambda m, x: F.pad(x, (1, 2)) * 3, {}, (4,)),
        (lambda m, x: F.pad(x, (1, 1), mode="reflect"), {}, (2, 4)),
        (lambda m, x: F.pad(x, (1, 1), mode="replicate"), {}, (2, 4)),
        (lambda m, x: m.c(x), {"c": nn.Conv2d(3, 3, 3, padding="same", groups=3)}, (3, 5, 5)),
        (lambda m, x: m.c(x), {"c": nn.Conv1d(2, 4, 2, stride=2)}, (2, 6)),
        (lambda m, x: m.c(x), {"c": nn.Conv3d(1, 2, 2, dilation=2)}, (1, 4, 4, 4)),
        (lambda m, x: m.c(x), {"c": nn.ConvTranspose2d(3, 2, 2, 2)}, (3, 3, 3)),
        (lambda m, x: m.c(x), {"c": nn.BatchNorm2d(3, affine=False)}, (3, 2, 2)),
        (lambda m, x: m.c(x), {"c": nn.BatchNorm1d(3)}, (3,)),
        (lambda m, x: F.avg_pool2d(x, 2) + F.adaptive_avg_pool2d(x, 2), {}, (3, 4, 4)),
        (lambda m, x: F.max_pool2d(F.relu(x), 2, 1), {}, (3, 4, 4)),
        (lambda m, x: F.adaptive_max_pool2d(x, 2), {}, (3, 5, 5)),
        (lambda m, x: F.interpolate(x, scale_factor=2), {}, (3, 2, 2)),
        (lambda m, x: F.interpolate(x, scale_factor=2, mode="bilinear"), {}, (3, 2, 2)),
        (lambda m, x: F.pixel_shuffle(x, 2), {}, (4, 2, 2)),
        (lambda m, x: x.roll(1, 1).flip(1).repeat(1, 2), {}, (3,)),
        (lambda m, x: x @ torch.ones(3, 2).double() + 1, {}, (3,)),
        (lambda m, x: torch.ones(2, 3).double() @ x, {}, (3, 4)),
        (lambda m, x: torch.bmm(torch.ones(1, 2, 3).double(), x), {}, (3, 4)),
        (lambda m, x: torch.einsum("bij,jk->bik", x, torch.ones(4, 2).double()), {}, (3, 4)),
        (lambda m, x: torch.addmm(torch.ones(2).double(), x, torch.ones(3, 2).double()), {}, (3,)),
        (
            lambda m, x: m.d(m.i(x.clone().detach().double())),
            {"d": nn.Dropout(), "i": nn.Identity()},
            (3,),
        ),
        (lambda m, x: 1 - 2 * -x / 3, {}, (3,)),
        (lambda m, x: torch.sub(x, x.abs(), alpha=2), {}, (3,)),
        (lambda m, x: x.expand(-1, 4, -1).flatten(1), {}, (1, 2)),
        (lambda m, x: m.c(x), {"c": nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))}, (3,)),
        (lambda m, x: torch.full((1, 2), 3.0, dtype=torch.float64), {}, (3,)),
    ],
)
def test_an_affine_operation_is_reproduced_on_a_batch(function, modules, shape):
    assert_reproduces(Net(function, **copy.deepcopy(modules)), *shape)


@pytest.mark.parametrize(
    "parts",
    [
        lambda x: x.split(4),
        lambda x: x.chunk(3),
        lambda x: torch.split(x, 1),
        lambda x: [x[start : start + 4] for start in range(0, len(x), 4)],
    ],
)
def test_a_batch_computed_in_parts_is_one_function(parts):
    def forward(m, x):
        return torch.cat([F.relu(m.layer(part)) for part in parts(x)])

    network, program = record_network(Net(forward, layer=nn.Linear(4, 3)), 4)
    inputs = torch.randn(10, 4, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(run_program(program, inputs), network(inputs))


def test_programs_that_drop_points_are_refused():
    network = double_copy(Net(lambda m, x: x[:1] * 2))
    program = record_program(network, torch.randn(1, 4).double())
    with pytest.raises(UnsupportedOperation, match="slice"):
        run_program(program, torch.randn(8, 4).double())


def test_in_place_operations_rebind_their_tensor():
    def forward(m, x):
        skip = x * 2
        x.relu_().mul_(3).add_(skip)
        y = torch.zeros_like(x)
        y += x
        return y.sub_(1)

    program = assert_reproduces(Net(forward), 4)
    assert program.sites == ("relu",)


def _through_a_view(m, x):
    y = x * 1
    y[:, :2].relu_()
    return y


def _early_view(m, x):
    y = x * 1
    view = y.view(1, 2, 2)
    y.relu_()
    return view.flatten(1)


def _late_view(m, x):
    y = x * 1
    y.relu_()
    return y.view(1, 2, 2).sum(1)


def _into_a_buffer(m, x):
    y = torch.zeros(1, 6).double()
    y[:, 1:5] = x
    y[:, 2] = 7
    return torch.relu(y) + y[:, :1]


def _into_a_slice(m, x):
    y = x * 2
    other = y.t()
    y[:, 1:3] = x[:, 2:] - 1
    y[:, ::2] += 1
    other[3:] = 5
    return y


def _swapped(m, x):
    y = x.clone()
    y[:, :2], y[:, 2:] = x[:, 2:] * 1, x[:, :2] * 1
    return y.relu_().flip(1)


@pytest.mark.parametrize(
    "forward", [_through_a_view, _early_view, _late_view, _into_a_buffer, _swapped]
)
def test_writes_are_recorded_through_aliases(forward):
    assert_reproduces(Net(forward), 4)


def _changes_a_factor(m, x):
    scale = torch.ones(4).double()
    x = x * scale
    scale.mul_(2)
    return x * scale


def _changes_a_matrix(m, x):
    weight = torch.ones(2, 4)
    y = (weight @ x.T).T
    weight.mul_(2)
    return y


@pytest.mark.parametrize(
    ("forward", "name"),
    [
        (_into_a_slice, "memory|batch"),
        (_changes_a_factor, "constant"),
        (_changes_a_matrix, "constant"),
    ],
)
def test_unrecordable_writes_are_refused(forward, name):
    with pytest.raises(UnsupportedOperation, match=name):
        record_network(Net(forward), 4)


def test_sites_are_named_by_module_and_call():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.relu = nn.ReLU(inplace=True)
            self.pool = nn.MaxPool2d(2)

        def forward(self, x):
            x = self.relu(self.relu(x) - 1)
            return self.pool(F.relu(F.relu6(F.relu(x, inplace=True) - 1)))

    net = Net(lambda m, x: F.max_pool2d(F.relu(m.b(x)), 2), b=Branch())
    _, program = record_network(net, 1, 4, 4)
    assert program.sites == (
        "b.relu",
        "b.relu:1",
        "b/relu",
        "b/relu6",
        "b/relu:1",
        "b.pool",
        "relu",
        "max_pool2d",
    )


def test_sites_are_named_as_in_the_probe_sites():
    inner = Net(lambda m, x: F.relu(m.act(m.act(x)) + F.relu6(x)), act=nn.LeakyReLU())
    net = nn.Sequential(nn.Linear(3, 3), nn.PReLU(), inner, nn.Hardtanh(), inner)
    _, program = record_network(net, 3)
    assert program.sites == tuple(site.name for site in list_sites(net, torch.randn(1, 3)))


class Leak(nn.LeakyReLU):
    def forward(self, input):
        return F.leaky_relu(input, 0.3)


class Twice(nn.ReLU):
    def forward(self, input):
        return torch.relu(input) - torch.relu(input - 1)


class Pool(nn.MaxPool1d):
    pass


def test_subclasses_are_named_by_their_module():
    net = nn.Sequential(Leak(), Pool(2), Twice())
    _, program = record_network(net, 3, 4)
    # The two ReLUs called inside `Twice` are sites of their own.
    assert program.sites == ("0", "1", "2/relu", "2/relu:1")


@pytest.mark.parametrize("layerwise", [True, False])
def test_sparsified_relus_are_named_as_sites(layerwise):
    relu = nn.ReLU()
    net = nn.Sequential(nn.Linear(3, 4), relu, nn.Linear(4, 4), relu, Net(lambda m, x: F.relu(x)))
    net = sparsify(net, layerwise=layerwise)
    _, program = record_network(net, 3)
    assert program.sites == ("1.0", "1.1", "4.relu")
    assert program.sites == tuple(site.name for site in list_sites(net, torch.randn(1, 3)))


def test_a_caught_error_keeps_the_names():
    def attempt(m, x):
        try:
            return m.wrong(x)
        except RuntimeError:
            return F.relu(x)

    net = Net(lambda m, x: m.inner(x), inner=Net(attempt, wrong=nn.Linear(9, 9)))
    _, program = record_network(net, 3)
    assert program.sites == ("inner/relu",)


def test_unused_steps_are_dropped():
    program = assert_reproduces(Net(lambda m, x: (F.relu(x), x * 2)[1]), 3)
    assert program.sites == ()
    assert [step.operation for step in program.steps] == ["mul"]


@pytest.mark.parametrize("before", [True, False])
def test_activations_in_hooks_are_sites(before):
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    if before:
        net.register_forward_pre_hook(lambda module, inputs: (F.relu(inputs[0]),))
    else:
        net.register_forward_hook(lambda module, inputs, output: F.relu(output - 1))
    _, program = record_network(net, 3)
    assert sorted(program.sites) == ["1", "relu"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_computed_before_each_pass_are_copied():
    net = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.ReLU())
    weight = net[0].weight
    program = record_checked_program(double_copy(net), torch.randn(2, 3, dtype=torch.float64))
    x = torch.randn(5, 3)
    torch.testing.assert_close(run_program(program, x.double()).float(), net(x).detach())
    assert net[0].weight.requires_grad
    assert weight.dtype == torch.float32


W = torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize(
    ("function", "operations"),
    [
        (lambda m, x: (W @ x.T).T, ["matmul"]),
        (lambda m, x: torch.mm(W[:3], x.t()).transpose(0, 1), ["mm"]),
        (lambda m, x: (W @ F.relu(W @ x.mT + W[:, :1])).mT, ["matmul", "add", "relu", "matmul"]),
        (lambda m, x: torch.addmm(W[:, :1], W, x.T, alpha=2).T, ["addmm"]),
        (lambda m, x: torch.addmm(x.T, W, x.T).T, ["addmm"]),
        (lambda m, x: torch.addmm(torch.ones(1).double(), W, x.T).T, ["addmm"]),
        (lambda m, x: (x.permute(1, 0) - 0.5 * x.swapaxes(0, 1)).movedim(1, 0), ["mul", "sub"]),
        (lambda m, x: torch.maximum(x.T, W[:, 1:2]).T, ["maximum"]),
        (lambda m, x: F.dropout(x.T, training=False).T.contiguous(), []),
        (lambda m, x: x.T.T * 2, ["mul"]),
        (lambda m, x: x.T.reshape(4, 1).T if x.T is None else x + len(x.T), ["add"]),
        (lambda m, x: (x.T + torch.zeros_like(x.T)).T, ["add"]),
    ],
)
def test_matrices_with_samples_last(function, operations):
    program = assert_reproduces(Net(function), 4)
    assert [s.operation for s in program.steps if s.operation != "contiguous"] == operations


@pytest.mark.parametrize(
    ("function", "sites"),
    [
        (lambda m, x: x.clamp(max=W[0]), ("clamp",)),
        (lambda m, x: x.clamp(W[0]), ("clamp",)),
        (lambda m, x: torch.clip(x, W[0], W[0] + 0.5), ("clip", "clip:1")),
        (lambda m, x: x.clamp_min(W[0]).clamp_max(W[0] + 0.5), ("clamp_min", "clamp_max")),
        (lambda m, x: (2 * x).clamp_(W[0], max=W[0].abs()), ("clamp", "clamp:1")),
        (lambda m, x: x.clamp(max=x.mean(1, keepdim=True)), ("clamp",)),
        (lambda m, x: x.clamp(min=torch.tensor(0.25)), ("clamp",)),
        (lambda m, x: torch.clamp(W[:1], max=x), ("clamp",)),
    ],
)
def test_clamping_to_tensors(function, sites):
    program = assert_reproduces(Net(function), 4)
    assert program.sites == sites


def test_constants_written_next_to_traced_values_are_recorded():
    def forward(m, x):
        y = torch.zeros(1, 4)
        constant = y[:, 2:]
        y[:, :2] = x[:, :2]
        before = 2 * y
        constant.fill_(5.0)
        return before + y

    assert_reproduces(Net(forward), 4)


def test_negative_outputs_agree_up_to_rounding():
    x = -torch.ones(2, 1, dtype=torch.float64)
    assert agree(x - 1e-11, x).all()
    assert not agree(x - 1e-8, x).any()


def test_networks_with_negative_outputs_agree_up_to_rounding():
    x = -torch.ones(2, 1)
    assert is_same(x * (1 + 1e-6), x, torch.float32)
    assert not is_same(x * (1 + 1e-2), x, torch.float32)


def test_mixing_is_detected_despite_a_large_constant():
    def forward(m, x):
        h = F.max_pool1d(F.pad(x, (1, 1), value=-1e30)[:, None], 3, 1)[:, 0]
        return h - h.mean(0, keepdim=True) + 2 * h

    with pytest.raises(UnsupportedOperation, match="mean"):
        record_network(Net(forward), 4)


def test_wrong_programs_are_detected_despite_large_constants():
    def forward(m, x):
        h = F.max_pool1d(F.pad(x, (1, 1), value=-1e30)[:, None], 3, 1)[:, 0]
        return h + torch.randn(4).double()

    with pytest.raises(UnsupportedOperation):
        record_network(Net(forward), 4)


def test_outputs_that_are_only_rounding_are_accepted():
    assert_reproduces(Net(lambda m, x: F.relu((x + 1000) - 1000 - x)), 4)
    assert_reproduces(Net(lambda m, x: m.a(x) * 3 - m.a(x * 3), a=nn.Linear(4, 4, bias=False)), 4)


def test_arguments_may_be_passed_by_name():
    slope = torch.tensor([0.25]).double()
    net = Net(lambda m, x: F.prelu(input=F.linear(input=x, weight=m.w), weight=slope))
    net.w = nn.Parameter(torch.randn(3, 3))
    assert assert_reproduces(net, 3).sites == ("prelu",)
