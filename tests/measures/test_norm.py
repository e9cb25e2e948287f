"""Norm of what an activation changes, against NumPy's matrix norm."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nlbench.errors import Undefined
from nlbench.measures.norm import Norm, change_norm

from streams import batches_of, read


def pair(seed, n, d):
    r = np.random.default_rng(seed)
    x = r.standard_normal((n, d))
    return torch.tensor(x), torch.tensor(np.tanh(x))


@given(st.integers(0, 999), st.integers(1, 30), st.integers(1, 20))
def test_both_kinds_are_numpys_frobenius_norms(seed, n, d):
    x, y = pair(seed, n, d)
    absolute = np.linalg.norm((x - y).numpy(), "fro")
    assert change_norm(x, y, kind="absolute").item() == pytest.approx(absolute, rel=1e-12)
    relative = absolute / np.linalg.norm(x.numpy(), "fro")
    assert change_norm(x, y).item() == pytest.approx(relative, rel=1e-12)


@given(
    st.integers(0, 999),
    st.integers(1, 30),
    st.integers(1, 9),
    st.sampled_from(["relative", "absolute"]),
)
def test_the_stream_is_as_good_as_one_batch(seed, n, size, kind):
    x, y = pair(seed, n, 5)
    result = read(Norm(kind=kind), batches_of(x, y, size))
    assert result.summary["value"] == pytest.approx(change_norm(x, y, kind=kind).item())
    assert result.values[0].n == n


@pytest.mark.parametrize(("kind", "other"), [("relative", "absolute"), ("absolute", "relative")])
def test_other_norm_is_recorded_too(kind, other):
    x, y = pair(0, 12, 3)
    value = read(Norm(kind=kind), [(x, y)]).values[0]
    assert value.statistics[other] == pytest.approx(change_norm(x, y, kind=other).item())


def test_identity_has_norm_zero_and_the_opposite_two():
    x, _ = pair(1, 9, 4)
    assert change_norm(x, x).item() == 0
    assert change_norm(x, -x).item() == pytest.approx(2)


@pytest.mark.parametrize("power", [-1000, -600, 600, 1000])
def test_extreme_units_do_not_change_relative_norm(power):
    x, y = pair(2, 20, 6)
    scale = 2.0**power
    assert change_norm(x * scale, y * scale).item() == pytest.approx(change_norm(x, y).item())
    result = read(Norm(), batches_of(x * scale, y * scale, 7))
    assert result.summary["value"] == pytest.approx(change_norm(x, y).item())


def test_norm_is_differentiable():
    x, y = pair(3, 5, 2)
    assert torch.autograd.gradcheck(change_norm, (x.requires_grad_(), y.requires_grad_()))


def test_a_zero_input_has_an_absolute_norm_only():
    x, y = torch.zeros(4, 2), torch.ones(4, 2)
    with pytest.raises(Undefined):
        change_norm(x, y)
    assert change_norm(x, y, kind="absolute").item() == pytest.approx(math.sqrt(8))
    value = read(Norm(), [(x, y)]).values[0]
    assert (value.status, dict(value.statistics)) == ("undefined", {})
    assert read(Norm(kind="absolute"), [(x, y)]).summary["value"] == pytest.approx(math.sqrt(8))


def test_empty_norm_is_undefined():
    x, y = pair(5, 6, 2)
    assert read(Norm(), [(x[:0], y[:0])]).values[0].reason == "no samples"
