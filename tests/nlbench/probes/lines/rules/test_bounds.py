"""Rounding errors of single operations, given the errors of their inputs."""

import math

import pytest
import torch
from programs import Net
from torch.nn import functional as F

from nlbench.errors import UnsupportedOperation
from nlbench.probes.lines import trace_segment
from nlbench.probes.lines.recording.recorder import record_program
from nlbench.probes.lines.rules.rounding import peak_over

ONE = torch.ones((), dtype=torch.float64)


def last_rule(function, x):
    return record_program(Net(function), x[:1].clone()).steps[-1].rule


def bound_of(function, x, bound):
    rule = last_rule(function, x)
    return rule.bound([x], [bound], rule.apply([x]))


def vector(*numbers):
    return torch.tensor([numbers], dtype=torch.float64)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda m, x: x + x, [4e6, 2e6]),
        (lambda m, x: x.sub(x, alpha=-3), [8e6, 4e6]),
        (lambda m, x: x * -4, [8e6, 4e6]),
        (lambda m, x: x / vector(4, 0.5), [0.5e6, 2e6]),
        (lambda m, x: torch.lerp(x, ONE, 0.25), [1.5e6, 0.75e6]),
        (lambda m, x: torch.lerp(ONE, x, 0.25), [0.5e6, 0.25e6]),
        (lambda m, x: torch.addcmul(ONE, x, vector(2, 4), value=-3), [12e6, 12e6]),
        (lambda m, x: torch.addcdiv(ONE, x, vector(2, 4), value=-3), [3e6, 0.75e6]),
        (lambda m, x: torch.where(torch.tensor([True, False]), x, ONE), [2e6, 0]),
        (lambda m, x: x.masked_fill(torch.tensor([True, False]), 7.0), [0, 1e6]),
        (lambda m, x: x.sum(1, keepdim=True), [math.sqrt(5) * 1e6]),
        (lambda m, x: x.mean(1, keepdim=True), [math.sqrt(5) / 2 * 1e6]),
        (lambda m, x: x @ torch.tensor([[3.0], [4.0]]).double(), [math.sqrt(52) * 1e6]),
        (lambda m, x: F.linear(x, vector(3, 4)), [math.sqrt(52) * 1e6]),
        (lambda m, x: torch.einsum("bi,ji->bj", x, vector(3, 4)), [52**0.5 * 1e6]),
        (lambda m, x: x.cumsum(1), [2e6, math.sqrt(5) * 1e6]),
        (lambda m, x: x.flip(1), [1e6, 2e6]),
        (lambda m, x: torch.cat([x, vector(5)], 1), [2e6, 1e6, 0]),
        (lambda m, x: F.pad(x, (1, 2)), [0, 2e6, 1e6, 0, 0]),
        (lambda m, x: F.relu(x), [0, 1e6]),
        (lambda m, x: F.leaky_relu(x, 0.5), [1e6, 1e6]),
        (lambda m, x: F.rrelu(x, 0.125, 0.375), [0.5e6, 1e6]),
        (lambda m, x: F.rrelu(x), [11 / 24 * 1e6, 1e6]),
        (lambda m, x: F.hardtanh(x, -0.5, 0.5), [0, 0]),
        (lambda m, x: F.softshrink(x, 2.0), [2e6, 0]),
        (lambda m, x: F.hardsigmoid(x), [2e6 / 6, 1e6 / 6]),
        (lambda m, x: x.abs(), [2e6, 1e6]),
        (lambda m, x: F.prelu(x, torch.tensor([0.5, 0.25]).double()), [1e6, 1e6]),
    ],
)
def test_the_error_of_an_operation(function, expected):
    # The input errors are far larger than the operation's own rounding.
    bound = bound_of(function, vector(-2.5, 1.5), vector(2e6, 1e6))
    assert bound.flatten().tolist() == pytest.approx(expected, rel=1e-5)


def test_an_added_constant_is_rounded():
    x = torch.zeros(1, 1, 2000, dtype=torch.float64)
    even, peaked = torch.full_like(x, 8.0), x.clone()
    peaked[..., 0] = 1e6
    none = torch.zeros(1, 1, 1, dtype=torch.float64)
    assert bound_of(lambda m, x: x + even, x, none).flatten().tolist() == [4.0]
    # One large number does not blur the others.
    bound = bound_of(lambda m, x: x + peaked, x, none).flatten()
    assert bound[:2].tolist() == [5e5, 0]


def test_overwritten_parts_have_new_errors():
    def forward(m, x):
        y = 4 * x
        y[:, :1] = 10 * x[:, 2:]
        return y.clone()

    x, bound = vector(1, 2, 3), vector(1e6, 2e6, 3e6)
    program = record_program(Net(forward), x.clone())
    bounds, values = {0: bound}, {0: x}
    for step in program.steps:
        inputs = [values[i] for i in step.inputs]
        values[step.output] = step.rule.apply(inputs)
        bounds[step.output] = step.rule.bound(
            inputs, [bounds[i] for i in step.inputs], values[step.output]
        )
    assert values[program.output].tolist() == [[30, 8, 12]]
    assert bounds[program.output].expand(1, 3).tolist() == [[3e7, 8e6, 12e6]]


def test_padding_keeps_the_axis_of_a_shared_error():
    x = torch.ones(1, 2, 3, dtype=torch.float64)
    shared = torch.tensor([[[5.0], [7.0]]], dtype=torch.float64)
    bound = bound_of(lambda m, x: F.pad(x, (1, 1)), x, shared)
    assert bound.expand(1, 2, 5)[0, :, 2].tolist() == [5, 7]
    assert bound.shape == (1, 2, 1)


@pytest.mark.parametrize("divisor", [None, 2, 16])
def test_averages_divide_their_errors(divisor):
    x = torch.ones(1, 1, 4, 4, dtype=torch.float64)
    error = torch.full((1, 1, 1, 1), 1e6, dtype=torch.float64)
    bound = bound_of(lambda m, x: F.avg_pool2d(x, 2, divisor_override=divisor), x, error)
    assert float(bound.max()) == pytest.approx(2e6 / (divisor or 4), rel=1e-5)


def test_wide_layers_share_their_largest_error():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2, 10000, generator=generator, dtype=torch.float64)
    x, bound = torch.ones(2, 1, 10000, dtype=torch.float64)
    bound = bound * 1e6
    bound[:, ::2] = 1.0
    exact = (weight.square() @ bound.square().mT).sqrt().flatten()
    shared = bound_of(lambda m, x: F.linear(x, weight), x, bound).flatten()
    assert (shared >= exact).all()
    assert (shared <= 1.5 * exact).all()


def test_a_shared_error_is_that_of_several_slopes():
    x = torch.tensor([[[1.0, 1.0, -1.0, -1.0]]], dtype=torch.float64)
    shared = torch.full((1, 1, 1), 8.0, dtype=torch.float64)
    leaky = bound_of(lambda m, x: F.leaky_relu(x, 0.5), x, shared)
    assert float(leaky) == pytest.approx(8 * math.sqrt((1 + 0.25) / 2))
    # Windows of few positions may be on the steeper piece.
    assert float(bound_of(lambda m, x: F.leaky_relu(x, 0.01), -x.abs(), shared)) == 2.0


@pytest.mark.parametrize(
    ("function", "kink"),
    [
        (lambda m, x: x.clamp(-3, 2), 2.0),
        (lambda m, x: F.softshrink(x, 2.0) + 2, 2.0),
        (lambda m, x: F.threshold(x, 2, 2), 2.0),
        (lambda m, x: F.relu(x), 0.0),
    ],
)
def test_numbers_within_tolerance_move_onto_the_kink(function, kink):
    x = torch.tensor([[kink + 1e-9], [kink - 1e-9], [kink + 0.5]], dtype=torch.float64)
    (rule, *_) = [s.rule for s in record_program(Net(function), x[:1].clone()).steps]
    bound = torch.full_like(x, 1e9)
    on_kink = rule.apply([torch.full_like(x, kink)])
    snapped = rule.snap([x], [bound])
    assert snapped[:2].tolist() == on_kink[:2].tolist()
    assert snapped[2].tolist() == rule.apply([x])[2].tolist()


def test_the_peak_of_an_empty_tensor_is_zero():
    empty = torch.zeros(2, 0, 3)
    assert torch.equal(peak_over(empty, (1,)), torch.zeros(2, 3))
    assert torch.equal(peak_over(empty, (1, 2)), torch.zeros(2))


def test_bounds_in_the_wrong_order_make_a_constant():
    trace = trace_segment(Net(lambda m, x: x.clamp(3, 2)), torch.ones(1), 4 * torch.ones(1))
    assert trace.crossings == 0
    assert trace.values.tolist() == [[2.0], [2.0]]


@pytest.mark.parametrize("name", ["select_scatter", "slice_scatter"])
def test_numbers_written_across_samples_are_refused(name):
    written = torch.zeros(3) if name == "select_scatter" else torch.zeros(1, 3)

    def function(m, x):
        place = (0,) if name == "select_scatter" else (0, 1)
        return getattr(torch, name)(x, written.to(x), 0, *place)

    with pytest.raises(UnsupportedOperation, match="samples"):
        trace_segment(Net(function), torch.zeros(3), torch.ones(3))


def test_the_error_of_a_convolution():
    x, bound = (v[:, :, None].expand(1, 2, 3) for v in (vector(-2.5, 1.5), vector(2e6, 1e6)))
    result = bound_of(lambda m, x: F.conv1d(x, vector(3, 4)[..., None]), x, bound)
    assert result.flatten().tolist() == pytest.approx(
        [math.sqrt(52) * 1e6] * result.numel(), rel=0.2
    )


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("settings", [(1, 2, 1), (2, 2, 1), (2, 4, 2), (3, 1, 1), (1, 8, 4)])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolution_errors_count_taps_on_input(size, settings, transposed):
    stride, padding, dilation = settings
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 2, 5, generator=generator, dtype=torch.float64)
    x = torch.ones(1, 4, size, dtype=torch.float64)
    convolve = F.conv_transpose1d if transposed else F.conv1d
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": 2}
    try:
        squares = convolve(x, weight.square(), **options)
    except RuntimeError:
        pytest.skip("no output")
    error = torch.full((1, 4, 1), 1e6, dtype=torch.float64)
    bound = bound_of(lambda m, x: convolve(x, weight, **options), x, error)
    # With equal errors of all inputs, the largest error over positions.
    expected = 1e6 * squares.amax(2).sqrt()
    torch.testing.assert_close(bound.reshape(expected.shape), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("counts_padding", [True, False])
def test_averages_count_only_positions_that_meet_input(counts_padding):
    x = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    error = torch.full((1, 1, 1, 1), 1e6, dtype=torch.float64)
    options = {"padding": 1, "count_include_pad": counts_padding}
    bound = bound_of(lambda m, x: F.avg_pool2d(x, 3, 1, **options), x, error)
    assert float(bound.max()) == pytest.approx(1e6 / 9 if counts_padding else 1e6, rel=1e-5)
