"""Custom operations are traced as registered, and refused as unknown otherwise."""

import itertools

import pytest
import torch
from torch import nn

import nlbench
from nlbench.errors import UnsupportedOperation
from nlbench.probes.lines import trace_segment
from nlbench.probes.lines.rules.rounding import scaled
from nlbench.probes.lines.rules.rule import Rule
from nlbench.probes.sites import list_sites

from segments import Functional, assert_exact

_numbers = itertools.count()


def hat(x):
    """Return max(0, 1 - |x|), by NumPy's `abs`, which PyTorch doesn't dispatch."""
    return torch.from_numpy(1 - abs(x.detach().numpy())).clamp(min=0)


def custom_op():
    name = f"nlbench_lines_tests::hat{next(_numbers)}"

    @torch.library.custom_op(name, mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return hat(x)

    return op, op, name


def autograd_function():
    class Hat(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.where(x.abs() < 1, 1 - x.abs(), 0 * x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    Hat.__qualname__ += str(next(_numbers))
    return Hat, Hat.apply, Hat.__qualname__


@pytest.mark.parametrize("make", [custom_op, autograd_function])
@pytest.mark.parametrize("method", ["exact", "adaptive", "sampling"])
def test_an_operation_registered_by_its_kinks_is_traced(make, method):
    op, call, _ = make()
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)]).double()
    net = Functional(lambda x: layers[2](call(2 * layers[1](torch.relu(call(3 * layers[0](x)))))))
    start, end = torch.randn(2, 4).double()
    nlbench.register_op(op, kind="hat", kinks=(-1.0, 0.0, 1.0))
    plain = Functional(
        lambda x: layers[2](
            (1 - (2 * layers[1](torch.relu((1 - (3 * layers[0](x)).abs()).relu()))).abs()).relu()
        )
    )
    trace = trace_segment(net, start, end, method=method)
    expected = trace_segment(plain, start, end, method=method)
    assert expected.crossings > 10
    assert trace.crossings == expected.crossings
    torch.testing.assert_close(trace.t, expected.t, rtol=0, atol=1e-11)
    torch.testing.assert_close(trace.values, expected.values, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", [custom_op, autograd_function])
def test_registered_calls_are_named_as_sites(make):
    op, call, _ = make()
    nlbench.register_op(op, kind="hat", kinks=(-1.0, 0.0, 1.0))
    torch.manual_seed(0)
    layer = nn.Linear(2, 2).double()
    net = Functional(lambda x: call(layer(torch.relu(call(x)))))
    sites = [site.name for site in list_sites(net, torch.zeros(1, 2).double())]
    assert sites == ["hat", "relu", "hat:1"]
    assert list(trace_segment(net, *torch.randn(2, 2).double()).sites) == sites


@pytest.mark.parametrize("make", [custom_op, autograd_function])
def test_unregistered_operations_are_refused_as_unknown(make):
    _, call, name = make()
    if make is autograd_function:
        name = "gt|lt"  # One of its parts.
    net = nn.Sequential(nn.Linear(3, 3), Functional(lambda x: call(x)))
    with pytest.raises(UnsupportedOperation, match=f"({name}) at 1"):
        trace_segment(net, *torch.randn(2, 3))


def test_wrong_kinks_are_detected():
    op, call, _ = custom_op()
    nlbench.register_op(op, kinks=(-1.0, 1.0))
    with pytest.raises(UnsupportedOperation):
        trace_segment(Functional(lambda x: call(x)), torch.tensor([-2.0]), torch.tensor([3.0]))


def test_custom_rules_are_traced():
    name = f"nlbench_lines_tests::double{next(_numbers)}"
    triple = f"nlbench_lines_tests::triple{next(_numbers)}"

    @torch.library.custom_op(name, mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(2 * x.detach().numpy())

    @torch.library.custom_op(triple, mutates_args=())
    def tripled(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(3 * x.detach().numpy())

    nlbench.register_op(double, kinks=())
    nlbench.register_op(tripled, line=lambda call: Rule(call.apply, scaled(3.0)))
    torch.manual_seed(0)
    parts = nn.Linear(3, 8), Functional(lambda x: tripled(torch.relu(double(x))))
    net = nn.Sequential(*parts).double()
    start, end = torch.randn(2, 3).double()
    trace = trace_segment(net, start, end)
    assert trace.crossings > 1
    assert_exact(net, start, end, trace)
