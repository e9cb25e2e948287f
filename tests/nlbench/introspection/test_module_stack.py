"""One name for one call, in every probe."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nlbench.errors import Undefined
from nlbench.probes.graph.activity import unit_activity
from nlbench.probes.graph.graph_observation import channel_graph
from nlbench.probes.lines import trace_segment
from nlbench.probes.sites.sites_observation import list_sites


class Own(nn.Module):
    """A module of a user's that does nothing but one function of its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Reused(nn.Module):
    """Calls one module twice, and a function between."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.act = nn.Linear(4, 4), Own(function)

    def forward(self, x):
        x = self.act(self.layer(x))
        x = F.relu(self.layer(x))
        return self.layer(self.act(self.layer(x)))


class Derived(nn.ReLU):
    """A ReLU by another name."""


RELU = {
    "a module": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)),
    "a function": lambda: nn.Sequential(nn.Linear(4, 4), Own(F.relu), nn.Linear(4, 2)),
    "a method": lambda: nn.Sequential(nn.Linear(4, 4), Own(torch.Tensor.relu), nn.Linear(4, 2)),
    "in place": lambda: nn.Sequential(nn.Linear(4, 4), Own(torch.relu_), nn.Linear(4, 2)),
    "scaled": lambda: nn.Sequential(nn.Linear(4, 4), Own(lambda x: 2 * F.relu(x)), nn.Linear(4, 2)),
    "a leaky one": lambda: nn.Sequential(nn.Linear(4, 4), Own(F.leaky_relu), nn.Linear(4, 2)),
    "by name": lambda: nn.Sequential(nn.Linear(4, 4), Own(lambda x: F.relu(input=x)), nn.ReLU()),
    "derived": lambda: nn.Sequential(nn.Linear(4, 4), Derived(), nn.Linear(4, 2)),
    "six": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU6(), nn.Linear(4, 2)),
    "six as a function": lambda: Reused(F.relu6),
    "reused": lambda: Reused(F.relu),
}


@pytest.mark.parametrize("make", RELU.values(), ids=RELU)
def test_site_has_one_name_in_all_probes(make):
    torch.manual_seed(0)
    model, x = make(), torch.randn(6, 4)
    names = [site.name for site in list_sites(model, x)]
    graph = channel_graph(model, x)
    assert [unit.site for unit in graph.units] == names
    assert list(unit_activity(model, graph, [x, x])) == names
    assert list(trace_segment(model, x[0], x[1]).sites) == names


def test_pieces_of_handwritten_activation_have_its_name_first():
    leaky = Reused(lambda x: F.relu(x) - 0.1 * F.relu(-x))
    x = torch.randn(6, 4)
    assert [site.name for site in list_sites(leaky, x)] == ["act", "relu", "act:1"]
    pieces = ["act/relu", "act/relu:1", "relu", "act:1/relu", "act:1/relu:1"]
    graph = channel_graph(leaky, x)
    assert [unit.site for unit in graph.units] == pieces
    assert list(unit_activity(leaky, graph, [x])) == pieces
    assert list(trace_segment(leaky, x[0], x[1]).sites) == pieces


def test_model_in_another_thread_does_not_change_names():
    model, x = Reused(F.relu), torch.randn(6, 4)
    expected = [site.name for site in list_sites(model, x)]
    stop = threading.Event()

    def run():
        while not stop.is_set():
            with torch.no_grad():
                model(x)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        found = [[site.name for site in list_sites(model, x)] for _ in range(30)]
    finally:
        stop.set()
        thread.join()
    assert all(names == expected for names in found)


class Threaded(nn.Module):
    """Runs its first layers in a thread of its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x):
        hidden = []
        thread = threading.Thread(target=lambda: hidden.append(self.first(x)))
        thread.start()
        thread.join()
        return torch.relu(hidden[0])


@pytest.mark.parametrize("observe", [list_sites, lambda model, x: channel_graph(model, x[:1])])
def test_module_in_another_thread_is_undefined(observe):
    with pytest.raises(Undefined, match="thread"):
        observe(Threaded().eval(), torch.randn(6, 4))
