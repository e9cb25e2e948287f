"""Distances between signatures."""

from nlbench.reports.signatures import compare_signatures


def test_the_dendrogram_joins_the_nearest_first():
    found = compare_signatures([[0.0, 0.0], [5.0, 5.0], [0.1, 0.1], [5.2, 5.2]])
    assert {frozenset(map(int, merge[:2])) for merge in found.merges[:2]} == {
        frozenset({0, 2}), frozenset({1, 3}),
    }  # fmt: skip
    places = [found.order.index(i) for i in range(4)]
    assert abs(places[0] - places[2]) == abs(places[1] - places[3]) == 1
