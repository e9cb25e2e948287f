"""The matching against solvers, the certificate against the optimum."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from nlbench.measures._assignment import (
    identity_is_optimal,
    optimal_matching,
    squared_distances,
)


def points(seed, n, d):
    r = np.random.default_rng(seed)
    return torch.tensor(r.standard_normal((n, d)))


def certified(cost, allowed=1e-12):
    cost = torch.as_tensor(cost, dtype=torch.float64)
    diagonal = cost.diagonal()
    return identity_is_optimal(cost - diagonal, diagonal, allowed=allowed)


def mean_cost(a, b, matching):
    return (a - b[matching]).square().sum(1).mean().item()


def test_squared_distances_are_scipys():
    a, b = points(0, 30, 7), points(1, 30, 7)
    expected = cdist(a.numpy(), b.numpy(), "sqeuclidean")
    np.testing.assert_allclose(squared_distances(a, b).numpy(), expected, rtol=1e-12)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 999), st.integers(2, 6), st.integers(1, 4))
def test_the_matching_is_the_best_of_all_permutations(seed, n, d):
    a, b = points(seed, n, d), points(seed + 5000, n, d)
    best = min(mean_cost(a, b, list(p)) for p in itertools.permutations(range(n)))
    matching = optimal_matching(a, b, precision=1e-9)
    assert sorted(matching.tolist()) == list(range(n))
    assert mean_cost(a, b, matching) == pytest.approx(best, rel=1e-12)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 999), st.integers(2, 30), st.integers(1, 5), st.floats(0.0, 2.0))
def test_a_certified_identity_costs_no_more_than_the_solvers_matching(seed, n, d, noise):
    a = points(seed, n, d)
    cost = squared_distances(a, a + noise * points(seed + 5000, n, d)).numpy()
    rows, columns = linear_sum_assignment(cost)
    gap = np.trace(cost) / n - cost[rows, columns].mean()
    for allowed in (1e-12, 0.01, 0.1):
        if certified(cost, allowed):
            assert gap <= allowed + 1e-12


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 999), st.integers(2, 12))
def test_an_arbitrary_cost_is_never_certified_beyond_its_gap(seed, n):
    cost = np.random.default_rng(seed).integers(0, 4, (n, n)).astype(float)
    rows, columns = linear_sum_assignment(cost)
    if certified(cost):
        assert np.trace(cost) == cost[rows, columns].sum()


@pytest.mark.parametrize(
    ("cost", "sweeps"),
    [
        pytest.param([[0, 4, 4, 2], [3, 0, 5, 5], [2, 5, 1, 3], [2, 4, 4, 1]], 0, id="rows"),
        pytest.param([[2, 3, 4, 3], [5, 4, 5, 5], [0, 2, 0, 5], [0, 1, 1, 1]], 0, id="columns"),
        pytest.param([[0, 1, 0, 2], [4, 0, 3, 4], [4, 2, 0, 4], [4, 1, 4, 4]], 0, id="midpoint"),
        pytest.param([[1, 0, 0, 0], [2, 0, 3, 5], [5, 5, 3, 2], [5, 5, 2, 1]], 1, id="one sweep"),
        pytest.param([[2, 5, 5, 4], [3, 5, 5, 5], [3, 0, 0, 1], [3, 4, 2, 1]], 3, id="more"),
    ],
)
def test_an_optimal_identity_is_certified_with_as_few_sweeps_as_it_takes(cost, sweeps, monkeypatch):
    rows, columns = linear_sum_assignment(cost)
    assert np.trace(cost) == np.asarray(cost)[rows, columns].sum()
    assert certified(cost)
    monkeypatch.setattr("nlbench.measures._assignment.SWEEPS", sweeps)
    assert certified(cost)
    if sweeps:
        monkeypatch.setattr("nlbench.measures._assignment.SWEEPS", sweeps - 1)
        assert not certified(cost)


def test_a_monotone_elementwise_map_is_certified_without_a_solver(monkeypatch):
    x = points(3, 200, 20)
    monkeypatch.setattr("nlbench.measures._assignment.linear_sum_assignment", None)
    matching = optimal_matching(x, x.clamp(min=0), precision=1e-9)
    assert matching.tolist() == list(range(200))


def test_on_a_line_ranks_are_matched_ties_included():
    a = torch.tensor([[3.0], [1.0], [2.0], [2.0]]).double()
    b = torch.tensor([[10.0], [10.0], [30.0], [20.0]]).double()
    matching = optimal_matching(a, b, precision=1e-9)
    rows, columns = linear_sum_assignment(cdist(a, b, "sqeuclidean"))
    assert mean_cost(a, b, matching) == mean_cost(a[rows], b, columns)
    assert b[matching][0].item() == 30.0


def test_identical_points_need_no_solver(monkeypatch):
    x = points(4, 50, 3)
    x[10:20] = x[0]
    monkeypatch.setattr("nlbench.measures._assignment.linear_sum_assignment", None)
    assert mean_cost(x, x, optimal_matching(x, x.clone(), precision=1e-9)) == 0.0
