import random

import pytest
import torch
from torch import nn

from nlbench.errors import RequestError, UnsupportedOperation
from nlbench.probes.lines import plane, trace_segment
from tests.support.segments import mlp, small_residual


def point(drawn, points, u, v):
    """Return the input at coordinates (u, v) of the plane."""
    across = points[1] - points[0]
    aside = points[2] - points[0]
    up = aside - (aside * across).sum() / (across * across).sum() * across
    up = up * across.norm() / up.norm()
    return points[0] + u * across + v * up


@pytest.mark.parametrize(
    ("network", "shape"),
    [
        (mlp(0, widths=(3, 24, 24, 3)), (3,)),
        (small_residual(1), (2, 4, 4)),
        (small_residual(2, nn.ReLU6, "cat"), (2, 4, 4)),
        (small_residual(3, nn.Hardtanh, "add", nn.MaxPool2d), (2, 4, 4)),
    ],
)
def test_drawn_boundaries_match_exact_traces(network, shape):
    points = 2 * torch.randn(3, *shape, generator=torch.Generator().manual_seed(1)).double()
    drawn = plane(network, points, size=(40, 30), dtype=torch.float64)
    right, up = sum(drawn.right.values()), sum(drawn.up.values())
    choice = random.Random(0)
    compared = 0
    for _ in range(12):
        if choice.random() < 0.5:
            row, first = choice.randrange(30), choice.randrange(20)
            last = choice.randrange(first + 5, 40)
            ends = [(drawn.u[i], drawn.v[row]) for i in (first, last)]
            counts = right[row, first:last]
        else:
            column, first = choice.randrange(40), choice.randrange(15)
            last = choice.randrange(first + 5, 30)
            ends = [(drawn.u[column], drawn.v[i]) for i in (first, last)]
            counts = up[first:last, column]
        trace = trace_segment(network, *(point(drawn, points, *end) for end in ends))
        step = (trace.t[1:-1] * (last - first)).long()
        exact = torch.bincount(step.cpu(), minlength=last - first)
        # A unit that crosses twice within a step is missed.
        plain = exact <= 1
        assert counts[plain].tolist() == exact[plain].tolist()
        assert (counts <= exact).all()
        compared += int(plain.sum())
    assert compared > 25


def test_decisions_are_the_networks():
    network = mlp(4, widths=(3, 16, 4))
    points = torch.randn(3, 3, generator=torch.Generator().manual_seed(2)).double()
    drawn = plane(network, points, size=12)
    for row, column in ((0, 0), (5, 7), (11, 2)):
        x = point(drawn, points, drawn.u[column], drawn.v[row])
        assert int(network(x.float()[None]).argmax()) == int(drawn.decisions[row, column])


def test_memory_does_not_change_the_result():
    network = small_residual(1)
    points = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(1))
    one = plane(network, points, size=10, dtype=torch.float64)
    other = plane(network, points, size=10, dtype=torch.float64, memory=2**16)
    assert one.boundaries().equal(other.boundaries())


def test_points_keep_their_distances():
    points = torch.randn(3, 5, generator=torch.Generator().manual_seed(3)).double()
    drawn = plane(mlp(0, widths=(5, 4, 2)), points, size=4)
    length = float((points[1] - points[0]).norm())
    for i in range(3):
        for j in range(i):
            expected = float((points[i] - points[j]).norm()) / length
            assert float((drawn.points[i] - drawn.points[j]).norm()) == pytest.approx(expected)


def test_two_points_make_the_same_plane_each_time():
    points = torch.randn(2, 3, generator=torch.Generator().manual_seed(3))
    one, other = (plane(mlp(0), points, size=8) for _ in range(2))
    assert one.boundaries().equal(other.boundaries())


@pytest.mark.parametrize("points", [torch.zeros(3, 3), torch.zeros(1, 3)])
def test_points_that_span_no_plane_are_refused(points):
    with pytest.raises(RequestError):
        plane(mlp(0), points, size=4)


def test_a_smooth_network_is_refused_by_its_operation():
    with pytest.raises(UnsupportedOperation):
        plane(mlp(0, nn.Tanh), torch.randn(3, 3), size=4)


def test_planes_of_affine_networks_have_no_boundaries():
    drawn = plane(nn.Linear(2, 3), torch.randn(3, 2), size=(4, 3))
    assert drawn.boundaries().tolist() == [[0] * 4] * 3
    assert drawn.outputs.shape == (3, 4, 3)
