"""Networks that can't be recorded: the error names operation and place in one line."""

import pytest
import torch
from programs import Net, assert_reproduces, record_network
from torch import nn
from torch.nn import functional as F

from nlbench.errors import RequestError, Undefined, UnsupportedOperation
from nlbench.introspection.model_copy import double_copy
from nlbench.probes.lines.recording.recorder import move_samples_first, record_program
from nlbench.probes.lines.rules.rule import Input, NotAffine


def test_a_model_of_complex_numbers_is_refused():
    net = Net(lambda m, x: F.relu(x * m.w.abs()))
    net.w = nn.Parameter(torch.tensor([3 + 4j, 1j, 2 + 0j]))
    with pytest.raises(RequestError):
        record_network(net, 3)


def test_a_model_without_weights_is_refused():
    with torch.device("meta"):
        net = nn.Linear(3, 2)
    with pytest.raises(RequestError, match="meta"):
        record_network(net, 3)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda m, x: torch.sigmoid(x), "sigmoid"),
        (lambda m, x: F.gelu(x), "gelu"),
        (lambda m, x: F.silu(x, inplace=True), "silu"),
        (lambda m, x: x.softmax(1), "softmax"),
        (lambda m, x: F.hardswish(x), "hardswish"),
        (lambda m, x: F.hardshrink(x), "hardshrink"),
        (lambda m, x: (x > 0) * x, "gt"),
        (lambda m, x: F.layer_norm(x, (3,)), "layer_norm"),
        (lambda m, x: F.threshold(x, 1, 0), "threshold"),
        (lambda m, x: x * x, "mul"),
        (lambda m, x: x[:, None] @ x[..., None], "matmul"),
        (lambda m, x: 1 / x, "reciprocal"),
        (lambda m, x: torch.ones(3).double() / x, "div"),
        (lambda m, x: torch.divide(torch.ones(3), x), "divide"),
        (lambda m, x: torch.true_divide(x, x), "true_divide"),
        (lambda m, x: torch.divide(x, 99, rounding_mode="trunc"), "divide"),
        (lambda m, x: F.linear(x, x), "linear"),
        (lambda m, x: torch.clamp(x, x, out=x + 0), "clamp"),
        (lambda m, x: x.max(0)[0], "max"),
        (lambda m, x: x.sort(0)[0], "sort"),
        (lambda m, x: x.topk(2, sorted=False)[0], "topk"),
        (lambda m, x: torch.where(x[:, :1] > 0, x, -x), "gt"),
        (lambda m, x: x.masked_fill(x.abs() > 1, 0), "gt"),
        (lambda m, x: x.pow(2), "pow"),
        (lambda m, x: torch.lerp(x, 2 * x, x), "lerp"),
        (lambda m, x: x.norm(dim=1, keepdim=True), "norm"),
        (lambda m, x: x.cumprod(1), "cumprod"),
        (lambda m, x: x.gather(1, x.argmax(1, True)), "argmax"),
        (lambda m, x: x.half(), "to"),
        (lambda m, x: x[:, :1].T, "forward"),
        (lambda m, x: x.T @ torch.ones(1, 1), "matmul"),
        (lambda m, x: (torch.ones(1, 3) @ x.T + x).T, "add"),
        (lambda m, x: (x.T + torch.ones(2)).T, "add"),
        (lambda m, x: (x.T + torch.ones(3, 2)).T, "add"),
        (lambda m, x: x.T.sum(0), "sum"),
        (lambda m, x: x.T.max(0)[0], "max"),
        (lambda m, x: x.T.mul_(2).T, "mul"),
        (lambda m, x: x.t_(), "t"),
        (lambda m, x: x * float(x.T[0, 0]), "values|batch"),
        (lambda m, x: F.instance_norm(x[:, None]), "instance_norm"),
        (lambda m, x: x if x.sum() > 0 else -x, "sum"),
        (lambda m, x: x * float(x[0, 0]), "values|batch"),
        (lambda m, x: x * x.tolist()[0][0], "values"),
        (lambda m, x: x - x.mean(0, keepdim=True), "mean"),
        (lambda m, x: x.cumsum(0), "cumsum"),
        (lambda m, x: x.flip(0), "flip"),
        (lambda m, x: x.unsqueeze(0), "unsqueeze"),
        (lambda m, x: x.squeeze(0), "squeeze"),
        (lambda m, x: F.dropout(x), "dropout"),
        (lambda m, x: x + torch.randn(3).double(), "reproduce"),
        (lambda m, x: x * x.data.numpy()[0, 0], "values|reproduce"),
        (lambda m, x: torch.where(x > 0, x, 0 * x), "gt"),
    ],
)
def test_refusals_name_the_operation(function, name):
    with pytest.raises(UnsupportedOperation, match=name):
        record_network(Net(function), 3)


def test_positions_of_maxima_may_stay_unused():
    pool = {"return_indices": True}
    unused = Net(lambda m, x: F.adaptive_max_pool1d(x, 2, **pool)[0])
    used = Net(lambda m, x: F.adaptive_max_pool1d(x, 2, **pool)[1] * 1.0)
    assert_reproduces(unused, 3, 6)
    with pytest.raises(UnsupportedOperation, match="maxima"):
        record_network(used, 3, 6)


def test_a_refusal_names_the_innermost_module():
    net = nn.Sequential(
        nn.Linear(3, 3), nn.ModuleDict({"mlp": nn.Sequential(nn.ReLU(), nn.SiLU())})["mlp"]
    )
    with pytest.raises(UnsupportedOperation) as caught:
        record_network(net, 3)
    assert (caught.value.operation, caught.value.place) == ("silu", "1.1")


def test_batch_norm_with_batch_statistics_is_refused():
    net = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False))
    with pytest.raises(UnsupportedOperation, match="batch_norm at 0"):
        record_network(net, 3, 4)


def test_refused_module_keeps_no_hook():
    net = Net(lambda m, x: m.attention(x, x, x)[0])
    net.attention = nn.MultiheadAttention(4, 2, batch_first=True).double()
    with pytest.raises(UnsupportedOperation):
        record_program(net, torch.zeros(1, 3, 4).double())
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_attention_is_refused_as_a_whole():
    net = Net(lambda m, x: F.scaled_dot_product_attention(x, x, x))
    with pytest.raises(UnsupportedOperation, match="scaled_dot_product_attention"):
        record_network(net, 4, 8)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda m, x: (x, x), "tuple"),
        (lambda m, x: torch.ones(3), r"\(3,\)"),
        (lambda m, x: F.linear(x, torch.ones(2, 9).double()), r"\(1, 3\)"),
    ],
)
def test_unusable_network_raises(function, name):
    with pytest.raises((RequestError, Undefined), match=name):
        record_network(Net(function), 3)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_scripted_model_is_refused():
    with pytest.raises(RequestError):
        double_copy(torch.jit.trace(nn.ReLU(), torch.zeros(1)))


def test_failed_assertion_of_network_raises():
    def check(m, x):
        assert x.shape[1] == 7, "expected 7 features"
        return x

    with pytest.raises(RequestError, match=r"\(1, 3\)"):
        record_network(Net(check), 3)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("mm", (Input(0), torch.ones(2, 2))),
        ("matmul", (Input(0), Input(0))),
        ("matmul", (torch.ones(2, 2, 2), Input(0))),
        ("addmm", (torch.ones(2, 1), Input(0), torch.ones(2, 2))),
        ("add", (Input(0), torch.ones(2, 2, 2))),
    ],
)
def test_samples_that_are_mixed_are_not_transposed(name, arguments):
    with pytest.raises(NotAffine):
        move_samples_first(name, arguments, {})
