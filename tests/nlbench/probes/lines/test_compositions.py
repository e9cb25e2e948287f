"""Random compositions of operations, traced and compared with values in extended precision.

Each operation is written twice: for PyTorch, and in NumPy with a mantissa of 64 bits, as a
reference. A trace is correct if the reference is straight between its breakpoints, and complete if
the reference bends nowhere else.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from nlbench.probes.lines import trace_segment

from segments import Functional

WIDTH = 8


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def long(x):
    return x.numpy().astype(np.longdouble)


def _linear(seed):
    w, b = random(seed, WIDTH, WIDTH) / 3, random(seed + 1, WIDTH) / 3
    return lambda x: F.linear(x, w, b), lambda x: x @ long(w).T + long(b)


def _matmul(seed):
    w = random(seed, WIDTH, WIDTH) / 2
    return lambda x: x @ w, lambda x: x @ long(w)


def _convolution(seed):
    w = random(seed, 1, 1, 3) / 2

    def twin(x):
        padded, kernel = np.pad(x, ((0, 0), (1, 1))), long(w)[0, 0]
        return sum(padded[:, i : i + WIDTH] * kernel[i] for i in range(3))

    return lambda x: F.conv1d(x[:, None], w, padding=1)[:, 0], twin


def _mask(seed):
    mask = random(seed, WIDTH) > 0
    return (
        lambda x: torch.where(mask, x, 0.3 - x),
        lambda x: np.where(mask.numpy(), x, np.longdouble(0.3) - x),
    )


def _shift(seed):
    by = seed % WIDTH
    return lambda x: x + x.roll(by, 1) / 2, lambda x: x + np.roll(x, by, 1) / 2


def _scale(seed):
    by = random(seed, WIDTH)
    return lambda x: x * by, lambda x: x * long(by)


def _residual(seed):
    inner, twin = _linear(seed)
    return lambda x: x + torch.relu(inner(x)), lambda x: x + np.maximum(twin(x), 0)


def _pooling(seed):
    def twin(x):
        padded = np.pad(x, ((0, 0), (0, 2)), constant_values=-1e30)
        return np.max([padded[:, i : i + WIDTH] for i in range(3)], axis=0)

    return lambda x: F.max_pool1d(F.pad(x[:, None], (0, 2), value=-1e30), 3, 1)[:, 0], twin


def _average(seed):
    return (
        lambda x: F.avg_pool1d(F.pad(x[:, None], (1, 1)), 3, 1)[:, 0],
        lambda x: sum(np.pad(x, ((0, 0), (1, 1)))[:, i : i + WIDTH] for i in range(3)) / 3,
    )


def _assignment(seed):
    def forward(x):
        y = x.clone()
        y[:, 1:4] = torch.relu(x[:, 4:7])
        return y

    def twin(x):
        return np.concatenate([x[:, :1], np.maximum(x[:, 4:7], 0), x[:, 4:]], 1)

    return forward, twin


OPERATIONS = {
    "linear": _linear,
    "matmul": _matmul,
    "conv1d": _convolution,
    "where": _mask,
    "roll": _shift,
    "mul": _scale,
    "residual": _residual,
    "max_pool1d": _pooling,
    "avg_pool1d": _average,
    "assignment": _assignment,
    "relu": lambda s: (torch.relu, lambda x: np.maximum(x, 0)),
    "leaky": lambda s: (lambda x: F.leaky_relu(x, 0.5), lambda x: np.where(x > 0, x, x / 2)),
    "abs": lambda s: (torch.abs, np.abs),
    "hardtanh": lambda s: (F.hardtanh, lambda x: np.clip(x, -1, 1)),
    "softshrink": lambda s: (
        lambda x: F.softshrink(x, 0.25),
        lambda x: np.sign(x) * np.maximum(np.abs(x) - 0.25, 0),
    ),
    "maximum": lambda s: (
        lambda x: torch.maximum(x, x.flip(1) - 1),
        lambda x: np.maximum(x, x[:, ::-1] - 1),
    ),
    "cumsum": lambda s: (lambda x: x.cumsum(1) / 4, lambda x: np.cumsum(x, 1) / 4),
    "sort": lambda s: (lambda x: x.sort(1)[0], lambda x: np.sort(x, 1)),
    "amax": lambda s: (
        lambda x: x - x.amax(1, keepdim=True) / 2,
        lambda x: x - x.max(1, keepdims=True) / 2,
    ),
    "cat": lambda s: (
        lambda x: torch.cat([x[:, ::2], -x[:, ::2]], 1),
        lambda x: np.concatenate([x[:, ::2], -x[:, ::2]], 1),
    ),
}


@st.composite
def compositions(draw, min_depth, max_depth):
    # Drawn separately, since lists of any length are nearly always short.
    depth = draw(st.integers(min_depth, max_depth))
    names = draw(st.lists(st.sampled_from(list(OPERATIONS)), min_size=depth, max_size=depth))
    # Linear layers in between, or most compositions would soon be constant.
    seeds = [draw(st.integers(0, 999)) for _ in names]
    parts = []
    for name, seed in zip(names, seeds, strict=True):
        parts += [_linear(seed + 7)] if name in ("hardtanh", "relu", "softshrink") else []
        parts.append(OPERATIONS[name](seed))
    return names, parts[:depth], draw(st.integers(0, 999))


def assert_correct(drawn):
    _, parts, seed = drawn

    def forward(x):
        for function, _ in parts:
            x = function(x)
        return x

    def reference(t):
        t = np.asarray(t, dtype=np.longdouble)[:, None]
        x = (1 - t) * long(start) + t * long(end)
        for _, twin in parts:
            x = twin(x)
        return x

    start, end = random(seed, 2, WIDTH)
    trace = trace_segment(Functional(forward), start, end)
    t, values = trace.t.numpy().astype(np.longdouble), trace.values.numpy()
    scale = np.abs(values).max() + 1e-300
    # If it is straight inside each region, it bends nowhere else.
    for fraction in (0.0, 0.07, 0.31, 0.5, 0.82, 0.97):
        at = t[:-1] + fraction * np.diff(t)
        line = values[:-1] + fraction * np.diff(values, axis=0)
        assert np.abs(reference(at) - line).max() <= 1e-10 * scale
    # A breakpoint that changes the slope of the trace changes that of the reference.
    for i in np.flatnonzero(np.diff(t) > 1e-6)[:-1]:
        if i + 1 < len(t) - 1 and t[i + 2] - t[i + 1] > 1e-6:
            h = min(t[i + 1] - t[i], t[i + 2] - t[i + 1]) / 2
            before, here, after = reference([t[i + 1] - h, t[i + 1], t[i + 1] + h])
            slopes = np.diff(values[i : i + 3], axis=0) / np.diff(t[i : i + 3])[:, None]
            bend = (slopes[1] - slopes[0]) * h
            assert np.abs((after - 2 * here + before) - bend).max() <= 1e-9 * scale


@given(compositions(1, 16))
def test_compositions_agree_with_extended_precision(drawn):
    assert_correct(drawn)


@pytest.mark.slow
@settings(max_examples=15)
@given(compositions(40, 40))
def test_forty_operations_agree_with_extended_precision(drawn):
    assert_correct(drawn)
