import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import nlbench
from nlbench.errors import NotFinite, RequestError, Undefined
from nlbench.introspection.memory import LiveBytes
from nlbench.measures.absdev import absolute_deviation
from nlbench.probes.lines import estimate_segment, observe_paths, trace_segment
from nlbench.probes.lines.chord import chord_parts
from nlbench.probes.lines.estimation.estimator import estimate_segments
from nlbench.probes.lines.estimation.extrapolation import (
    CHECK_PLACES,
    DeviationEstimate,
    check_places,
)
from nlbench.probes.lines.estimation.grids import COST_PROBE_STEPS
from nlbench.probes.lines.estimation.patterns import find_margins
from nlbench.probes.lines.estimation.piecewise import PiecewiseNetwork
from nlbench.probes.lines.rules.kinks import kinked_function
from nlbench.probes.lines.rules.pieces import Ranks
from tests.support.segments import Block, Depthwise, Functional, mlp, networks, small_residual


def pooled(seed, act=nn.ReLU, pool=lambda: nn.MaxPool2d(3, 2, 1), channels=6):
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        act(),
        pool(),
        nn.Conv2d(channels, channels, 3, padding=1, groups=2),
        act(),
        pool(),
        nn.Flatten(),
        nn.LazyLinear(12),
        act(),
        nn.Linear(12, 4),
    ).eval()
    net(torch.zeros(1, 3, 12, 12))
    net[1].running_mean.normal_()
    return net


def ends(seed, shape=(3, 12, 12), step=1.0):
    generator = torch.Generator().manual_seed(seed)
    start, end = torch.randn(2, *shape, generator=generator)
    return start, start + step * (end - start)


def translated(seed):
    """Return an image with equal columns and its translation by a pixel, edges replicated."""
    image = torch.randn(3, 12, 12, generator=torch.Generator().manual_seed(seed))
    image[:, :, 5:] = image[:, :, 5:6]
    moved = image.roll(1, 2)
    moved[:, :, 0] = image[:, :, 0]
    return image, moved


NETWORKS = {
    "overlapping max pooling": pooled(0),
    "max pooling": pooled(1, pool=lambda: nn.MaxPool2d(2)),
    "adaptive max pooling": pooled(2, pool=lambda: nn.AdaptiveMaxPool2d(5)),
    "average pooling": pooled(3, pool=lambda: nn.AvgPool2d(2)),
    "leaky": pooled(4, nn.LeakyReLU),
    "relu6": pooled(6, nn.ReLU6),
    "softshrink": pooled(8, lambda: nn.Softshrink(0.1)),
    "hardsigmoid": pooled(9, nn.Hardsigmoid),
}


@pytest.mark.parametrize(
    ("name", "segment"),
    [("max pooling", ends(0)), *zip(NETWORKS, itertools.cycle([translated(1), ends(0)]))],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_estimate_agrees_with_the_exact_trace(name, segment):
    trace = trace_segment(NETWORKS[name], *segment)
    estimate = estimate_segment(NETWORKS[name], *segment)
    assert estimate.at_least <= trace.crossings
    assert estimate.crossings == pytest.approx(trace.crossings, abs=max(2, estimate.error))
    assert sum(estimate.contributions.values()) == pytest.approx(estimate.crossings)
    exact = absolute_deviation(trace)
    off = torch.linalg.vector_norm(absolute_deviation(estimate) - exact)
    assert off <= 2e-3 * torch.linalg.vector_norm(exact)
    variation = chord_parts(trace.t, trace.values).variation
    off = torch.linalg.vector_norm(estimate.variation - variation)
    assert off <= 2e-2 * torch.linalg.vector_norm(variation)


def test_boundaries_by_site_match_the_exact_trace():
    network, segment = NETWORKS["overlapping max pooling"], ends(3)
    exact = trace_segment(network, *segment).contributions
    estimate = estimate_segment(network, *segment, tolerance=1e-5, dtype=torch.float64)
    assert estimate.contributions.keys() == exact.keys()
    for site, count in exact.items():
        assert estimate.contributions[site] == pytest.approx(count, abs=1.5)


@settings(max_examples=5)
@given(
    st.integers(0, 10**6),
    st.sampled_from([nn.ReLU, nn.ReLU6, nn.Hardtanh]),
    st.sampled_from(["add", "cat"]),
    st.booleans(),
)
def test_at_least_is_a_lower_bound(seed, act, mode, replicated):
    network = small_residual(seed, act, mode)
    start, end = ends(seed, (2, 4, 4), 2.0)
    if replicated:
        start[:, :, 2:], end[:, :, 2:] = start[:, :, 1:2], end[:, :, 1:2]
    trace = trace_segment(network, start, end)
    estimate = estimate_segment(network, start, end, evaluations=300, dtype=torch.float64)
    assert estimate.at_least <= trace.crossings
    assert estimate.at_least >= 0.95 * trace.crossings - 2


@settings(max_examples=4)
@given(networks())
def test_contrived_ties_cost_few_boundaries(case):
    network, start, end = case
    # Units that read a leaky unit's output may bend where it bends.
    has_skips = any(isinstance(m, Block) for m in network.modules())
    assume(not (has_skips and isinstance(network[2], (nn.LeakyReLU, nn.PReLU))))
    trace = trace_segment(network, start, end)
    estimate = estimate_segment(network, start, end, evaluations=300, dtype=torch.float64)
    assert estimate.at_least == pytest.approx(trace.crossings, rel=0.1, abs=8)


@pytest.mark.parametrize("network", [small_residual(1, mode="cat", pool=nn.MaxPool2d), Depthwise()])
def test_skips_shuffles_and_depthwise_convolutions_are_counted(network):
    segment = ends(5, (2, 4, 4), 3.0)
    trace = trace_segment(network, *segment)
    estimate = estimate_segment(network, *segment)
    assert trace.crossings - 2 <= estimate.at_least <= trace.crossings


def test_copies_of_units_count_once():
    plain = mlp(3, widths=(3, 20, 20, 2))
    double = mlp(3, widths=(3, 40, 20, 2))
    with torch.no_grad():
        double[0].weight.copy_(plain[0].weight.repeat(2, 1))
        double[0].bias.copy_(plain[0].bias.repeat(2))
        double[0].weight[20:] *= -1  # The kinks stay where they are.
        double[0].bias[20:] *= -1
        double[2].weight.normal_()
    start, end = 3 * torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    trace = trace_segment(double, start, end)
    estimate = estimate_segment(double, start, end)
    assert estimate.at_least == trace.crossings


def test_units_bending_together_make_one_boundary():
    network = mlp(1, widths=(3, 16, 16, 2), bias=False)
    start = torch.tensor([1.0, -2.0, 0.5])
    assert trace_segment(network, start, -start).crossings == 1
    estimate = estimate_segment(network, start, -start)
    assert (estimate.at_least, estimate.crossings) == (1, 1.0)


def test_a_resting_unit_does_not_bend():
    network = nn.Sequential(nn.ReLU(), nn.ReLU())
    estimate = estimate_segment(network, torch.tensor([-1.0]), torch.tensor([2.0]))
    assert estimate.contributions == {"0": 1.0, "1": 0.0}


def test_segments_from_a_boundary_do_not_cross_it():
    estimate = estimate_segment(nn.ReLU(), torch.tensor([0.0, -1.0]), torch.tensor([1.0, 0.0]))
    assert estimate.at_least == 0


@pytest.mark.parametrize("seed", [87, 140, 176])
def test_pairs_are_searched_longer_among_few_crossings(seed):
    # A pair is a large part of so few crossings, and a grid that finds none is weak evidence.
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU()).double()
    with torch.no_grad():
        net[0].weight.mul_(2)
        net[0].bias.mul_(2)
    generator = torch.Generator().manual_seed(seed)
    start, end = torch.randn(2, 6, generator=generator).double()
    estimate = estimate_segment(net, start, end, dtype=torch.float64)
    assert estimate.crossings == trace_segment(net, start, end).crossings


@settings(max_examples=3)
@given(st.integers(0, 10**6), st.sampled_from([5, 20, 64]))
def test_estimates_depend_on_neither_memory_nor_batch(seed, megabytes):
    network = mlp(seed, widths=(3, 30, 30, 2))
    generator = torch.Generator().manual_seed(seed)
    starts, ends_ = 2 * torch.randn(2, 6, 3, generator=generator)
    options = {"tolerance": 1e-3, "evaluations": 300, "dtype": torch.float64}
    pairs = list(zip(starts, ends_, strict=True))
    together = list(estimate_segments(network, pairs, memory=megabytes * 2**20, **options))
    for pair, estimate in zip(pairs, together, strict=True):
        alone = next(estimate_segments(network, [pair], **options))
        assert (estimate.crossings, estimate.error) == (alone.crossings, alone.error)
        assert estimate.contributions == alone.contributions
        torch.testing.assert_close(estimate.values, alone.values, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("max_points", [3, 5])  # The first check runs three together.
def test_out_of_memory_halves_the_chunk(max_points, monkeypatch):
    network = mlp(5, widths=(3, 30, 30, 2))
    pairs = list(zip(*2 * torch.randn(2, 5, 3), strict=True))
    options = {"tolerance": 1e-3, "evaluations": 100, "dtype": torch.float64}
    expected = list(estimate_segments(network, pairs, **options))
    run, failed = PiecewiseNetwork.run, []

    def cramped(self, inputs, *watching):
        estimate = run(self, inputs, *watching)
        if len(inputs) > max_points:
            failed.append(len(inputs))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return estimate

    monkeypatch.setattr(PiecewiseNetwork, "run", cramped)
    for estimate, other in zip(estimate_segments(network, pairs, **options), expected, strict=True):
        assert (estimate.crossings, estimate.error) == (other.crossings, other.error)
        assert estimate.evaluations == other.evaluations
        torch.testing.assert_close(estimate.values, other.values, rtol=1e-12, atol=1e-14)
    assert 2 < len(failed) < 7  # The size that fits is remembered.


def test_estimate_is_symmetric_in_the_ends():
    segment = ends(7)
    forward = estimate_segment(NETWORKS["relu6"], *segment, dtype=torch.float64)
    reverse = estimate_segment(NETWORKS["relu6"], *segment[::-1], dtype=torch.float64)
    assert reverse.crossings == pytest.approx(forward.crossings, abs=max(2, forward.error))
    torch.testing.assert_close(reverse.above, forward.above, rtol=1e-3, atol=1e-6)


def test_short_segments_use_double_precision():
    start, end = ends(0)
    near = start + 1e-4 * (end - start)
    estimate = estimate_segment(NETWORKS["average pooling"], start, near)
    assert estimate.precision == torch.finfo(torch.float64).eps
    trace = trace_segment(NETWORKS["average pooling"], start, near)
    assert estimate.at_least == trace.crossings
    assert (
        estimate_segment(NETWORKS["average pooling"], start, near, dtype=torch.float32).precision
        == torch.finfo(torch.float32).eps
    )


def test_check_places_see_a_bump_between_nodes():
    centre, width = float(check_places()[5]), 1e-4

    def bump(x):
        rise, fall = torch.relu(x - centre + width), torch.relu(x - centre - width)
        return rise - 2 * torch.relu(x - centre) + fall + 1e-4 * x.abs()

    network = Functional(bump)
    estimate = estimate_segment(network, torch.zeros(1), torch.ones(1), evaluations=64)
    assert not estimate.converged
    assert float(estimate.deviation_error) > width**2


def test_lines_at_the_checked_places_have_no_error():
    line = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
    values = torch.linspace(0, 1, 17, dtype=torch.float64)[:, None] * line
    estimate = DeviationEstimate.of(values, check_places()[:, None] * line)
    assert float(estimate.error.max()) < 1e-14


def test_too_few_evaluations_do_not_converge():
    estimate = estimate_segment(NETWORKS["leaky"], *ends(0), tolerance=1e-9, evaluations=100)
    assert not estimate.converged
    assert len(estimate.t) + CHECK_PLACES <= 100


def test_smooth_networks_have_no_boundaries():
    start, end = ends(0, (3,))
    estimate = estimate_segment(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), start, end)
    assert estimate.crossings is None
    assert "tanh" in estimate.refused
    assert estimate.converged


def test_segments_without_length_have_no_boundaries():
    start, _ = ends(0)
    estimate = estimate_segment(NETWORKS["leaky"], start, start)
    assert (estimate.at_least, estimate.crossings, estimate.length) == (0, 0.0, 0.0)
    assert estimate.converged
    assert float(absolute_deviation(estimate).abs().max()) == 0


@pytest.mark.parametrize(
    ("start", "end", "error"),
    [
        (torch.zeros(3), torch.zeros(4), RequestError),
        (torch.zeros(3), torch.full((3,), math.nan), NotFinite),
        (torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), RequestError),
    ],
)
def test_invalid_ends_are_refused(start, end, error):
    with pytest.raises(error):
        estimate_segment(nn.ReLU(), start, end)


def test_auto_traces_within_the_budget():
    network = NETWORKS["average pooling"]
    paths = torch.stack([*ends(0), *ends(1)])[None]
    exact = [observation.trace for observation in observe_paths(network, paths)]
    estimates = [
        observation.trace
        for observation in observe_paths(network, paths, method="auto", budget=10**6)
    ]
    assert [trace.method for trace in estimates] == ["exact"] * 3
    for trace, other in zip(exact, estimates, strict=True):
        assert trace.t.tolist() == other.t.tolist()
        assert trace.values.tolist() == other.values.tolist()
    counts = sorted(trace.crossings for trace in exact)
    few = [
        observation.trace
        for observation in observe_paths(network, paths, method="auto", budget=counts[1] + 1)
    ]
    assert sorted(trace.method for trace in few) == ["exact", "exact", "refined"]
    for trace, other in zip(exact, few, strict=True):
        assert (other.method == "exact") == (trace.crossings <= counts[1])


def test_estimates_can_require_gradients():
    estimate = estimate_segment(NETWORKS["leaky"], *ends(0))
    estimate.values.requires_grad_(True).sum().backward()


def changed_places(before, after, tops):
    """Return the minimum number of neighbour swaps that change some ranks, by exhaustive search."""
    distance, queue = {before: 0}, [before]
    while queue:
        order = queue.pop(0)
        for i in range(len(order) - 1):
            other = (*order[:i], order[i + 1], order[i], *order[i + 2 :])
            cost = distance[order] + (i + 1 in tops)
            if cost < distance.get(other, math.inf):
                distance[other] = cost
                queue.append(other)
    return distance[after]


@given(st.permutations(range(4)), st.sets(st.integers(0, 3), min_size=1))
def test_ranks_count_at_most_the_exchanges(after, ranks):
    tops = {top for rank in ranks for top in (rank, rank + 1)} - {0, 4}
    lines = torch.tensor([range(4), after], dtype=torch.float64)
    pieces = Ranks(lambda x: x[0][:, None], sorted(ranks))
    (estimate,) = find_margins(pieces, [lines], torch.tensor([-1.0]))
    flat = estimate.values
    gone = int(((flat[0] > 0) & (flat[1] < 0)).sum())
    first, second = (tuple(line.argsort(descending=True).tolist()) for line in lines)
    assert gone <= changed_places(first, second, tops)
    assert (gone > 0) == any(set(first[:top]) != set(second[:top]) for top in tops)


def test_copies_of_sorted_lines_count_once():
    torch.manual_seed(3)
    twice = Functional(lambda x: torch.cat([x, x], 1).unflatten(1, (2, 5)).sort(2).values)
    network = nn.Sequential(nn.Linear(3, 5), twice)
    start, end = 4 * torch.randn(2, 3)
    trace = trace_segment(network, start, end)
    assert estimate_segment(network, start, end).at_least == trace.crossings > 1


def test_multiples_of_one_number_count_once():
    # All pixels of the corner are equal and the padding around it is zero, so each channel is a
    # multiple of one number.
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(384, 2),
    )
    start, end = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(4))
    start[:, :4, :4], end[:, :4, :4] = 1.0, -2.0
    trace = trace_segment(network, start, end)
    estimate = estimate_segment(network, start, end)
    assert estimate.contributions["1"] == trace.contributions["1"]


def test_units_equal_only_where_off_are_not_copies():
    # The units are on between 0.34 and 0.66, where no two of them bend at one point.
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1), nn.ReLU())
    head = [nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 2)]
    with torch.no_grad():
        network[0].weight.fill_(1.0)
        network[0].bias.copy_(torch.tensor([-0.34, -0.5]))
        network[2].weight.copy_(torch.tensor([[1.0, -2.0]]))
        network[2].bias.zero_()
        head[0].weight.fill_(1.0)
        head[0].bias.copy_(-torch.linspace(0.01, 0.15, 40))
    network = nn.Sequential(network, *head)
    start, end = torch.zeros(1), torch.ones(1)
    trace = trace_segment(network, start, end)
    estimate = estimate_segment(network, start, end)
    assert trace.crossings > 80
    assert abs(estimate.crossings - trace.crossings) <= estimate.error


class OwnPieces:
    """Pieces that are none of the known kinds."""

    def __init__(self, pieces):
        self.find_breakpoints = pieces.find_breakpoints
        self.possible = pieces.possible


def test_auto_traces_operations_with_unknown_pieces():
    name = "nlbench_refined_tests::uncounted"

    @torch.library.custom_op(name, mutates_args=())
    def uncounted(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(abs(x.detach().numpy()))

    def with_own_pieces(call):
        rule = kinked_function((0.0,), call, (1.0, 1.0))
        return replace(rule, pieces=OwnPieces(rule.pieces))

    nlbench.register_op(uncounted, line=with_own_pieces)
    network = nn.Sequential(nn.Linear(3, 8), Functional(lambda x: uncounted(x)))
    path = 4 * torch.randn(1, 2, 3, generator=torch.Generator().manual_seed(0))
    (observation,) = observe_paths(network, path, method="auto", budget=1)
    assert observation.trace.method == "exact"


FAR = 1e6
OFFSETS = FAR + 0.04 * torch.randn(20, dtype=torch.float64, generator=torch.manual_seed(0))
LARGE = {
    "maximum": lambda x: torch.maximum(x, OFFSETS.to(x)),
    "a difference": lambda x: torch.relu(x - OFFSETS.to(x)),
    "weights that cancel": lambda x: torch.relu(nn.functional.linear(x, LARGE_WEIGHT.to(x))),
    "clamping": lambda x: (x - FAR).clamp(-0.01, 0.02),
    "ranks": lambda x: x.topk(5, 1).values,
}
LARGE_WEIGHT = torch.eye(20) - torch.eye(20).roll(1, 0)


@pytest.mark.parametrize("name", LARGE)
def test_cancellation_uses_double_precision(name):
    generator = torch.Generator().manual_seed(1)
    start, along = torch.rand(2, 20, dtype=torch.float64, generator=generator)
    start = FAR - 0.1 + 0.1 * start
    segment = start, start + 0.2 * along
    network = Functional(LARGE[name]).double()
    trace = trace_segment(network, *segment)
    single = estimate_segment(network, *segment, dtype=torch.float32)
    assert single.undecided > 0
    assert abs(single.crossings - trace.crossings) <= single.error
    assert not single.converged
    estimate = estimate_segment(network, *segment)
    assert estimate.precision == torch.finfo(torch.float64).eps
    assert estimate.at_least == trace.crossings > 3


def test_an_estimate_stays_within_the_memory():
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 2),
    )
    pairs = [ends(seed) for seed in range(2)]
    memory = 2**21
    with LiveBytes() as live:
        estimates = list(
            estimate_segments(network, pairs, tolerance=1e-3, evaluations=34, memory=memory)
        )
    assert all(estimate.crossings > 300 for estimate in estimates)
    # One copy in single precision, and one in double to recognise copies of units.
    copies = 3 * sum(parameter.nbytes for parameter in network.parameters())
    assert memory / 8 < live.peak <= memory / 2 + copies
    with pytest.raises(RequestError):
        list(estimate_segments(network, pairs, tolerance=1e-3, evaluations=34, memory=10**4))


class Cast(nn.Module):
    """A network whose output has another dtype than its layers."""

    def __init__(self, act, dtype, noise=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), act, nn.Linear(8, 3))
        self.dtype, self.noise = dtype, noise

    def forward(self, x):
        y = self.body(x)
        return (y + self.noise * torch.randn(3, dtype=y.dtype)).to(self.dtype)


@pytest.mark.parametrize("act", [nn.Tanh(), nn.ReLU()])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_output_dtype_does_not_matter(act, dtype):
    ends = torch.linspace(-2, 2, 12).reshape(2, 6)
    estimate, plain = (estimate_segment(Cast(act, one), *ends) for one in (dtype, torch.float64))
    # Steps of half precision are rounding, not a different function.
    totals = absolute_deviation(estimate), absolute_deviation(plain)
    torch.testing.assert_close(*totals, rtol=0.02, atol=1e-3)


def test_random_networks_are_refused_for_any_output_dtype():
    with pytest.raises(Undefined):
        estimate_segment(Cast(nn.Tanh(), torch.float32, noise=1e-5), *torch.randn(2, 6))


def test_values_may_have_only_the_sample_axis():
    class Summed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            return torch.relu(self.linear(x).sum(1))[:, None]

    torch.manual_seed(0)
    net, ends = Summed(), (torch.tensor([3.0, 0, 0, 0]), torch.tensor([-3.0, 0, 0, 0]))
    slope, offset = 3 * net.linear.weight[:, 0].sum().item(), net.linear.bias.sum().item()
    crosses = abs(offset) < abs(slope)
    assert trace_segment(net, *ends).crossings == crosses
    assert estimate_segment(net, *ends).crossings == crosses


def shifted_relu(offset):
    """A unit that is `offset` in the middle of the segment, next to one of size 5."""
    network = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    with torch.no_grad():
        network[0].weight.fill_(1.0)
        network[0].bias.copy_(torch.tensor([offset, 5.0]))
    return network, torch.tensor([-1.0]), torch.tensor([1.0])


@pytest.mark.parametrize("offset", [1e-8, -1e-8])
def test_units_within_rounding_cross_once(offset):
    estimate = estimate_segment(*shifted_relu(offset), dtype=torch.float32)
    assert estimate.at_least == 1


def test_the_deviation_error_includes_rounding():
    network, start, end = shifted_relu(1e3)
    estimate = estimate_segment(network, start, end, dtype=torch.float32)
    rounding = torch.finfo(torch.float32).eps * float(estimate.values.abs().max())
    assert float(estimate.deviation_error) >= 2 * rounding


def test_evaluations_in_both_precisions_are_added():
    segment = NETWORKS["average pooling"], *ends(0)
    precise = estimate_segment(*segment, dtype=torch.float64)
    estimate = estimate_segment(*segment)
    assert estimate.precision == precise.precision
    assert estimate.evaluations == precise.evaluations + COST_PROBE_STEPS + 1


def test_deviation_errors_hold_for_few_kinks():
    generator = torch.Generator().manual_seed(0)
    t, fine = (torch.linspace(0, 1, n, dtype=torch.float64) for n in (129, 2**14 + 1))
    failed = 0
    for _ in range(300):
        kinks, slopes = torch.rand(2, 8, 1, dtype=torch.float64, generator=generator)

        def values(x, kinks=kinks, slopes=slopes):
            return ((slopes - 0.5) * (x - kinks).relu()).sum(0)[:, None]

        estimate = DeviationEstimate.of(values(t), values(check_places()))
        exact = chord_parts(fine, values(fine)).total
        failed += bool((estimate.parts.total - exact).abs() > estimate.error)
    assert failed <= 5
