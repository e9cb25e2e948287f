"""Rounding makes no breakpoint and large numbers hide none."""

import pytest
import torch
from hypothesis import given
from torch import nn

from nlbench.probes.lines import trace_segment

from segments import Functional, assert_exact, mlp, networks, on_segment


def test_layers_that_are_off_make_no_breakpoints():
    # For t between 0.2033 and 0.2124 all units of the first layer are off and the second
    # is zero; at the ends of that gap a unit of the first is zero up to rounding.
    net = mlp(816, widths=(3, 6, 6, 2))
    start, end = torch.randn(2, 3)
    with torch.no_grad():
        net[0].bias.zero_()
        net[2].bias.zero_()
        net[0].weight[1] = net[0].weight[0]
        net[0].weight[-1] = 0
        hidden = net[1](net[0](on_segment(start, end, [0.2035, 0.208, 0.2122]).float()))
    assert (hidden == 0).all()
    t = trace_segment(net, start, end).t
    assert not ((t > 0.2035) & (t < 0.2122)).any()


@pytest.mark.parametrize("scale", [1e-18, 1e-9, 1e9, 1e18])
def test_the_scale_of_a_unit_does_not_matter(scale):
    net = mlp(1, widths=(2, 6, 1)).double()
    start, end = torch.randn(2, 2)
    before = trace_segment(net, start, end)
    assert before.crossings > 3
    with torch.no_grad():
        net[0].weight[::2] *= scale
        net[0].bias[::2] *= scale
    after = trace_segment(net, start, end)
    torch.testing.assert_close(after.t, before.t, rtol=0, atol=1e-12)


def masked(value, size=16, where=3):
    mask = torch.zeros(size, dtype=torch.float64)
    mask[where] = value
    return mask


MASK_VALUES = [-1e9, -1e12, -1e15, -1e30, torch.finfo(torch.float32).min]


@pytest.mark.parametrize("value", MASK_VALUES)
@pytest.mark.parametrize(
    "function",
    [
        lambda h, v: torch.relu(h + masked(v)),
        lambda h, v: torch.relu(torch.cat([h, h.new_full((1, 1), v).expand(len(h), 1)], 1))[:, :16],
        lambda h, v: torch.maximum(h, masked(v)[None]),
        lambda h, v: torch.minimum(h, -masked(v)[None]),
        lambda h, v: nn.functional.max_pool1d(nn.functional.pad(h, (1, 1), value=v)[:, None], 3, 1)[
            :, 0
        ],
        lambda h, v: nn.functional.adaptive_max_pool1d((h + masked(v))[:, None], 4)[:, 0].repeat(
            1, 4
        ),
        lambda h, v: h.clamp(0, -v),
    ],
)
def test_a_large_constant_hides_no_crossing(function, value):
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(6, 16), nn.Linear(16, 3)]).double()
    net = Functional(lambda x: layers[1](function(layers[0](x), value)))
    start, end = torch.randn(2, 6)
    trace = trace_segment(net, start, end)
    assert_exact(net, start, end, trace)
    # A moderate constant is never reached either, so the function is the same.
    plain = Functional(lambda x: layers[1](function(layers[0](x), -1e3)))
    expected = trace_segment(plain, start, end).t
    assert len(trace.t) > 3
    torch.testing.assert_close(trace.t, expected, rtol=0, atol=1e-12)


def test_explicit_padding_equals_the_padding_of_pooling():
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3).double()
    start, end = torch.randn(2, 3, 12, 12)
    explicit = Functional(
        lambda x: nn.functional.max_pool2d(nn.functional.pad(conv(x), (1, 1, 1, 1), value=-1e30), 2)
    )
    built_in = Functional(lambda x: nn.functional.max_pool2d(conv(x), 2, padding=1))
    trace, expected = (trace_segment(net, start, end) for net in (explicit, built_in))
    assert trace.regions > 50
    assert torch.equal(trace.t, expected.t)
    assert torch.equal(trace.values, expected.values)


def test_units_of_different_scales_are_all_found():
    torch.manual_seed(0)
    layer = nn.Linear(6, 16).double()

    def forward(x):
        h = torch.relu(torch.cat([layer(x)[:, :8] * 1e8, layer(x)[:, 8:] * 1e-9], 1))
        return torch.relu(h[:, 8:] * 1e9 - 0.3).sum(1, keepdim=True)

    start, end = torch.randn(2, 6)
    trace = trace_segment(Functional(forward), start, end)
    assert trace.regions > 3
    assert_exact(Functional(forward), start, end, trace)


def test_propagated_rounding_makes_no_breakpoints():
    start, end = torch.rand(2, 64, dtype=torch.float64, generator=torch.manual_seed(0)) + 0.1
    for constant in (1, 30, 1000):

        def forward(x, c=constant):
            return torch.relu(torch.relu((x + c) - c) - torch.relu(x))

        assert trace_segment(Functional(forward), start, end).regions == 1


@given(networks())
def test_single_precision_finds_nearly_the_same_regions(drawn):
    net, start, end = drawn
    double, single = (
        trace_segment(net, start, end, dtype=d) for d in (torch.float64, torch.float32)
    )
    assert (single.t.dtype, single.values.dtype) == (torch.float64, torch.float64)
    assert single.precision == torch.finfo(torch.float32).eps
    assert abs(double.regions - single.regions) <= 3 + 0.1 * double.regions
    # Each breakpoint that is far from its neighbours is found.
    wide = double.t.diff() > 1e-3
    alone = (wide[1:] & wide[:-1]).nonzero().squeeze(1) + 1
    distance = (double.t[alone, None] - single.t).abs().amin(1)
    assert (distance < 1e-3).all()
    at = torch.searchsorted(double.t, single.t).clamp(1, len(double.t) - 1)
    weight = (single.t - double.t[at - 1]) / (double.t[at] - double.t[at - 1])
    expected = torch.lerp(double.values[at - 1], double.values[at], weight[:, None])
    scale = float(double.values.abs().max())
    assert float((single.values - expected).abs().max()) <= 1e-4 * scale + 1e-6


def test_conversions_without_effect_are_traced():
    linear, ends = nn.Linear(3, 4), torch.randn(2, 3)
    net = nn.Sequential(linear, Functional(lambda x: x.float()), nn.ReLU())
    plain = nn.Sequential(linear, nn.ReLU())
    assert torch.equal(trace_segment(net, *ends).t, trace_segment(plain, *ends).t)
    assert trace_segment(net, *ends, dtype=torch.float32).regions >= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models_are_traced_in_double(dtype):
    net, ends = mlp(0).to(dtype), torch.randn(2, 3)
    trace = trace_segment(net, *ends)
    assert trace.regions > 2
    assert_exact(net, *ends, trace)
    assert all(p.dtype == dtype for p in net.parameters())
