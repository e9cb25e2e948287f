"""Recording is checked against the network itself, and refusals by what they name."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nlbench.errors import RequestError, UnsupportedOperation
from nlbench.models.sparsified import sparsify
from nlbench.probes.program import double_copy, record, run_program
from nlbench.probes.sites import list_sites


class Net(nn.Module):
    """A forward function with the modules that it uses."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.function(self, x)


def recorded(net, *shape):
    network = double_copy(net)
    return network, record(network, torch.randn(3, *shape, dtype=torch.float64))


def assert_reproduces(net, *shape):
    """The program gives on a batch what the network gives on other, single inputs."""
    network, program = recorded(net, *shape)
    inputs = torch.randn(5, *shape, dtype=torch.float64)
    with torch.no_grad():
        expected = torch.cat([network(one.clone()) for one in inputs.split(1)])
    torch.testing.assert_close(run_program(program, inputs), expected, rtol=1e-12, atol=1e-12)
    return program


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


def test_in_place_operations_rebind_their_tensor():
    def forward(m, x):
        skip = x * 2
        x.relu_().mul_(3).add_(skip)
        y = torch.zeros_like(x)
        y += x
        return y.sub_(1)

    program = assert_reproduces(Net(forward), 4)
    assert program.sites == ("relu",)


def test_a_change_through_a_view_is_refused_when_the_base_is_read():
    def forward(m, x):
        y = x * 1
        y[:, :2].relu_()
        return y

    with pytest.raises(UnsupportedOperation, match="memory was changed in place"):
        recorded(Net(forward), 4)


def test_a_view_taken_before_a_change_is_refused_and_one_after_it_is_not():
    def early(m, x):
        y = x * 1
        view = y.view(1, 2, 2)
        y.relu_()
        return view.flatten(1)

    def late(m, x):
        y = x * 1
        y.relu_()
        return y.view(1, 2, 2).sum(1)

    with pytest.raises(UnsupportedOperation, match="memory was changed in place"):
        recorded(Net(early), 4)
    assert_reproduces(Net(late), 4)


def test_a_result_written_into_a_buffer_is_refused():
    def forward(m, x):
        y = torch.zeros(1, 4).double()
        y[:, 1:3] = x
        return y

    with pytest.raises(UnsupportedOperation, match="copy"):
        recorded(Net(forward), 2)


def test_a_constant_changed_after_it_was_read_is_refused():
    def forward(m, x):
        scale = torch.ones(2).double()
        x = x * scale
        scale.mul_(2)
        return x * scale

    with pytest.raises(UnsupportedOperation, match="changes a constant"):
        recorded(Net(forward), 2)


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
    _, program = recorded(net, 1, 4, 4)
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


def test_sites_bear_the_names_that_the_probe_sites_gives_them():
    inner = Net(lambda m, x: F.relu(m.act(m.act(x)) + F.relu6(x)), act=nn.LeakyReLU())
    net = nn.Sequential(nn.Linear(3, 3), nn.PReLU(), inner, nn.Hardtanh(), inner)
    _, program = recorded(net, 3)
    assert program.sites == tuple(site.name for site in list_sites(net, torch.randn(1, 3)))


class Leak(nn.LeakyReLU):
    def forward(self, input):
        return F.leaky_relu(input, 0.3)


class Twice(nn.ReLU):
    def forward(self, input):
        return torch.relu(input) - torch.relu(input - 1)


class Pool(nn.MaxPool1d):
    pass


def test_a_subclass_of_an_activation_or_pool_bears_the_name_of_its_module():
    net = nn.Sequential(Leak(), Pool(2), Twice())
    _, program = recorded(net, 3, 4)
    assert program.sites == ("0", "1", "2", "2:1")


@pytest.mark.parametrize("layerwise", [True, False])
def test_sparsified_relus_bear_the_names_that_the_probe_sites_gives_them(layerwise):
    relu = nn.ReLU()
    net = nn.Sequential(nn.Linear(3, 4), relu, nn.Linear(4, 4), relu, Net(lambda m, x: F.relu(x)))
    net = sparsify(net, layerwise=layerwise)
    _, program = recorded(net, 3)
    assert program.sites == ("1.0", "1.1", "4.relu")
    assert program.sites == tuple(site.name for site in list_sites(net, torch.randn(1, 3)))


def test_an_error_that_the_network_catches_leaves_the_names_right():
    def attempt(m, x):
        try:
            return m.wrong(x)
        except RuntimeError:
            return F.relu(x)

    net = Net(lambda m, x: m.inner(x), inner=Net(attempt, wrong=nn.Linear(9, 9)))
    _, program = recorded(net, 3)
    assert program.sites == ("inner/relu",)


def test_a_model_of_complex_numbers_is_refused():
    net = Net(lambda m, x: F.relu(x * m.w.abs()))
    net.w = nn.Parameter(torch.tensor([3 + 4j, 1j, 2 + 0j]))
    with pytest.raises(RequestError, match="complex numbers, expected real ones"):
        recorded(net, 3)


def test_a_model_without_weights_is_refused():
    with torch.device("meta"):
        net = nn.Linear(3, 2)
    with pytest.raises(RequestError, match="on the device meta: it has shapes, but no weights"):
        recorded(net, 3)


def test_what_the_output_does_not_need_is_left_out():
    program = assert_reproduces(Net(lambda m, x: (F.relu(x), x * 2)[1]), 3)
    assert program.sites == ()
    assert [step.operation for step in program.steps] == ["mul"]


def test_width_counts_what_is_alive_at_once():
    _, program = recorded(Net(lambda m, x: F.relu(m.a(x)) + x, a=nn.Linear(4, 4)), 4)
    assert program.width == 12
    chain = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 2))
    assert recorded(chain, 4)[1].width == 20


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m, x: torch.sigmoid(x), "sigmoid at the network: not piecewise affine"),
        (lambda m, x: F.gelu(x), "gelu at the network: not piecewise affine"),
        (lambda m, x: F.silu(x, inplace=True), "silu at the network: not piecewise affine"),
        (lambda m, x: x.softmax(1), "softmax at the network: not piecewise affine"),
        (lambda m, x: F.hardswish(x), "hardswish at the network: not piecewise affine"),
        (lambda m, x: F.hardshrink(x), "hardshrink at the network: not piecewise affine"),
        (lambda m, x: (x > 0) * x, "gt at the network: not piecewise affine"),
        (lambda m, x: F.layer_norm(x, (3,)), "layer_norm at the network: not piecewise affine"),
        (lambda m, x: F.threshold(x, 1, 0), "threshold at the network: it jumps from 0 to 1 at 1"),
        (lambda m, x: x * x, "mul at the network: a product of two values"),
        (lambda m, x: x[:, None] @ x[..., None], "matmul at the network: a product of two values"),
        (lambda m, x: 1 / x, "reciprocal at the network: not piecewise affine"),
        (lambda m, x: torch.ones(3).double() / x, "div at the network: not piecewise affine"),
        (lambda m, x: torch.divide(torch.ones(3), x), "divide at the network: not piecewise"),
        (lambda m, x: torch.true_divide(x, x), "true_divide at the network: a product of two"),
        (lambda m, x: torch.divide(x, 99, rounding_mode="trunc"), "divide at the network: not"),
        (lambda m, x: F.linear(x, x), "linear at the network: its parameters depend on the input"),
        (lambda m, x: x.clamp(max=x.mean(1, keepdim=True)), "clamp at the network: bounds that"),
        (lambda m, x: x.amax(1), "amax at the network: not piecewise affine"),
        (lambda m, x: x.max(1)[0], "max at the network: the maximum over an axis"),
        (lambda m, x: x.float(), r"to at the network: it converts to torch\.float32"),
        (lambda m, x: F.instance_norm(x[:, None]), "instance_norm at the network: it uses the"),
        (lambda m, x: x if x.sum() > 0 else -x, "sum at the network: it moves or drops the axis"),
        (lambda m, x: x * float(x[0, 0]), "the values of the input decide|moves or drops the axis"),
        (lambda m, x: x * x.tolist()[0][0], "decide what is computed"),
        (lambda m, x: x - x.mean(0, keepdim=True), "mean at the network: it mixes the samples"),
        (lambda m, x: x.cumsum(0), "cumsum at the network: not piecewise affine"),
        (lambda m, x: x.flip(0), "flip at the network: it mixes the samples"),
        (lambda m, x: x.unsqueeze(0), "unsqueeze at the network: it mixes the samples"),
        (lambda m, x: x.squeeze(0), "squeeze at the network: it moves or drops the axis"),
        (lambda m, x: F.dropout(x), "dropout at the network: it draws at random"),
        (lambda m, x: x + torch.randn(3).double(), "does not reproduce"),
        (lambda m, x: x * x.data.numpy()[0, 0], "decide what is computed|not reproduce"),
        (lambda m, x: torch.where(torch.ones(3) > 0, x, x), "where at the network: not piecewise"),
    ],
)
def test_what_is_not_piecewise_affine_is_refused_by_name(function, message):
    with pytest.raises(UnsupportedOperation, match=message):
        recorded(Net(function), 3)


def test_positions_of_maxima_may_be_made_but_not_used():
    pool = {"return_indices": True}
    unused = Net(lambda m, x: F.adaptive_max_pool1d(x, 2, **pool)[0])
    used = Net(lambda m, x: F.adaptive_max_pool1d(x, 2, **pool)[1] * 1.0)
    assert_reproduces(unused, 3, 6)
    with pytest.raises(UnsupportedOperation, match="positions of maxima"):
        recorded(used, 3, 6)


def test_a_refusal_names_the_innermost_module():
    net = nn.Sequential(
        nn.Linear(3, 3), nn.ModuleDict({"mlp": nn.Sequential(nn.ReLU(), nn.SiLU())})["mlp"]
    )
    with pytest.raises(UnsupportedOperation) as caught:
        recorded(net, 3)
    assert (caught.value.operation, caught.value.place) == ("silu", "1.1")


def test_batch_norm_with_the_statistics_of_the_batch_is_refused():
    net = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False))
    with pytest.raises(UnsupportedOperation, match=r"^batch_norm at 0: it uses the statistics"):
        recorded(net, 3, 4)


def test_attention_is_refused_as_a_whole():
    net = Net(lambda m, x: F.scaled_dot_product_attention(x, x, x))
    with pytest.raises(UnsupportedOperation, match=r"^scaled_dot_product_attention at"):
        recorded(net, 4, 8)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m, x: (x, x), "returns a tuple"),
        (lambda m, x: torch.ones(3), r"returns shape \(3,\)"),
        (
            lambda m, x: m.missing_layer if x is None else F.linear(x, torch.ones(2, 9).double()),
            "can't be run",
        ),
    ],
)
def test_a_network_that_cannot_be_used_is_refused(function, message):
    with pytest.raises((RequestError, UnsupportedOperation), match=message):
        recorded(Net(function), 3)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_scripted_model_is_refused():
    with pytest.raises(RequestError, match="pass the module it was made from"):
        double_copy(torch.jit.trace(nn.ReLU(), torch.zeros(1)))


@pytest.mark.parametrize("before", [True, False])
def test_an_activation_in_a_hook_on_the_network_is_a_site_of_its_own(before):
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    if before:
        net.register_forward_pre_hook(lambda module, inputs: (F.relu(inputs[0]),))
    else:
        net.register_forward_hook(lambda module, inputs, output: F.relu(output - 1))
    _, program = recorded(net, 3)
    assert sorted(program.sites) == ["1", "relu"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_weight_that_is_computed_before_each_pass_is_copied():
    net = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.ReLU())
    weight = net[0].weight
    program = record(double_copy(net), torch.randn(2, 3, dtype=torch.float64))
    x = torch.randn(5, 3)
    torch.testing.assert_close(run_program(program, x.double()).float(), net(x).detach())
    assert net[0].weight.requires_grad
    assert weight.dtype == torch.float32


def test_mixing_the_samples_is_seen_beside_a_large_constant():
    def forward(m, x):
        h = F.max_pool1d(F.pad(x, (1, 1), value=-1e30)[:, None], 3, 1)[:, 0]
        return h - h.mean(0, keepdim=True) + 2 * h

    with pytest.raises(UnsupportedOperation, match="mean at the network: it mixes the samples"):
        recorded(Net(forward), 4)


def test_a_program_is_compared_with_its_network_beside_a_large_constant():
    def forward(m, x):
        h = F.max_pool1d(F.pad(x, (1, 1), value=-1e30)[:, None], 3, 1)[:, 0]
        return h + torch.randn(4).double()

    with pytest.raises(UnsupportedOperation, match="not reproduce"):
        recorded(Net(forward), 4)


def test_outputs_that_are_nothing_but_rounding_are_accepted():
    assert_reproduces(Net(lambda m, x: F.relu((x + 1000) - 1000 - x)), 4)
    assert_reproduces(Net(lambda m, x: m.a(x) * 3 - m.a(x * 3), a=nn.Linear(4, 4, bias=False)), 4)


def test_an_assertion_of_the_network_is_one_line():
    def check(m, x):
        assert x.shape[1] == 7, "expected 7 features"
        return x

    with pytest.raises(RequestError, match=r"can't be run .*\(1, 3\): expected 7 features"):
        recorded(Net(check), 3)
