import json

import pytest
import torch
from torch import nn

from nlbench.probes.lines import SegmentTrace, TracedSegment, observe_paths
from nlbench.probes.lines.drawing import BINS, make_drawing
from nlbench.probes.lines.quadrature import integrate_along


def draw(net, path):
    return make_drawing(list(observe_paths(net, path[None])))


def numbers(row):
    return [float(text) for text in row.split()]


def synthetic(t, values, sites=("relu",), origins=None, length=1.0, segment=0):
    t = torch.tensor(t, dtype=torch.float64)
    values = torch.tensor(values, dtype=torch.float64).reshape(len(t), -1)
    inner = [0] * (len(t) - 2) if origins is None else origins
    trace = SegmentTrace(t, values, length, torch.tensor([-1, *inner, -1]), tuple(sites))
    return TracedSegment(0, segment, trace)


def test_curves_are_the_network_at_even_steps():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 2)).double()
    path = torch.randn(3, 3, dtype=torch.float64)
    drawing = draw(net, path)
    assert drawing["logits"] == [0, 1]
    for start, end, rows in zip(path[:-1], path[1:], drawing["curves"], strict=True):
        curves = [numbers(row) for row in rows]
        t = torch.linspace(0, 1, len(curves[0]), dtype=torch.float64)[:, None]
        with torch.no_grad():
            expected = net(torch.lerp(start, end, t))
        drawn = torch.tensor(curves, dtype=torch.float64).T
        torch.testing.assert_close(drawn, expected, rtol=1e-4, atol=1e-6)


def test_logits_with_the_largest_deviation_are_drawn():
    bent = [[0, 0, 0, 0, 0], [1, 4, 0, 3, 2], [0, 0, 0, 0, 0]]
    drawing = make_drawing([synthetic([0, 0.5, 1], bent)])
    assert drawing["logits"] == [1, 3, 4]


def test_breakpoints_are_counted_by_site():
    observations = [
        synthetic([0, 0.5, 0.75, 1], [0, 1, 1, 0], ("a", "b"), [0, 1], length=1.0),
        synthetic([0, 0.5, 1], [0, 1, 0], ("a", "b"), [1], length=3.0, segment=1),
    ]
    drawing = make_drawing(observations)
    assert drawing["sites"] == ["a", "b"]
    assert drawing["crossings"] == 3
    first, second = (numbers(row) for row in drawing["breakpoints"])
    assert [i for i, n in enumerate(first) if n] == [int(0.125 * BINS)]
    assert [i for i, n in enumerate(second) if n] == [int(0.1875 * BINS), int(0.625 * BINS)]


def test_the_counts_add_up_to_the_crossings():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 1))
    path = torch.randn(5, 3)
    drawing = draw(net, path)
    counted = sum(sum(numbers(row)) for row in drawing["breakpoints"])
    assert counted == drawing["crossings"]
    assert (
        counted
        == sum(observation.trace.crossings for observation in observe_paths(net, path[None]))
        > 30
    )


def test_many_sites_share_rows():
    names = [f"layer{i}" for i in range(100)]
    t = torch.linspace(0, 1, 102).tolist()
    drawing = make_drawing([synthetic(t, [0.0] * 102, names, list(range(100)))])
    assert len(drawing["sites"]) == 24
    assert drawing["sites"][0] == "layer0 … layer3"
    assert drawing["sites"][-1].endswith("layer99")
    assert drawing["crossings"] == 100


def test_a_smooth_network_has_curves_and_no_breakpoints():
    ends = torch.tensor([[-2.0], [2.0]])
    (trace,) = integrate_along(nn.Tanh(), ends[:1], ends[1:])
    drawing = make_drawing([TracedSegment(0, 0, trace)])
    assert "breakpoints" not in drawing
    assert drawing["method"] == "quadrature"
    (row,) = drawing["curves"][0]
    t = torch.linspace(-2, 2, len(numbers(row)))
    torch.testing.assert_close(torch.tensor(numbers(row)), t.tanh(), atol=1e-3, rtol=0)


def test_a_path_without_length_can_be_drawn():
    drawing = draw(nn.ReLU(), torch.ones(3, 2))
    assert drawing["lengths"] == [0, 0]
    assert drawing["crossings"] == 0


@pytest.mark.parametrize("segments", [1, 8, 64])
def test_drawing_size_is_bounded(segments):
    torch.manual_seed(0)
    names = [f"features.denseblock{i // 10}.denselayer{i % 10}.relu" for i in range(120)]
    values = 1e3 * torch.randn(2002, 100)
    t = torch.linspace(0, 1, 2002).tolist()
    origins = torch.randint(120, (2000,)).tolist()
    observation = synthetic(t, values.tolist(), names, origins)
    drawing = make_drawing([observation] * segments)
    assert len(json.dumps(drawing)) < 60_000
