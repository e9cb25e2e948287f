import math

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import erf
from torch import nn

from nlbench.errors import NotFinite
from nlbench.probes.lines import trace_segment
from nlbench.probes.lines.quadrature import CHECK_PLACES, integrate_along, smooth_estimate


def column(function):
    return lambda t: function(t)[:, None]


def one_trace(net, ends, **options):
    return next(integrate_along(net, ends[:1], ends[1:], **options))


def by_quad(net, ends, logit=0):
    """Return the areas above and below the chord of a float64 network, by SciPy."""
    a, b = ends[:1], ends[1:]

    def distance(t):
        with torch.no_grad():
            f, f0, f1 = (net(torch.lerp(a, b, s))[0, logit].item() for s in (t, 0.0, 1.0))
        return f - ((1 - t) * f0 + t * f1)

    areas = [
        quad(lambda t, s=sign: max(s * distance(t), 0.0), 0, 1, limit=200, epsabs=1e-9)[0]
        for sign in (1, -1)
    ]
    return areas


def test_a_parabola_has_the_closed_form():
    # t² lies below its chord by t - t²: by 1/6 on average, and by 1/4 at most.
    trace = smooth_estimate(column(np.square))
    assert float(trace.below) == pytest.approx(1 / 6, rel=1e-14)
    assert float(trace.above) == pytest.approx(0, abs=1e-15)
    assert float(trace.variation) == pytest.approx(1 / 2, rel=1e-14)


@pytest.mark.parametrize("waves", [1, 3, 20])
def test_a_sine_has_the_closed_form(waves):
    trace = smooth_estimate(column(lambda t: np.sin(2 * math.pi * waves * t)), tolerance=1e-9)
    assert float(trace.above) == pytest.approx(1 / math.pi, rel=1e-9)
    assert float(trace.below) == pytest.approx(1 / math.pi, rel=1e-9)
    assert float(trace.variation) == pytest.approx(4 * waves, rel=1e-8)
    assert trace.converged


def test_gelu_has_its_closed_form_on_a_line():
    # x Φ(x) on [0, c] lies below its chord; its integral is (x²Φ + xφ - Φ)/2 between the ends.
    c = 2.0
    ends = torch.tensor([[0.0], [c]])
    trace = one_trace(nn.GELU(), ends, tolerance=1e-9)
    big, small = (1 + erf(c / math.sqrt(2))) / 2, math.exp(-(c**2) / 2) / math.sqrt(2 * math.pi)
    under = (c**2 * big + c * small - (big - 0.5)) / 2
    expected = (c * c * big / 2 - under) / c
    assert float(trace.below) == pytest.approx(expected, rel=1e-9)
    assert float(trace.above) == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("c", [0.5, 3.0, 30.0])
def test_tanh_has_its_closed_form_on_a_line(c):
    # On [-c, c] the chord is t tanh(c), and tanh deviates equally on both sides.
    trace = one_trace(nn.Tanh(), torch.tensor([[-c], [c]]), tolerance=1e-8)
    area = math.log(math.cosh(c)) - c * math.tanh(c) / 2
    expected = area / (2 * c)
    assert float(trace.above) == pytest.approx(expected, rel=1e-8)
    assert float(trace.below) == pytest.approx(expected, rel=1e-8)
    assert trace.length == 2 * c


@given(st.integers(0, 10**6), st.sampled_from([nn.Tanh, nn.GELU, nn.SiLU, nn.Softplus, nn.ELU]))
@settings(max_examples=15)
def test_smooth_networks_have_the_areas_of_scipy(seed, act):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 8), act(), nn.Linear(8, 8), act(), nn.Linear(8, 2)).double()
    ends = 3 * torch.randn(2, 3, dtype=torch.float64)
    trace = one_trace(net, ends, tolerance=1e-7)
    above, below = by_quad(net, ends)
    assert float(trace.above[0]) == pytest.approx(above, rel=1e-5, abs=1e-7)
    assert float(trace.below[0]) == pytest.approx(below, rel=1e-5, abs=1e-7)


def test_a_transformer_has_the_areas_that_scipy_finds():
    torch.manual_seed(0)
    net = torchvision.models.VisionTransformer(
        image_size=8, patch_size=4, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=8,
        num_classes=3,
    )  # fmt: skip
    nn.init.normal_(net.heads.head.weight)
    net = net.double().eval()
    ends = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    trace = one_trace(net, ends)
    above, below = by_quad(net, ends, 1)
    assert float(trace.above[1] + trace.below[1]) == pytest.approx(above + below, rel=1e-5)


@given(st.integers(0, 10**6), st.sampled_from([1e-3, 1e-5]))
def test_error_estimate_holds_at_kinks(seed, tolerance):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 2))
    ends = torch.randn(2, 3)
    exact = trace_segment(net, *ends)
    t, f = exact.t, exact.values
    distance = f - torch.lerp(f[:1], f[-1:], t[:, None])
    left, right = distance[:-1], distance[1:]
    total = (left.abs() + right.abs()).clamp(min=1e-300)
    heights = torch.where(left * right < 0, (left**2 + right**2) / total, total) / 2
    expected = (t.diff()[:, None] * heights).sum(0)
    estimate = one_trace(net, ends, tolerance=tolerance)
    error = (estimate.above + estimate.below - expected).abs()
    assert (error <= estimate.deviation_error + 1e-12 * f.abs().max()).all()
    if estimate.converged:
        assert (error <= tolerance * expected + 1e-12 * f.abs().max()).all()


@given(st.integers(0, 10**6))
def test_reversed_segments_have_the_same_areas(seed):
    random = np.random.default_rng(seed)
    a, b, c = random.normal(size=(3, 4, 1))
    function = lambda t: (c * np.tanh(5 * a * t + b)).sum(0)[:, None]  # noqa: E731
    forward, reverse = smooth_estimate(function), smooth_estimate(lambda t: function(1 - t))
    assert float(forward.above) == pytest.approx(float(reverse.above), rel=1e-5, abs=1e-9)
    assert float(forward.below) == pytest.approx(float(reverse.below), rel=1e-5, abs=1e-9)
    assert float(forward.variation) == pytest.approx(float(reverse.variation), rel=1e-3, abs=1e-9)


def test_an_affine_function_converges_without_deviation():
    trace = smooth_estimate(lambda t: np.stack([3 * t - 1, 1e6 + 0 * t, 0 * t], 1))
    assert trace.converged
    assert trace.evaluations == 35 + CHECK_PLACES
    assert (trace.above + trace.below <= 1e-9).all()


def test_a_segment_without_length_has_no_deviation():
    trace = one_trace(nn.Tanh(), torch.ones(2, 3))
    assert trace.length == 0
    assert (trace.above + trace.below).tolist() == [0, 0, 0]


def test_unresolved_network_has_not_converged():
    trace = smooth_estimate(column(lambda t: np.sin(2000 * t)), evaluations=100)
    assert not trace.converged
    assert trace.evaluations <= 100
    assert trace.relative_error > trace.tolerance
    assert trace.notes["segments_short_of_tolerance"] == 1


@pytest.mark.parametrize("evaluations", [64, 100, 500])
def test_evaluations_stay_within_the_allowed_number(evaluations):
    calls = []

    def function(t):
        calls.append(len(t))
        return np.abs(t - 0.3)[:, None]

    trace = smooth_estimate(function, tolerance=1e-9, evaluations=evaluations)
    assert sum(calls) == trace.evaluations <= evaluations


def test_too_few_evaluations_for_two_intervals_cut_none():
    trace = smooth_estimate(column(lambda t: abs(t - 0.3)), tolerance=1e-9, evaluations=25)
    assert (trace.evaluations, trace.converged) == (35, False)


def test_a_jump_is_resolved():
    trace = smooth_estimate(column(lambda t: (t > 0.37).astype(float)), tolerance=1e-4)
    assert float(trace.above + trace.below) == pytest.approx(0.37**2 / 2 + 0.63**2 / 2, rel=1e-4)


def test_nodes_rise_from_0_to_1():
    trace = smooth_estimate(column(lambda t: np.tanh(40 * (t - 0.3))))
    t = trace.t.numpy()
    assert t[0] == 0
    assert t[-1] == 1
    assert (np.diff(t) > 0).all()
    np.testing.assert_allclose(trace.values[:, 0].numpy(), np.tanh(40 * (t - 0.3)), atol=1e-12)


def test_segments_have_their_own_trace_and_reason():
    ends = torch.tensor([[-1.0], [0.0]]), torch.tensor([[1.0], [2.0]])
    traces = list(integrate_along(nn.Tanh(), *ends, refused="tanh at the network"))
    assert [trace.refused for trace in traces] == ["tanh at the network"] * 2
    assert float(traces[0].above) == pytest.approx(float(traces[0].below))
    assert float(traces[1].below) == pytest.approx(0, abs=1e-15)


def test_the_model_is_left_alone():
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.GELU()).train()
    before = net[0].weight.clone()
    one_trace(net, torch.randn(2, 2))
    assert net.training
    assert net[0].weight.dtype == torch.float32
    assert torch.equal(net[0].weight, before)


def test_an_infinite_output_is_refused():
    class Log(nn.Module):
        def forward(self, x):
            return x.log()

    with pytest.raises(NotFinite):
        one_trace(Log(), torch.tensor([[-1.0], [1.0]]))


@given(st.floats(0.01, 0.99))
def test_a_narrow_peak_between_all_nodes_is_found(centre):
    def function(t):
        return (0.05 * t**2 + np.exp(-(((t - centre) / 0.001) ** 2)))[:, None]

    estimate = smooth_estimate(function, tolerance=1e-5)
    grid = np.linspace(0, 1, 400_001)
    values = function(grid)[:, 0]
    chord = values[0] + grid * (values[-1] - values[0])
    true = np.trapezoid(np.abs(values - chord), grid)
    assert estimate.converged
    assert float(estimate.above + estimate.below) == pytest.approx(true, rel=1e-5)


def test_convergence_needs_evaluations_for_the_comparison():
    estimate = smooth_estimate(lambda t: t[:, None] ** 2, evaluations=100)
    assert not estimate.converged
    assert smooth_estimate(lambda t: t[:, None] ** 2, evaluations=35 + CHECK_PLACES).converged
