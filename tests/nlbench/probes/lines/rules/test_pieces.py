import pytest
import torch

from nlbench.probes.lines.rules.pieces import Kinks, Ranks, changes, unit_crossings

NOISE_UNIT = 8 * torch.finfo(torch.float64).eps


def column(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


def test_margins_within_the_tolerance_are_zero():
    noise = column(0.5, 0.5)
    for ends in ((-1.0, 0.5), (1.0, -0.5), (0.5, -1.0), (-0.5, 1.0)):
        assert len(unit_crossings(column(*ends), noise)[0]) == 0
    assert unit_crossings(column(-1.0, 0.75), noise)[0].tolist() == [0]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1, -1, -1), [True, False]),
        ((-1, 1, 1, -1), [True, False, True]),
        ((1, 0, -1), [False, True]),
        ((1, 0, 1), [False, False]),
        ((1, 0, 0, -1), [False, False, False]),
        ((1, 0, -1, 1), [False, True, True]),
        ((1, -1), [True]),
    ],
)
def test_a_change_behind_a_boundary_counts_once(values, expected):
    x = column(*values)
    pieces = Kinks(lambda inputs: inputs[0])
    assert changes(pieces, [x], [torch.zeros_like(x)]).tolist() == expected


@pytest.mark.parametrize("noisy", [0, 1])
def test_ranks_within_both_tolerances_are_possible(noisy):
    pieces = Ranks(lambda inputs: inputs[0][:, None], [0])
    x = torch.tensor([[1.0, 0.9, 0.0], [0.9, 1.0, 0.0]], dtype=torch.float64)
    bounds = torch.zeros_like(x)
    assert changes(pieces, [x], [bounds]).tolist() == [True]
    bounds[:, noisy] = 0.2 / NOISE_UNIT
    assert pieces.possible([x], [bounds])[:, 0].flatten().tolist() == [True, True, False]
    assert changes(pieces, [x], [bounds]).tolist() == [False]
