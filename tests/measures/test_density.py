import pytest
import torch
from torch import nn

from nlbench.errors import Undefined
from nlbench.measures.density import Density
from nlbench.probes.lines import (
    SegmentTrace,
    TracedSegment,
    estimate_segment,
    observe_paths,
    trace_segment,
)
from nlbench.probes.lines.quadrature import integrate_along


def reading_of(model, paths):
    measure = Density()
    measure.reset()
    for observation in observe_paths(model, paths):
        measure.update(observation)
    return measure.compute()


def test_a_closed_path_counts_each_visited_region_once():
    # A square around the corner of two boundaries visits four regions, each once.
    square = torch.tensor([[[1.0, 2.0], [-1.0, 2.0], [-1.0, -2.0], [1.0, -2.0], [1.0, 2.0]]])
    value = reading_of(nn.ReLU(), square).values[0]
    assert value.place == "path0"
    assert dict(value.statistics) == {
        "value": 4.0,
        "per_length": 4 / 12,
        "per_segment": 1.0,
        "slope_changes": 4.0,
        "length": 12.0,
        "segments": 4.0,
    }
    assert value.parts == {"segment": (1.0,) * 4, "site": {"relu": 4.0}}


def test_cuts_of_straight_lines_keep_the_counts():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU())
    a, b = torch.randn(2, 2)
    whole = reading_of(net, torch.stack([a, b])[None])
    cut = reading_of(net, torch.stack([a, a + 0.31 * (b - a), b])[None])
    assert whole.summary["value"] == cut.summary["value"] > 5


def test_the_reading_is_the_mean_over_paths():
    paths = torch.tensor([[[1.0], [-1.0]], [[1.0], [2.0]]])
    result = reading_of(nn.ReLU(), paths)
    assert [value.statistics["value"] for value in result.values] == [1, 0]
    assert result.summary["value"] == 0.5
    assert result.n == 2
    assert result.notes == {"method": "exact"}


def test_path_without_length_has_no_density_per_length():
    value = reading_of(nn.ReLU(), torch.ones(1, 3, 2)).values[0]
    assert value.statistics["value"] == 0
    assert "per_length" not in value.statistics


def test_the_sites_make_up_the_value():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 1))
    result = reading_of(net, torch.randn(2, 4, 2))
    for value in result.values:
        found = value.statistics
        assert value.parts["site"]["1"] + value.parts["site"]["3"] == found["value"] > 5
        assert len(value.parts["segment"]) == 3
        assert sum(value.parts["segment"]) == found["value"]
    both = [value.parts["site"]["1"] for value in result.values]
    assert result.parts["site"]["1"] == sum(both) / 2


def test_unused_unit_adds_boundary_but_no_slope_change():
    net = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    with torch.no_grad():
        net[0].weight[:] = 1.0
        net[0].bias[:] = torch.tensor([0.0, -0.5])
        net[2].weight[:] = torch.tensor([[1.0, 0.0]])
    found = reading_of(net, torch.tensor([[[-1.0], [1.0]]])).values[0].statistics
    assert found["value"] == 2
    assert found["slope_changes"] == 1


def test_smooth_network_is_undefined_and_names_the_operation():
    ends = torch.tensor([[-2.0], [2.0]])
    (trace,) = integrate_along(nn.Tanh(), ends[:1], ends[1:], refused="tanh at 1: is smooth")
    measure = Density()
    measure.reset()
    with pytest.raises(Undefined, match="tanh at 1"):
        measure.update(TracedSegment(0, 0, trace))


def test_method_that_may_miss_regions_is_remarked_on():
    t = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    values, origins = torch.zeros(3, 1, dtype=torch.float64), torch.tensor([-1, 0, -1])
    notes = {"sensitivity": 1e-6, "shorter_than_sensitivity": 3.0}
    trace = SegmentTrace(t, values, 1.0, origins, ("relu",), "adaptive", notes)
    measure = Density()
    measure.reset()
    measure.update(TracedSegment(0, 0, trace))
    measure.update(TracedSegment(0, 1, trace))
    result = measure.compute()
    assert result.reason == "by adaptive steps, which missed about 6 boundaries"
    assert result.notes == {
        "method": "adaptive",
        "sensitivity": 1e-6,
        "shorter_than_sensitivity": 6.0,
    }


def test_sampled_breakpoints_have_no_slopes_to_compare():
    t = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    values, origins = torch.zeros(3, 1, dtype=torch.float64), torch.tensor([-1, 0, -1])
    trace = SegmentTrace(t, values, 1.0, origins, ("relu",), "sampling")
    measure = Density()
    measure.reset()
    measure.update(TracedSegment(0, 0, trace))
    assert "slope_changes" not in measure.compute().values[0].statistics


def test_missing_observations_are_undefined():
    measure = Density()
    measure.reset()
    assert measure.compute().status == "undefined"


def test_sites_that_some_segments_lack_are_added_up():
    t, values = torch.linspace(0, 1, 4).double(), torch.zeros(4, 1).double()
    measure = Density()
    measure.reset()
    for names, origins in [(("a", "b"), [-1, 0, 1, -1]), (("b", "c"), [-1, 1, 1, -1])]:
        trace = SegmentTrace(t, values, 1.0, torch.tensor(origins), names)
        measure.update(TracedSegment(0, 0, trace))
    sites = measure.compute().values[0].parts["site"]
    assert {name: number for name, number in sites.items() if number} == {"a": 1, "b": 1, "c": 2}


def test_estimate_is_read_like_trace():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 30), nn.ReLU(), nn.Linear(30, 2))
    ends = 2 * torch.randn(2, 3)
    estimate, trace = estimate_segment(network, *ends), trace_segment(network, *ends)
    measure = Density()
    measure.reset()
    measure.update(TracedSegment(0, 0, estimate))
    measure.update(TracedSegment(0, 1, trace))
    result = measure.compute()
    statistics = result.values[0].statistics
    assert statistics["value"] == pytest.approx(2 * trace.crossings, abs=estimate.error + 1e-9)
    assert statistics["at_least"] == estimate.at_least + trace.crossings
    assert 0 < estimate.at_least <= trace.crossings
    assert statistics["numerical_error"] == estimate.error
    assert "slope_changes" not in statistics
    assert result.notes["method"] == "refined, exact"


def test_site_crossings_add_up_over_segments():
    class Separate(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.ReLU(), nn.ReLU()

        def forward(self, x):
            return self.first(x[:, :1]) + self.second(x[:, 1:])

    corner = torch.tensor([[[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]]])
    value = reading_of(Separate(), corner).values[0]
    assert value.parts == {"segment": (1.0, 1.0, 1.0), "site": {"first": 2.0, "second": 1.0}}
