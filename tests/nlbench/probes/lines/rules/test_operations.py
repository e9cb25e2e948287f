"""Each traced operation, compared with the network all along a segment."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs import record_checked_program
from torch import nn
from torch.nn import functional as F

from nlbench.introspection.model_copy import double_copy
from nlbench.probes.lines import estimate_segment, slope_changes, trace_segment
from nlbench.probes.lines.recording.program import walk
from nlbench.probes.lines.rules.rounding import tolerance_factor

from segments import Functional, assert_exact, on_segment, outputs

WIDTH = 24


def mask(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(7)) < 0.4


def index(high, *shape):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(7))


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).double()


def resized(h, size, **how):
    return F.interpolate(image(h), size=size, **how).flatten(1)


def image(h):
    return h.reshape(len(h), 2, 3, 4)


PLACES = 2 * torch.arange(WIDTH)

AFFINE = {
    "where": lambda h: torch.where(mask(1, WIDTH), h, 2 - h),
    "where a number": lambda h: torch.where(mask(WIDTH), h, 0.5),
    "masked_fill": lambda h: h.masked_fill(mask(1, WIDTH), -1e9).clamp(min=-5),
    "cumsum": lambda h: h.cumsum(1),
    "lerp": lambda h: torch.lerp(h, h.flip(1), 0.3),
    "lerp by a tensor": lambda h: h.lerp(h.roll(1, 1), numbers(1, WIDTH)),
    "gather": lambda h: h.gather(1, index(WIDTH, 1, 30)),
    "take_along_dim": lambda h: torch.take_along_dim(h, index(WIDTH, 1, 5), 1),
    "scatter": lambda h: torch.zeros_like(h).scatter(1, torch.arange(WIDTH)[None].flip(1), h),
    "scatter_add": lambda h: h.new_zeros(1, 5).scatter_add(1, index(5, 1, WIDTH), h),
    "index_add": lambda h: h.new_zeros(1, 5).index_add(1, index(5, WIDTH), h),
    "index_copy": lambda h: h.index_copy(1, torch.tensor([3, 1]), 2 * h[:, :2]),
    "index_select": lambda h: h.index_select(1, index(WIDTH, 9)),
    "unfold of a tensor": lambda h: h.unfold(1, 4, 2).sum(2),
    "unfold": lambda h: F.unfold(image(h), 2).flatten(1),
    "fold": lambda h: F.fold(h.reshape(-1, 4, 6), (3, 4), 2).flatten(1),
    "tril": lambda h: h.reshape(-1, 4, 6).tril().flatten(1),
    "triu": lambda h: h.reshape(-1, 4, 6).triu(1).flatten(1),
    "nearest-exact": lambda h: F.interpolate(
        image(h), scale_factor=1.5, mode="nearest-exact"
    ).flatten(1),
    "antialiased": lambda h: F.interpolate(
        image(h), size=(2, 3), mode="bilinear", antialias=True
    ).flatten(1),
    "bicubic": lambda h: resized(h, (5, 7), mode="bicubic"),
    "pow": lambda h: h.pow(1),
    "max_unpool": lambda h: F.max_unpool1d(h[:, None], 2 * torch.arange(WIDTH)[None, None], 2)[
        :, 0
    ],
    "repeat_interleave": lambda h: h.repeat_interleave(2, 1),
    "avg_pool, divided": lambda h: F.avg_pool2d(image(h), 2, divisor_override=1).flatten(1),
    "avg_pool, padded": lambda h: F.avg_pool2d(image(h), 2, padding=1).flatten(1),
    "addcmul": lambda h: torch.addcmul(h, h, numbers(WIDTH), value=2),
    "addmm": lambda h: torch.addmm(h[:, :3], h, numbers(WIDTH, 3), alpha=0.5, beta=2),
    "slice_scatter": lambda h: h.slice_scatter(3 * h[:, :4], 1, 8, 12),
    "stack": lambda h: torch.stack([h, 2 * h], 1).flatten(1),
}
ONE_SAMPLE = ("gather", "scatter", "scatter_add", "index_add", "max_unpool")
"""Operations whose index tensors have one sample."""
BENT = {
    "amax": lambda h: image(h).amax((2, 3)),
    "amin": lambda h: image(h).amin(1, keepdim=True).flatten(1),
    "max": lambda h: h.reshape(-1, 4, 6).max(2)[0],
    "min": lambda h: h.reshape(-1, 4, 6).min(1, keepdim=True).values.flatten(1),
    "cummax": lambda h: h.cummax(1)[0],
    "cummin": lambda h: h.reshape(-1, 4, 6).cummin(1)[0].flatten(1),
    "sort": lambda h: h.sort(1)[0],
    "sort, descending": lambda h: h.reshape(-1, 4, 6).sort(1, descending=True)[0].flatten(1),
    "msort": lambda h: h.reshape(-1, 6, 4).sort(dim=-1).values.flatten(1),
    "topk": lambda h: h.topk(3)[0],
    "topk, smallest": lambda h: h.topk(2, 1, largest=False)[0],
    "median": lambda h: h.reshape(-1, 3, 8).median(2)[0],
    "kthvalue": lambda h: h.kthvalue(5, 1, keepdim=True)[0],
    "norm 1": lambda h: h.norm(p=1, dim=1, keepdim=True),
    "norm 1 of linalg": lambda h: torch.linalg.vector_norm(image(h), 1, (1, 3)),
    "norm infinity": lambda h: h.reshape(-1, 4, 6).norm(p=float("inf"), dim=2),
    "softshrink": lambda h: F.softshrink(h, 0.3),
    "clamp": lambda h: h.clamp(-0.2, 0.4),
    "fmax": lambda h: torch.fmax(h, h.flip(1)),
}


def network(function, then=True):
    torch.manual_seed(0)
    first, second = nn.Linear(6, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()
    size = function(torch.zeros(1, WIDTH).double()).shape[1]
    third, last = nn.Linear(size, 8).double(), nn.Linear(8, 3).double()

    def forward(x):
        if len(x) > 1 and function in map(AFFINE.get, ONE_SAMPLE):
            return torch.cat([forward(sample) for sample in x.split(1)])
        h = function(second(torch.relu(2 * first(x))))
        return last(torch.relu(3 * third(h))) if then else h

    return Functional(forward)


def kinks(net, start, end):
    """Find where a network bends on a segment, by halving intervals where it is not straight."""

    def at(t):
        return outputs(net, on_segment(start, end, t))

    scale = float(at([0.0, 0.3, 1.0]).abs().max())
    left, right = torch.linspace(0, 1, 33).double()[:-1], torch.linspace(0, 1, 33).double()[1:]
    while True:
        fractions = torch.tensor([0.0, 0.21, 0.37, 0.58, 0.83, 1.0]).double()
        t = left[:, None] + (right - left)[:, None] * fractions
        y = at(t.flatten()).reshape(*t.shape, -1)
        chord = y[:, :1] + fractions[:, None] * (y[:, -1:] - y[:, :1])
        bent = ((y - chord).abs() > 1e-13 * scale).flatten(1).any(1)
        left, right = left[bent], right[bent]
        if not len(left) or right[0] - left[0] < 1e-10:
            return (left + right) / 2
        middle = (left + right) / 2
        left, right = torch.cat([left, middle]), torch.cat([middle, right])


@pytest.mark.parametrize("name", [*AFFINE, *BENT])
def test_an_operation_is_traced_exactly(name):
    net = network({**AFFINE, **BENT}[name])
    start, end = torch.randn(2, 6, generator=torch.Generator().manual_seed(3)).double()
    trace = trace_segment(net, start, end)
    assert_exact(net, start, end, trace)
    bends = kinks(net, start, end)
    assert len(bends) > 5
    distance = (bends[:, None] - trace.t).abs().amin(1)
    assert float(distance.max()) < 1e-8
    # Only on half of the segment, as the adaptive method takes longest.
    adaptive = trace_segment(net, start, (start + end) / 2, method="adaptive", sensitivity=1e-9)
    half = torch.cat([2 * trace.t[trace.t < 0.5], trace.t.new_ones(1)])
    assert adaptive.regions == len(half) - 1
    torch.testing.assert_close(adaptive.t, half, rtol=0, atol=1e-9)
    sampled = trace_segment(net, start, end, method="sampling", resolution=200)
    steps = torch.unique((trace.t[1:-1] * 200).floor())
    assert sampled.crossings == len(steps)


@pytest.mark.parametrize("name", BENT)
def test_kinks_add_no_extra_breakpoints(name):
    # Each of the operation's own breakpoints changes the slope of some output.
    net = network(BENT[name], then=False)
    start, end = torch.randn(2, 6, generator=torch.Generator().manual_seed(3)).double()
    trace = trace_segment(net, start, end)
    relus = sum(n for site, n in trace.contributions.items() if site.endswith("relu"))
    assert trace.crossings > relus
    assert slope_changes(trace) >= trace.crossings - relus


@given(st.sampled_from(list(BENT)), st.integers(0, 10**6), st.booleans())
def test_estimates_count_what_an_operation_bends(name, seed, resting):
    # After ReLUs, many units are tied.
    net = network(lambda h: BENT[name](torch.relu(h) if resting else h), then=False)
    start, end = torch.randn(2, 6, generator=torch.Generator().manual_seed(seed)).double()
    trace = trace_segment(net, start, end)
    estimate = estimate_segment(net, start, end, evaluations=300, dtype=torch.float64)
    assert estimate.at_least <= trace.crossings
    assert estimate.crossings == pytest.approx(
        trace.crossings, rel=0.02, abs=max(4, estimate.error)
    )


@pytest.mark.parametrize("name", [*AFFINE, *BENT])
def test_bounds_are_of_the_size_of_the_errors(name):
    """Changes in the last digits of the input change the output within the noise."""
    function = {**AFFINE, **BENT}[name]
    net = network(function, then=False)
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(5)).double()
    program = record_checked_program(double_copy(net), x)
    with torch.inference_mode():
        *_, last = walk(program, x)
        changed = [
            list(walk(program, x * (1 + 2**-52 * sign)))[-1].output
            for sign in (1, -1, torch.tensor([1, -1] * 3).double())
        ]
    error = torch.stack([(y - last.output).abs() for y in changed]).amax(0)
    allowed = tolerance_factor(torch.float64) * last.bound.expand_as(last.output)
    assert bool((error <= allowed).all())
    # A bound that hides everything would pass as well.
    assert float(allowed.max()) < 1e-9 * float(last.output.abs().max())
