import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nlbench.probes.lines import estimate_segment, observe_paths, trace_segment
from nlbench.probes.lines.estimation.coincidences import CrossingTable
from nlbench.probes.lines.estimation.copies import UNKNOWN, CrossingLog, clusters
from nlbench.probes.lines.estimation.piecewise import record_pieces
from tests.support.segments import Functional


def abs_():
    return Functional(torch.abs)


def clamp():
    return Functional(lambda x: x.clamp(-0.5, 0.8))


def depthwise(kernel=1):
    return nn.Conv2d(6, 6, kernel, padding=kernel // 2, groups=6)


def network_of(*layers, seed=0, channels=3, size=10):
    """Return a network with a head and batch statistics, and a segment between two samples."""
    torch.manual_seed(seed)
    net = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(4))
    example = torch.randn(16, channels, size, size)
    with torch.no_grad():
        net.train()(example)
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None
                nn.init.normal_(module.bias, std=0.5)
                module.reset_running_stats()
        net(example)
    return net.eval(), 1.5 * example[0], 1.5 * example[1]


def overlapping():
    return nn.MaxPool2d(3, 2, 1)


def convolution(inputs=3):
    return nn.Conv2d(inputs, 6, 3, padding=1)


CASES = {
    "norm and relu after": lambda: [
        *(convolution(), overlapping(), nn.BatchNorm2d(6), nn.ReLU()),
        *(convolution(6), nn.ReLU()),
    ],
    "relu before and after": lambda: [
        *(convolution(), nn.ReLU(), overlapping(), nn.BatchNorm2d(6), nn.ReLU())
    ],
    "leaky before and after": lambda: [
        *(convolution(), nn.LeakyReLU(), overlapping(), nn.BatchNorm2d(6), nn.LeakyReLU())
    ],
    "leaky at one place": lambda: [convolution(), nn.LeakyReLU(0.1), overlapping(), nn.LeakyReLU()],
    "pooled inputs": lambda: [overlapping(), nn.BatchNorm2d(3), nn.ReLU()],
    "depthwise": lambda: [convolution(), nn.ReLU(), overlapping(), depthwise(), nn.ReLU()],
    "twice pooled": lambda: [nn.MaxPool2d(3, 1, 1), nn.Conv2d(3, 3, 1), abs_(), overlapping()],
    "ceil mode": lambda: [nn.Hardtanh(), nn.MaxPool2d(3, 2, 1, ceil_mode=True), nn.ReLU()],
    "saturated": lambda: [
        convolution(),
        clamp(),
        nn.BatchNorm2d(6),
        clamp(),
        depthwise(3),
        clamp(),
    ],
    "averages": lambda: [
        *(convolution(), nn.ReLU(), nn.AvgPool2d(3, 1, 1), nn.BatchNorm2d(6), nn.ReLU())
    ],
}


def check(network, start, end):
    exact = trace_segment(network, start, end).crossings
    estimate = estimate_segment(network, start, end)
    assert estimate.at_least <= exact
    assert abs(estimate.crossings - exact) <= estimate.error
    return exact, estimate


@pytest.mark.parametrize("name", CASES)
def test_units_that_cross_together_count_once(name):
    exact, estimate = check(*network_of(*CASES[name]()))
    assert exact > 50
    assert estimate.at_least >= 0.98 * exact


@settings(max_examples=8)
@given(
    st.integers(0, 10**6),
    st.sampled_from([nn.ReLU, nn.LeakyReLU, nn.ReLU6, abs_, clamp]),
    st.sampled_from([overlapping, lambda: nn.MaxPool2d(3, 1, 1), lambda: nn.AdaptiveMaxPool2d(4)]),
    st.booleans(),
    st.booleans(),
)
def test_windows_before_any_unit_keep_the_bound(seed, act, pool, is_bent, has_norm):
    before = [convolution(), *([act()] if is_bent else [])]
    after = [nn.BatchNorm2d(6)] if has_norm else [depthwise()]
    network, start, end = network_of(*before, pool(), *after, act(), seed=seed, size=8)
    exact = trace_segment(network, start, end).crossings
    estimate = estimate_segment(network, start, end)
    assert estimate.at_least <= exact
    assert abs(estimate.crossings - exact) <= max(2, estimate.error)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1)])
def test_members_tied_at_the_end_do_not_switch(order):
    network = nn.Sequential(Functional(lambda x: x[:, None]), nn.MaxPool1d(3))
    order = torch.tensor(order)
    start, end = torch.tensor([1.0, -3.0, -2.9])[order], torch.tensor([1.0, 2.0, 2.0])[order]
    for segment in [(start, end), (end, start)]:
        exact = trace_segment(network, *segment).crossings
        assert estimate_segment(network, *segment).at_least == exact == 1


def test_saturated_units_are_not_copies():
    network = nn.Sequential(
        nn.Linear(1, 20),
        Functional(lambda x: x.clamp(-1, 1)),
        Functional(lambda x: (2 * x).clamp(-1, 1)),
    )
    with torch.no_grad():
        network[0].weight.fill_(300.0)
        network[0].bias.copy_(-300 * torch.linspace(0.34, 0.65, 20))
    check(network, torch.zeros(1), torch.ones(1))


@pytest.mark.parametrize(("slope", "expected"), [(1.0, 2), (1000.0, 2)])
def test_ranks_change_next_to_units_that_switch_on(slope, expected):
    # The second unit switches on as the first switches off, or overtakes it at once.
    last = 1e-7 if slope == 1 else 0.5

    def largest(x):
        rest = 0.3 - x if slope == 1 else last + 0 * x
        both = torch.cat([rest, slope * (x - 0.3 - 1e-7)], 1)
        return both.relu().topk(1, 1)[0]

    segment = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    network = Functional(largest).double()
    assert trace_segment(network, *segment).crossings == expected
    assert estimate_segment(network, *segment).at_least == expected


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("act", [nn.ReLU, nn.Hardtanh])
def test_ranks_are_counted_next_to_resting_units(seed, act):
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(6, 6), act(), Functional(lambda x: x.topk(3, 1)[0]))
    start, end = 4 * torch.randn(2, 6)
    exact, estimate = check(network, start, end)
    assert estimate.at_least >= exact - 2
    # Three units that change places at once are counted as two.
    assert estimate.error > 0 or exact < 3


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.ReLU()], False),
        ([nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(4, 4, 3), nn.ReLU()], False),
        ([nn.MaxPool2d(3, 2), nn.ReLU()], True),
        ([nn.MaxPool2d(2, 2, 0, 2), nn.ReLU()], True),
        ([nn.ReLU(), nn.AvgPool2d(3, 2), nn.ReLU()], True),
        ([nn.ReLU(), nn.AvgPool2d(3, 2)], False),
        ([nn.Conv2d(3, 4, 3), nn.ReLU6()], True),
    ],
)
def test_only_networks_that_need_it_are_compared(layers, expected):
    network = nn.Sequential(*layers).double().eval()
    example = torch.randn(1, 3, 10, 10, dtype=torch.float64)
    assert record_pieces(network, example).may_coincide == expected


def test_units_crossing_together_are_counted_in_float64():
    layers = nn.Conv2d(3, 24, 3), nn.ReLU(), overlapping(), nn.BatchNorm2d(24), nn.ReLU()
    network, start, end = network_of(*layers, size=16)
    # The first segment is searched for ties, the others are expected to have them.
    path = torch.stack([start, end, start.roll(1), end.roll(3)])
    estimates = [item.trace for item in observe_paths(network, path[None], method="refined")]
    for ends, estimate in zip(itertools.pairwise(path), estimates, strict=True):
        double = estimate_segment(network, *ends, dtype=torch.float64)
        assert (estimate.crossings, estimate.at_least) == (double.crossings, double.at_least)
        assert estimate.contributions == double.contributions
        # Values of the network are as precise in float32.
        assert estimate.precision == torch.finfo(torch.float32).eps
        error = estimate.deviation_error + double.deviation_error
        assert (
            (estimate.above + estimate.below - double.above - double.below).abs() <= error
        ).all()


FLATS = torch.zeros(1, dtype=torch.float64)


def table(crossings, has_windows=False, steps=8):
    """Return a table of crossings (step, unit, values at the left, values at the right)."""
    log = CrossingLog(100)
    for step, unit, *ends in crossings:
        for side, values in enumerate(ends):
            if values is None:
                continue
            pair = torch.tensor([values] if has_windows else [[values, values]])
            interval = torch.tensor([2 * step + side])
            noise = torch.full((1,), 1e-12)
            log.add(interval, 0, 0, torch.tensor([unit]), pair, noise, interval >= 0)
    log.fetch()
    return CrossingTable(log, 1, steps, torch.tensor([has_windows]), FLATS)


def counts(*arguments, **options):
    return [int(x) for x in table(*arguments, **options).counts()[:2]]


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3, st.booleans(), st.booleans()), max_size=12))
def test_clusters_are_rows_of_a_group_that_agree(rows):
    group = torch.tensor([row[0] for row in rows], dtype=torch.int64)
    values = torch.tensor([row[1:3] for row in rows], dtype=torch.float64).reshape(-1, 2)
    # Agreement is transitive here: values differ by 0, by a tenth of the tolerance, or by 1.
    values += torch.tensor([[1e-7 * row[3]] for row in rows]).reshape(-1, 1)
    values[values == 3.0] = UNKNOWN
    is_compared = torch.tensor([row[4] for row in rows], dtype=torch.bool)
    expected = [
        next(
            j
            for j in range(i + 1)
            if i == j
            or (
                bool(is_compared[i] & is_compared[j])
                and group[i] == group[j]
                and bool(((values[i] - values[j]).abs() <= 1e-6).all())
            )
        )
        for i in range(len(rows))
    ]
    tolerance = torch.full((len(rows),), 1e-6, dtype=torch.float64)
    assert clusters(group, values, tolerance, is_compared).tolist() == expected


def test_unknown_ends_are_compared_at_the_other():
    random = torch.linspace(0, 1, 40, dtype=torch.float64)
    ends = torch.full((41, 2), UNKNOWN, dtype=torch.float64)
    ends[:, 0] = torch.cat([random, random[:1]])
    tolerance = torch.full((41,), 1e-12, dtype=torch.float64)
    assert clusters(torch.zeros(41, dtype=torch.int64), ends, tolerance)[40] == 0


@pytest.mark.parametrize(("second", "has_ties"), [((0.1, 0.2), True), ((0.1, 0.3), False)])
def test_ties_are_crossings_that_repeat_another(second, has_ties):
    assert table([(0, 1, 0.1, 0.2), (0, 2, *second)]).counts()[2].tolist() == [has_ties]


def test_units_equal_at_both_ends_cross_together():
    assert counts([(0, 1, 0.1, 0.2), (0, 2, 0.1, 0.2), (0, 3, 0.1, 0.3)]) == [-1, 1]


def test_units_equal_at_one_end_may_cross_together():
    assert counts([(0, 1, 0.1, 0.2), (0, 2, 0.3, 0.2), (1, 3, 0.2, 0.1)]) == [0, 1]


def test_multiples_cross_together():
    assert counts([(0, 1, 0.1, 0.2), (0, 2, 0.25, 0.5)]) == [-1, 0]


def test_flat_values_are_not_evidence():
    flat_left = [(0, 1, 0.1, 0.2), (0, 2, 0.1, 0.3), (4, 3, 0.1, 0.7)]
    assert counts(flat_left) == [0, 0]
    saturated = [(0, 1, 0.1, 0.2), (0, 2, 0.1, 0.2), (4, 3, 0.1, 0.7), (6, 3, 0.6, 0.2)]
    assert counts(saturated) == [0, 1]


def test_a_switch_needs_a_leader_at_each_end():
    real, tied = (0, 1, [0.5, 0.2], [0.4, 0.6]), (0, 2, [0.5, 0.5], [0.4, 0.7])
    assert counts([real, tied], has_windows=True) == [1, 0]
    unknown = (0, 1, None, [0.4, 0.6])
    assert counts([unknown], has_windows=True) == [1, 1]


def test_switches_through_rest_are_crossings_of_units():
    assert counts([(0, 1, [0.5, 0.0], [0.0, 0.6])], has_windows=True) == [0, 0]
    assert counts([(0, 1, [0.5, 0.0], [0.1, 0.6])], has_windows=True) == [1, 0]


def test_simultaneous_switches_add_no_breakpoint():
    left, right = {"A": 0.9, "B": 0.5, "C": 0.2}, {"A": 0.1, "B": 0.4, "C": 0.8}
    steps = [
        (0, i, [left[a], left[b]], [right[a], right[b]])
        for i, (a, b) in enumerate(["AB", "BC", "AC"])
    ]
    assert counts(steps, has_windows=True) == [3, 1]


def test_halving_keeps_what_is_known():
    coarse = table([(0, 1, 0.1, 0.3), (0, 2, 0.1, 0.3), (3, 3, 0.7, 0.9)], steps=4)
    log = CrossingLog(100)
    # Both cross in the left half, with a common value in the middle.
    for unit in (1, 2):
        ones = torch.ones(1)
        log.add(
            0 * ones.long(), 0, 0, unit * ones.long(), torch.full((1, 2), 0.2), 0 * ones, ones > 0
        )
    log.fetch()
    coarse.halve(log)
    assert coarse.steps == 8
    assert [int(x) for x in coarse.counts()[:2]] == [-1, 0]
    coarse.select([0])
    assert [int(x) for x in coarse.counts()[:2]] == [-1, 0]
