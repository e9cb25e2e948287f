import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import Net
from torch import nn

from nlbench.introspection.operations import known
from nlbench.probes.lines import trace_segment
from nlbench.probes.lines.rules.maxima import pooling_windows
from nlbench.probes.lines.rules.pieces import MaxGroups, overtakes
from nlbench.probes.lines.rules.rounding import tolerance_factor
from nlbench.probes.lines.rules.rule import Input, RecordedCall


@settings(max_examples=100)
@given(st.integers(0, 10**6), st.integers(1, 6), st.booleans())
def test_an_envelope_bends_where_the_largest_line_changes(seed, lines, ties):
    torch.manual_seed(seed)
    left, right = torch.randn(2, 5, lines, dtype=torch.float64)
    if ties:
        left, right = left.round(), right.round()
    top = (left == left.amax(1, keepdim=True), right == right.amax(1, keepdim=True))
    fraction, row = overtakes(left, right, *top)
    for envelope in range(5):
        # By brute force: every meeting of two lines at which both are the largest, while
        # none is the largest on both sides.
        expected = set()
        for i in range(lines):
            for j in range(lines):
                a, b = left[envelope], right[envelope]
                rise = (b[i] - a[i]) - (b[j] - a[j])
                if rise <= 0 or a[i] >= a[j]:
                    continue
                t = (a[j] - a[i]) / rise
                height = torch.lerp(a[i], b[i], t)
                if t < 1 - 1e-12 and height >= torch.lerp(a, b, t).max() - 1e-12:
                    expected.add(round(float(t), 9))
        bends = {round(float(t), 9) for t in fraction[row == envelope] if 1e-12 < t < 1 - 1e-12}
        assert bends == expected


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool1d(3, 2, 1),
        nn.MaxPool1d(2, ceil_mode=True),
        nn.MaxPool2d((2, 3), (1, 2), (1, 0), (2, 1)),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.MaxPool3d(2, 1),
        nn.AdaptiveMaxPool1d(3),
        nn.AdaptiveMaxPool2d((3, 2)),
        nn.AdaptiveMaxPool3d(2),
    ],
)
def test_pooling_windows_have_the_maxima_of_pooling(pool):
    kind = type(pool).__name__
    axes = int(kind[-2])
    torch.manual_seed(0)
    x = torch.randn(4, 2, *range(7, 7 + axes))
    expected = pool(x)
    if kind.startswith("Adaptive"):
        name, args, kwargs = f"adaptive_max_pool{axes}d", (None, pool.output_size), {}
    else:
        name, args = f"max_pool{axes}d", (None, pool.kernel_size, pool.stride)
        kwargs = {"padding": pool.padding, "dilation": pool.dilation}
    windows = pooling_windows(name, args, kwargs, x.shape[2:], expected.shape[2:])
    assert torch.equal(x.flatten(2)[..., windows].amax(-1), expected.flatten(2))


def groups_of_three():
    windows = torch.tensor([[0, 1, 2]])
    return MaxGroups(lambda x: x, lambda device: windows, lambda maxima: maxima)


def test_members_far_below_others_widen_no_tolerance():
    x = torch.tensor([[[1.0, 0.0, -1e30]], [[0.0, 1.0, -1e30]]], dtype=torch.float64)
    groups = groups_of_three()
    interval, fraction = groups.find_breakpoints([x], [x.abs()])
    assert (interval.tolist(), fraction.tolist()) == ([0], [0.5])
    assert groups.bound([x], [x.abs()], x).tolist() == [[[1.0]], [[1.0]]]


ORDER_STATISTICS = {
    "median": lambda x: x.median(1)[0],
    "kthvalue": lambda x: x.kthvalue(2, 1)[0],
    "largest": lambda x: x.topk(2, 1)[0],
    "smallest": lambda x: x.topk(2, 1, largest=False)[0],
    "sort": lambda x: x.sort(1)[0],
    "cummax": lambda x: x.cummax(1)[0],
    "amax": lambda x: x.amax(1),
    "max pooling": lambda x: nn.functional.max_pool1d(x[:, None], 3, 1),
}


def bending_places(function, start, end):
    """Return where a function bends, from its slopes around each crossing of two inputs."""
    meetings = {0.0, 1.0}
    for i, j in itertools.combinations(range(start.numel()), 2):
        before, after = (float(x.flatten()[i] - x.flatten()[j]) for x in (start, end))
        if before * after < 0:
            meetings.add(round(before / (before - after), 12))
    t = torch.tensor(sorted(meetings), dtype=torch.float64)
    inside = t[:-1] + t.diff() * torch.tensor([[0.25], [0.75]], dtype=torch.float64)
    low, high = (function(torch.lerp(start, end, x[:, None])) for x in inside)
    slope = (high - low).reshape(len(t) - 1, -1) / inside.diff(dim=0).reshape(-1, 1)
    return t[1:-1][(slope.diff(dim=0).abs() > 1e-7).any(1)].tolist()


def tied_ends(kind, size, seed):
    generator = torch.Generator().manual_seed(seed)
    start, end = torch.randn(2, 1, size, generator=generator, dtype=torch.float64)
    if kind == "all at one place":
        end = -start
    elif kind == "whole numbers":
        start, end = (2 * start).round(), (2 * end).round()
    else:
        start[..., -2:], end[..., -2:] = start[..., :2].clone(), end[..., :2].clone()
    return start, end


@pytest.mark.parametrize("kind", ["all at one place", "whole numbers", "equal all along"])
@pytest.mark.parametrize("name", ORDER_STATISTICS)
def test_lines_that_meet_at_one_place(name, kind):
    for size, seed in itertools.product((3, 4, 5, 8), range(2)):
        function = ORDER_STATISTICS[name]
        start, end = tied_ends(kind, size, seed)
        net = Net(lambda m, x, function=function: function(x).reshape(len(x), -1))
        trace = trace_segment(net, start[0], end[0])
        expected = bending_places(function, start, end)
        assert trace.t[1:-1].tolist() == pytest.approx(expected, abs=1e-9), (size, seed)


def rule_of(name, *args, shapes, shape, **kwargs):
    function = getattr(torch, name)
    return known(name).line(RecordedCall(name, function, args, kwargs, shapes, shape))


@pytest.mark.parametrize(
    ("name", "expected"), [("maximum", [10.0, 2.0, 30.0]), ("minimum", [1.0, 20.0, 3.0])]
)
def test_maxima_have_the_error_of_the_largest(name, expected):
    rule = rule_of(name, Input(0), Input(1), shapes=((1, 3), (1, 3)), shape=(1, 3))
    x, y = torch.tensor([[0.0, 5.0, -1.0]]), torch.tensor([[1.0, 4.0, 2.0]])
    bounds = [torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[10.0, 20.0, 30.0]])]
    assert rule.bound([x, y], bounds, rule.apply([x, y])).tolist() == [expected]


def test_maxima_that_are_constants_have_no_error():
    rule = rule_of("maximum", Input(0), torch.zeros(1, 3), shapes=((1, 3),), shape=(1, 3))
    x, bounds = torch.tensor([[-1.0, 2.0, 3.0]]), [torch.tensor([[1.0, 2.0, 3.0]])]
    assert rule.bound([x], bounds, rule.apply([x])).tolist() == [[0.0, 2.0, 3.0]]


def test_shared_errors_combine_to_the_larger():
    rule = rule_of("minimum", Input(0), Input(1), shapes=((1, 2, 4), (1, 2, 4)), shape=(1, 2, 4))
    x, y = torch.randn(2, 3, 2, 4)
    bounds = [torch.full((3, 1, 1), 1.0), torch.tensor([[[0.5], [2.0]]]).expand(3, 2, 1)]
    bound = rule.bound([x, y], bounds, rule.apply([x, y]))
    assert torch.equal(bound, torch.tensor([[[1.0], [2.0]]]).expand(3, 2, 1))


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("sort", (1,), [1.0, 3.0, 2.0]),
        ("topk", (2, 1), [2.0, 3.0]),
        ("kthvalue", (1, 1, True), [1.0]),
        ("median", (1, True), [3.0]),
        ("cummax", (1,), [3.0, 2.0, 2.0]),
        ("amax", (1, True), [2.0]),
        ("amin", (1, True), [1.0]),
    ],
)
def test_ranked_numbers_have_their_own_errors(name, args, expected):
    x, bound = torch.tensor([[4.0, 7.0, -1.0]]), torch.tensor([[3.0, 2.0, 1.0]])
    rule = rule_of(name, Input(0), *args, shapes=((1, 3),), shape=(1, len(expected)))
    output = x if name == "cummax" else torch.zeros(1, len(expected))
    assert rule.bound([x], [bound], output).tolist() == [expected]


def test_lines_equal_within_rounding_share_ranks():
    def forward(x, rank):
        a, b = x[:, :1], x[:, 1:]
        lines = torch.cat([b, a, a * 0.1 / 0.1, a * 0.7 / 0.7, a * 0.3 / 0.3], 1)
        return lines.kthvalue(rank, 1, True)[0]

    for seed, rank in itertools.product(range(4), (2, 3, 4)):
        start, end = tied_ends("", 2, seed)
        end[..., 1] = 2 * start[0, 0] - start[0, 1] + (end - start)[0, 0]
        net = Net(lambda m, x, rank=rank: forward(x, rank))
        assert trace_segment(net, start[0], end[0]).crossings == 0


def test_distances_have_the_larger_tolerance():
    x = torch.tensor([[[1.0, 0.9, 0.0]]], dtype=torch.float64)
    for noisy in (0, 1):
        bound = torch.zeros_like(x)
        bound[..., noisy] = 0.2 / tolerance_factor(x.dtype)
        tied, _, _ = groups_of_three().tied([x], [bound])
        assert tied.flatten().tolist() == [True, True, False]


def test_windows_are_adjacent_without_a_stride():
    for stride in ({}, {"stride": None}, {"stride": []}):
        windows = pooling_windows("max_pool1d", (None, 2), stride, (4,), (2,))
        assert windows.tolist() == [[0, 1], [2, 3]]
