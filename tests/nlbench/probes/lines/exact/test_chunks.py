import itertools

import pytest
import torch

from nlbench.probes.lines.exact.chunks import Chunk, Values, insert_breakpoints, split, thin_out


def chunk_of(t, owner, left, weight):
    t = torch.tensor(t, dtype=torch.float64)
    values = Values({0: 10 * t[:, None]}, {0: t[:, None]})
    origins = torch.full((len(t),), -1)
    places = torch.tensor(weight, dtype=torch.float64)
    return Chunk(0, t, origins, torch.tensor(owner), values, torch.tensor(left), places)


def inserted(t, owner, left, weight, gap=0.01):
    return insert_breakpoints(chunk_of(t, owner, left, weight), 5, gap)


def test_breakpoints_are_inserted_in_order_with_interpolated_values():
    chunk = inserted([0, 0.5, 1], [0, 0, 0], [1, 0, 0], [0.5, 0.8, 0.2])
    assert chunk.t.tolist() == pytest.approx([0, 0.1, 0.4, 0.5, 0.75, 1])
    assert chunk.origins.tolist() == [-1, 5, 5, -1, 5, -1]
    values = chunk.values()
    assert values.tensors[0].flatten().tolist() == pytest.approx([0, 1, 4, 5, 7.5, 10])
    assert values.bounds[0].flatten().tolist() == pytest.approx([0, 0.1, 0.4, 0.5, 0.75, 1])


@pytest.mark.parametrize("weight", [0.001, 0.999])
def test_breakpoints_next_to_a_point_move_onto_it(weight):
    assert inserted([0, 1], [0, 0], [0], [weight]).t.tolist() == [0, 1]


def test_segments_of_chunk_stay_adjacent():
    chunk = inserted([0, 1, 0, 1], [0, 0, 1, 1], [2, 1, 0], [0.5, 0.5, 0.25])
    assert chunk.t.tolist() == [0, 0.25, 1, 0, 0.5, 1]
    assert chunk.segment_index.tolist() == [0, 0, 0, 1, 1, 1]


def test_equal_places_on_two_segments_are_two_breakpoints():
    chunk = inserted([0, 1, 0, 1], [0, 0, 1, 1], [0, 2, 0], [0.5, 0.5, 0.505])
    assert chunk.t.tolist() == [0, 0.5, 1, 0, 0.5, 1]


def test_close_numbers_are_thinned_from_the_last_selected():
    t = torch.tensor([0.0, 0.6, 1.2, 1.8, 2.4, 9.0, 9.5, 11.0, 11.9, 12.1])
    same = torch.zeros(len(t))
    expected = [True, False, True, False, True, True, False, True, False, True]
    assert thin_out(t, 1.0, same).tolist() == expected
    assert thin_out(t[[0, 2, 4]], 1.0, same[:3]) is None
    assert thin_out(torch.tensor([0.0, 0.5]), 1.0, torch.tensor([0, 1])) is None


@pytest.mark.parametrize(("points", "limit"), [(10, 4), (10, 2), (10, 10), (5, 3)])
def test_parts_share_their_ends(points, limit):
    chunk = chunk_of(list(range(points)), [0] * points, list(range(points)), [0.0] * points)
    parts = split(chunk, limit)
    assert max(len(part.t) for part in parts) <= limit
    assert all(a.t[-1] == b.t[0] for a, b in itertools.pairwise(parts))
    assert sum(len(part.t) - 1 for part in parts) == points - 1
    assert all(torch.equal(part.values().tensors[0][:, 0], 10 * part.t) for part in parts)


def test_wide_values_are_interpolated_like_narrow_ones():
    t = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    x = torch.randn(3, 9000, dtype=torch.float64)
    left, weight = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([0, 0.25, 0, 0.5, 0]).double()
    wide = Chunk(0, t, t, t, Values({0: x}, {0: x[:, :1]}), left, weight).values()
    assert torch.allclose(wide.tensors[0][:, :1], wide.bounds[0])
    assert torch.allclose(wide.tensors[0][1], 0.75 * x[0] + 0.25 * x[1])
