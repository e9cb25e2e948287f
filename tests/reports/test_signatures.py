"""Distances between signatures."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nlbench import Signature
from nlbench.reports.signatures import compare_signatures, dtw_distances

signatures = st.lists(st.lists(st.floats(-1, 1), min_size=1, max_size=7), min_size=2, max_size=5)


def slow_dtw(a, b):
    """The textbook's recursion."""
    best = np.full((len(a) + 1, len(b) + 1), np.inf)
    best[0, 0] = 0
    for i, one in enumerate(a):
        for j, other in enumerate(b):
            before = min(best[i, j], best[i, j + 1], best[i + 1, j])
            best[i + 1, j + 1] = (one - other) ** 2 + before
    return math.sqrt(best[-1, -1])


@given(signatures)
@settings(max_examples=60)
def test_distances_are_those_of_the_textbooks_recursion(given):
    found = dtw_distances(given)
    expected = [[slow_dtw(a, b) if i != j else 0 for j, b in enumerate(given)]
                for i, a in enumerate(given)]  # fmt: skip
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_distances_are_those_of_a_signature():
    pytest.importorskip("dtaidistance")
    random = np.random.default_rng(0)
    values = [random.uniform(size=n) for n in (5, 12, 9)]
    found = [Signature(("",) * len(v), ("",) * len(v), tuple(v), ("ok",) * len(v)) for v in values]
    distances = dtw_distances(values)
    assert distances[0, 1] == pytest.approx(found[0].dtw(found[1]))
    assert distances[1, 2] == pytest.approx(found[1].dtw(found[2]))


def test_the_dendrogram_joins_the_nearest_first():
    found = compare_signatures([[0.0, 0.0], [5.0, 5.0], [0.1, 0.1], [5.2, 5.2]])
    assert {frozenset(map(int, merge[:2])) for merge in found.merges[:2]} == {
        frozenset({0, 2}), frozenset({1, 3}),
    }  # fmt: skip
    places = [found.order.index(i) for i in range(4)]
    assert abs(places[0] - places[2]) == abs(places[1] - places[3]) == 1
