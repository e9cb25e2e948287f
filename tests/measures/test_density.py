import pytest
import torch
from torch import nn

from nlbench.measures.density import Density
from nlbench.probes.lines import look_along


def reading_of(model, paths):
    measure = Density()
    measure.start()
    for look in look_along(model, paths):
        measure.update(look)
    return measure.finish()


def test_a_closed_path_counts_each_visited_region_once():
    # A square around the corner of two boundaries visits four regions, each once.
    square = torch.tensor([[[1.0, 2.0], [-1.0, 2.0], [-1.0, -2.0], [1.0, -2.0], [1.0, 2.0]]])
    value = reading_of(nn.ReLU(), square).values[0]
    assert value.place == "path0"
    assert dict(value.statistics) == {
        "value": 4.0,
        "per_length": 4 / 12,
        "length": 12.0,
        "segments": 4.0,
    }


def test_the_count_does_not_depend_on_where_a_straight_line_is_cut():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU())
    a, b = torch.randn(2, 2)
    whole = reading_of(net, torch.stack([a, b])[None])
    cut = reading_of(net, torch.stack([a, a + 0.31 * (b - a), b])[None])
    assert whole.summary["value"] == cut.summary["value"] > 5


def test_the_reading_is_the_mean_over_paths():
    paths = torch.tensor([[[1.0], [-1.0]], [[1.0], [2.0]]])
    reading = reading_of(nn.ReLU(), paths)
    assert [value.statistics["value"] for value in reading.values] == [1, 0]
    assert reading.summary["value"] == 0.5
    assert reading.n == 2
    assert reading.notes == {"method": "exact"}


def test_a_path_without_length_has_no_density_per_length():
    value = reading_of(nn.ReLU(), torch.ones(1, 3, 2)).values[0]
    assert value.statistics["value"] == 0
    assert "per_length" not in value.statistics


def test_without_looks_there_is_nothing_to_measure():
    measure = Density()
    measure.start()
    assert measure.finish().status == "undefined"


def test_more_regions_means_more_nonlinear():
    assert Density.more_means == "more nonlinear"
    assert Density.bounds == (0, pytest.approx(float("inf")))
