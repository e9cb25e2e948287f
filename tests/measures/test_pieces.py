"""Pieces against zigzags, closed forms for x², and dynamic programming on fine polylines."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import nn

import nlbench
from nlbench.measures import pieces
from nlbench.measures.pieces import piece_count
from nlbench.probes.lines import trace_segment

from segments import polyline


@pytest.mark.parametrize("kinks", [0, 1, 2, 5, 100, 700])
@pytest.mark.parametrize("tolerance", [0.0, 1e-6, 1e-3])
def test_a_zigzag_has_a_piece_more_than_kinks(kinks, tolerance):
    t = np.linspace(0, 1, kinks + 2)
    assert piece_count(polyline(t, np.arange(kinks + 2) % 2), tolerance) == kinks + 1


def test_affine_network_has_one_piece():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(1.0), nn.Linear(8, 4))
    run = nlbench.evaluate(network, torch.randn(8, 3), "pieces", settings={"lines.paths": "pairs"})
    assert run["pieces"].summary["value"] == 1
    assert run["pieces"].parts["within"] == {f"{e:g}": 1 for e in pieces.CURVE}


@pytest.mark.parametrize("tolerance", [0.1, 0.01, 0.001, 1e-4])
def test_parabola_has_the_pieces_of_its_closed_form(tolerance):
    # The best line on an interval of width w is w² / 8 from x².
    t = np.linspace(0, 1, 4001)
    expected = np.ceil(1 / np.sqrt(8 * tolerance) - 1e-3)
    assert piece_count(polyline(t, t**2), tolerance) == expected


def has_lines(t, y, margins):
    """Decide by linear programming if each logit has a line within its margin."""
    for logit, margin in zip(y.T, margins, strict=True):
        lines = np.stack([t, np.ones_like(t)], 1)
        rows, limits = np.vstack([lines, -lines]), np.append(logit + margin, margin - logit)
        if linprog([0, 0], rows, limits, bounds=(None, None)).status != 0:
            return False
    return True


def fewest(t, y, margins):
    """Try every set of cuts at vertices, by dynamic programming."""
    best = [0] + [len(t)] * (len(t) - 1)
    for end in range(1, len(t)):
        for start in range(end):
            if best[start] + 1 < best[end] and has_lines(
                t[start : end + 1], y[start : end + 1], margins
            ):
                best[end] = best[start] + 1
    return best[-1]


@settings(max_examples=8)
@given(st.integers(0, 9999), st.integers(2, 7), st.integers(1, 3), st.floats(0.01, 0.5))
def test_fewer_cuts_never_add_pieces(seed, n, k, tolerance):
    random = np.random.default_rng(seed)
    t = np.sort(np.append(random.uniform(0.05, 0.95, n - 2), [0, 1]))
    y = random.standard_normal((n, k)).cumsum(0)
    margins = tolerance * np.ptp(y, axis=0)
    value = piece_count(polyline(t, y), tolerance)
    at_vertices = fewest(t, y, margins * (1 + 1e-9))
    assert value <= at_vertices
    # With further vertices on its edges cuts may lie nearly anywhere.
    fine = np.unique(np.append(t, np.linspace(0, 1, 12)))
    y_fine = np.stack([np.interp(fine, t, logit) for logit in y.T], 1)
    assert value <= fewest(fine, y_fine, margins * (1 + 1e-9))
    assert piece_count(polyline(fine, y_fine), tolerance) == value
    # Fewer would need a wider margin: the greedy cuts are those of the widest pieces.
    assert value >= fewest_anywhere(t, y, margins)


def fewest_anywhere(t, y, margins, points=100):
    """Extend each piece as far as possible on a fine grid, by bisection and linear programming."""
    grid = np.unique(np.append(t, np.linspace(0, 1, points)))
    values = np.stack([np.interp(grid, t, logit) for logit in y.T], 1)
    # Cuts may be a step of the grid away.
    slack = 1.05 * margins + np.abs(np.diff(values, axis=0)).max(0)
    start, count = 0, 0
    while start < len(grid) - 1:
        low, high = start + 1, len(grid) - 1
        while low < high:
            middle = (low + high + 1) // 2
            part = slice(start, middle + 1)
            if has_lines(grid[part], values[part], slack):
                low = middle
            else:
                high = middle - 1
        start, count = low, count + 1
    return count


def test_hulls_and_blocks_change_no_count(monkeypatch):
    random = np.random.default_rng(0)
    t = np.sort(np.append(random.uniform(0, 1, 400), [0, 1]))
    trace = polyline(t, random.standard_normal((len(t), 3)).cumsum(0))
    counts = [piece_count(trace, e) for e in pieces.CURVE]
    monkeypatch.setattr(pieces, "MIN_HULL_VERTICES", 4)
    monkeypatch.setattr(pieces, "MIN_BLOCK_VERTICES", 2)
    monkeypatch.setattr(pieces, "MAX_BLOCK_VERTICES", 3)
    assert [piece_count(trace, e) for e in pieces.CURVE] == counts
    monkeypatch.setattr(pieces, "MIN_HULL_VERTICES", 10**9)
    assert [piece_count(trace, e) for e in pieces.CURVE] == counts
    assert counts == sorted(counts)


def test_path_pieces_add_up_over_segments():
    square = torch.tensor([[-1.0], [1.0], [3.0], [-2.0]])
    run = nlbench.evaluate(
        nn.ReLU(), square, "pieces", settings={"lines.paths": "pairs", "lines.method": "exact"}
    )
    assert [value.statistics["value"] for value in run["pieces"].values] == [2, 2]


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU()])
def test_smooth_networks_have_pieces_too(activation):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 30), activation, nn.Linear(30, 3))
    inputs, options = 3 * torch.randn(8, 3), {"lines.paths": "pairs"}
    result = nlbench.evaluate(network, inputs, "pieces", settings=options)["pieces"]
    assert result.status == "ok"
    assert 1 < result.summary["value"] < 15


def test_units_and_offsets_of_logit_do_not_matter():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 20), nn.ReLU(), nn.Linear(20, 2)).double()
    trace = trace_segment(network, *torch.randn(2, 2).double())
    scaled = polyline(trace.t, 1e-200 * trace.values + 3e-200)
    assert piece_count(scaled) == piece_count(trace) > 1
