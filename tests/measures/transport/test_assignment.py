"""The matching against solvers, the certificate against the optimum."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from nlbench.measures.linear_algebra import products
from nlbench.measures.transport import assignment
from nlbench.measures.transport.assignment import (
    certified_in_single_precision,
    column_potentials,
    coordinate_potentials,
    identity_is_optimal,
    identity_is_swapped,
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


def identity_gap(cost):
    """Return how much more the identity costs than the best matching, on average."""
    rows, columns = linear_sum_assignment(cost)
    return np.trace(cost) / len(cost) - cost[rows, columns].mean()


def assert_proves_no_more_than_is_true(a, b):
    gap = identity_gap(squared_distances(a, b).numpy())
    for allowed in (1e-12, 0.01, 0.1):
        if certified_in_single_precision(a, b, allowed=allowed):
            assert gap <= allowed + 1e-12


def mean_cost(a, b, matching):
    return (a - b[matching]).square().sum(1).mean().item()


def test_squared_distances_are_scipys():
    a, b = points(0, 30, 7), points(1, 30, 7)
    expected = cdist(a.numpy(), b.numpy(), "sqeuclidean")
    np.testing.assert_allclose(squared_distances(a, b).numpy(), expected, rtol=1e-12)


@given(st.integers(0, 999), st.integers(2, 6), st.integers(1, 4))
def test_the_matching_is_the_best_of_all_permutations(seed, n, d):
    a, b = points(seed, n, d), points(seed + 5000, n, d)
    best = min(mean_cost(a, b, list(p)) for p in itertools.permutations(range(n)))
    matching = optimal_matching(a, b, precision=1e-9)
    assert sorted(matching.tolist()) == list(range(n))
    assert mean_cost(a, b, matching) == pytest.approx(best, rel=1e-12)


@given(st.integers(0, 999), st.integers(2, 30), st.integers(1, 5), st.floats(0.0, 2.0))
def test_certified_identity_costs_no_more_than_solvers_matching(seed, n, d, noise):
    a = points(seed, n, d)
    cost = squared_distances(a, a + noise * points(seed + 5000, n, d)).numpy()
    for allowed in (1e-12, 0.01, 0.1):
        if certified(cost, allowed):
            assert identity_gap(cost) <= allowed + 1e-12


@given(st.integers(0, 999), st.integers(2, 12))
def test_arbitrary_cost_is_never_certified_beyond_its_gap(seed, n):
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
def test_identity_is_certified_with_minimal_sweeps(cost, sweeps, monkeypatch):
    rows, columns = linear_sum_assignment(cost)
    assert np.trace(cost) == np.asarray(cost)[rows, columns].sum()
    assert certified(cost)
    monkeypatch.setattr("nlbench.measures.transport.assignment.MAX_SWEEPS", sweeps)
    assert certified(cost)
    if sweeps:
        monkeypatch.setattr("nlbench.measures.transport.assignment.MAX_SWEEPS", sweeps - 1)
        assert not certified(cost)


@settings(max_examples=100)
@given(
    st.integers(0, 999),
    st.integers(2, 40),
    st.integers(1, 6),
    st.sampled_from([0.0, 1e-7, 1e-3, 0.1, 0.5, 2.0]),
    st.booleans(),
)
def test_single_precision_never_proves_more_than_is_true(seed, n, d, noise, ties):
    a = points(seed, n, d)
    if ties:
        a = a.round()
    a = a - a.mean(0)
    b = a + noise * points(seed + 5000, n, d)
    b = b - b.mean(0)
    assert_proves_no_more_than_is_true(a, b)


def test_single_precision_settles_differences_beyond_its_digits(monkeypatch):
    # Two outputs are swapped whose costs differ by 1e-9, far below float32's rounding.
    a = points(5, 300, 20)
    a = a - a.mean(0)
    b = a.clone()
    b[0, 0] += 1e-4
    b[1] = b[0]
    b[1, 1] += 1e-5
    swapped = b.clone()
    swapped[[0, 1]] = b[[1, 0]]
    a[1] = a[0]
    a[1, 1] += 1e-4
    assert certified_in_single_precision(a, b, allowed=1e-15)
    assert not certified_in_single_precision(a, swapped, allowed=1e-15)
    monkeypatch.setattr(assignment, "MAX_DOUBTFUL_FRACTION", 0.0)
    assert not certified_in_single_precision(a, b, allowed=1e-15)


@pytest.fixture
def several_cores(monkeypatch):
    """PyTorch's own products, whatever the threads of this machine."""
    monkeypatch.setattr(products, "uses_one_core", lambda values: False)


def neighbours_and_swapped():
    """Points whose own output is best, and the same with two close outputs exchanged."""
    a = points(6, 300, 80)
    a[1] = a[0] + 1e-3 * a[1]
    a = a - a.mean(0)
    swapped = a.clone()
    swapped[[0, 1]] = a[[1, 0]]
    return a, a.clone(), swapped


@pytest.mark.usefixtures("several_cores")
def test_autocast_does_not_shorten_products_of_proofs():
    a, b, swapped = neighbours_and_swapped()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert certified_in_single_precision(a, b, allowed=1e-12)
        assert not certified_in_single_precision(a, swapped, allowed=1e-12)


def by_the_old_name(value):
    torch.set_float32_matmul_precision("medium" if value == "bf16" else "highest")


def by_the_new_name(value):
    torch.backends.mkldnn.matmul.fp32_precision = value


@pytest.mark.usefixtures("several_cores")
@pytest.mark.parametrize("allow", [by_the_old_name, by_the_new_name])
def test_reduced_matmul_precision_proves_nothing(allow):
    if allow is by_the_new_name and not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("this PyTorch has the old name only")
    a, b, _ = neighbours_and_swapped()
    assert certified_in_single_precision(a, b, allowed=1e-12)
    allow("bf16")
    try:
        assert not certified_in_single_precision(a, b, allowed=1e-12)
        # The slower proof in double precision is still there.
        assert optimal_matching(a, b, precision=1e-9).tolist() == list(range(300))
    finally:
        allow("ieee")
    assert certified_in_single_precision(a, b, allowed=1e-12)


@pytest.mark.usefixtures("several_cores")
def test_a_rounding_mode_set_from_outside_is_heeded(monkeypatch):
    a, b, _ = neighbours_and_swapped()
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    assert not certified_in_single_precision(a, b, allowed=1e-12)


@given(st.integers(0, 999), st.integers(2, 20), st.integers(3, 9), st.integers(1, 3))
def test_projected_points_keep_lengths_and_never_separate(seed, n, d, kept):
    a, b = points(seed, n, d), points(seed + 5000, n, d)
    given_points = assignment._Points(a, b, a.square().sum(1), b.square().sum(1), (a * b).sum(1))
    short_a, short_b = assignment._shorten(given_points, kept)
    assert short_a.shape == (n, kept + 1)
    torch.testing.assert_close(short_a.square().sum(1), a.square().sum(1))
    torch.testing.assert_close(short_b.square().sum(1), b.square().sum(1))
    assert bool((short_a @ short_b.T >= a @ b.T - 1e-12).all())


@given(
    st.integers(0, 999),
    st.integers(2, 40),
    st.integers(64, 90),
    st.sampled_from([0.0, 1e-7, 1e-3, 0.1, 1.0]),
    st.sampled_from([0.0, 1.0, 3.0]),
    st.booleans(),
)
def test_many_coordinates_never_prove_more_than_is_true(seed, n, d, noise, decay, ties):
    strengths = torch.arange(1, d + 1).double() ** -decay
    a = points(seed, n, d) * strengths
    if ties:
        a[1::2] = a[: n // 2]
    a = a - a.mean(0)
    b = a + noise * points(seed + 5000, n, d) * strengths
    b = b - b.mean(0)
    assert_proves_no_more_than_is_true(a, b)


def test_strongest_coordinates_suffice_to_separate_points(monkeypatch):
    x = points(9, 300, 120) * torch.arange(1, 121).double() ** -0.5
    y = torch.nn.functional.leaky_relu(x, 0.8)
    x, y = x - x.mean(0), y - y.mean(0)
    widths = []
    multiply = products.outer_products
    monkeypatch.setattr(
        assignment, "outer_products", lambda a, b: (widths.append(a.shape[1]), multiply(a, b))[1]
    )
    assert certified_in_single_precision(x, y, allowed=1e-12)
    assert widths == [41]
    assert not certified_in_single_precision(x, points(10, 300, 120), allowed=1e-12)
    assert widths == [41, 41, 120]


@pytest.mark.parametrize("n", [300, 600])
def test_points_matched_to_others_are_solved(n):
    a = points(7, n, 2)
    b = points(8, n, 2)
    matching = optimal_matching(a, b, precision=1e-9)
    rows, columns = linear_sum_assignment(cdist(a, b, "sqeuclidean"))
    assert mean_cost(a, b, matching) == pytest.approx(mean_cost(a[rows], b, columns), rel=1e-12)


def test_monotone_elementwise_map_is_certified_without_a_solver(monkeypatch):
    x = points(3, 200, 20)
    monkeypatch.setattr("scipy.optimize.linear_sum_assignment", None)
    matching = optimal_matching(x, x.clamp(min=0), precision=1e-9)
    assert matching.tolist() == list(range(200))


def test_ranks_are_matched_on_a_line_with_ties():
    a = torch.tensor([[3.0], [1.0], [2.0], [2.0]]).double()
    b = torch.tensor([[10.0], [10.0], [30.0], [20.0]]).double()
    matching = optimal_matching(a, b, precision=1e-9)
    rows, columns = linear_sum_assignment(cdist(a, b, "sqeuclidean"))
    assert mean_cost(a, b, matching) == mean_cost(a[rows], b, columns)
    assert b[matching][0].item() == 30.0


def test_identical_points_need_no_solver(monkeypatch):
    x = points(4, 50, 3)
    x[10:20] = x[0]
    monkeypatch.setattr("scipy.optimize.linear_sum_assignment", None)
    assert mean_cost(x, x, optimal_matching(x, x.clone(), precision=1e-9)) == 0.0


def lower_bound(cost, potentials):
    return ((cost - potentials).amin(1).sum() + potentials.sum()).item()


def least_cost(cost):
    rows, columns = linear_sum_assignment(cost.numpy())
    return cost.numpy()[rows, columns].sum()


@given(
    st.integers(0, 999),
    st.integers(2, 40),
    st.sampled_from([1, 2, 5, 40]),
    st.sampled_from([torch.relu, torch.abs, torch.sin, torch.round]),
)
def test_solver_matches_at_least_cost(seed, n, d, activation):
    a = points(seed, n, d)
    b = activation(3 * a)
    a, b = a - a.mean(0), b - b.mean(0)
    matching = optimal_matching(a, b, precision=0.0)
    assert sorted(matching.tolist()) == list(range(n))
    expected = least_cost(squared_distances(a, b)) / n
    assert mean_cost(a, b, matching) == pytest.approx(expected, rel=1e-10, abs=1e-14)


@given(st.integers(0, 999), st.integers(2, 40), st.integers(1, 6))
def test_potentials_bound_at_least_as_minima(seed, n, d):
    a, b = points(seed, n, d), points(seed + 5000, n, d).relu()
    cost = squared_distances(a, b)
    bound = lower_bound(cost, column_potentials(a, b, cost))
    assert bound >= lower_bound(cost, cost.amin(0)) - 1e-9
    assert bound <= least_cost(cost) + 1e-9


@pytest.mark.parametrize("d", [1, 3])
def test_coordinate_potentials_are_optimal_for_separate_activations(d):
    # A grid has independent coordinates.
    axis = points(3, 5, 1)[:, 0]
    a = torch.cartesian_prod(*[axis] * d).reshape(-1, d)
    b = torch.relu(a) + 0.1 * a.sin()
    cost = squared_distances(a, b)
    assert lower_bound(cost, coordinate_potentials(a, b)) == pytest.approx(least_cost(cost))


@given(st.integers(0, 999), st.integers(2, 12))
def test_swapped_identity_is_not_optimal(seed, n):
    cost = torch.tensor(np.random.default_rng(seed).integers(0, 4, (n, n)), dtype=torch.float64)
    if identity_is_swapped(cost - cost.diagonal(), allowed=0.0):
        assert cost.trace() > least_cost(cost)


def test_exchanged_pair_is_found():
    a = points(4, 20, 3)
    swapped = a.clone()
    swapped[[3, 7]] = a[[7, 3]]
    cost = squared_distances(a, swapped)
    assert identity_is_swapped(cost - cost.diagonal(), allowed=1e-9)
    assert optimal_matching(a, swapped, precision=1e-9)[[3, 7]].tolist() == [7, 3]
