from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nlbench.errors import RequestError
from nlbench.probes.sites.sites_observation import observe_sites
from nlbench.probes.sites.sites_probe import Picker, Selection


@dataclass(frozen=True)
class Named:
    name: str
    kind: str = "relu"
    role: str = "activation"


SITES = [
    Named("stem.act"),
    Named("layer1.0.relu"),
    Named("layer1.0.relu:1"),
    Named("layer1.0.se.gate", "sigmoid", "gate"),
    Named("layer2.0.relu"),
    Named("layer2.0.act", "gelu"),
]


def chosen(text, sites=SITES):
    picker = Picker(Selection.parse(text))
    return [site.name for site in sites if picker.takes(site)]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("*", [0, 1, 2, 3, 4, 5]),
        ("", [0, 1, 2, 3, 4, 5]),
        ("layer1.*", [1, 2, 3]),
        ("layer1.0.relu:1", [2]),
        ("layer1.0.relu:*", [2]),
        ("kind:gelu", [5]),
        ("role:gate", [3]),
        ("every:2", [0, 2, 4]),
        ("kind:relu+every:2", [0, 2]),
        ("every:2 + kind:relu", [0, 2]),
        ("stem.*, role:gate", [0, 3]),
        ("layer*+kind:relu,kind:gelu", [1, 2, 4, 5]),
        ("layer1.*+role:activation", [1, 2]),
        ("!layer1.*", [0, 4, 5]),
        ("!stem.*,!kind:gelu", [1, 2, 3, 4]),
        ("kind:relu,!layer1.0.relu:1,!role:gate", [0, 1, 4]),
        ("every:2,!stem.*", [1, 3, 5]),
    ],
)
def test_selection_returns_matching_sites(text, numbers):
    assert chosen(text) == [SITES[number].name for number in numbers]


@given(st.integers(1, 9), st.integers(0, 30))
def test_every_k_selects_each_kth_site(k, count):
    sites = [Named(f"act{number}") for number in range(count)]
    assert chosen(f"every:{k}", sites) == [site.name for site in sites[::k]]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("layr1.0.relu", "'layr1.0.relu'"),
        ("stem.*, !kind:relu", "excludes"),
        ("*, kind:glu", "'kind:glu'.*'gelu'"),
        ("!layr1.*", "'layr1"),
        ("role:attention", "'role:attention'.*sites.attention"),
    ],
)
def test_unmatched_selection_is_refused_by_name(text, name):
    with pytest.raises(RequestError, match=name):
        Selection.parse(text).check(SITES)


@pytest.mark.parametrize(
    "select", ["2, 1", "kind:relu", "every:2", "role:activation+every:3", "!2", "!kind:relu+1"]
)
def test_selection_holds_in_every_batch(select):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Tanh(), nn.ReLU(), nn.SiLU())
    batches = [torch.randn(8, 4), torch.randn(8, 4)]
    everything, some = [], []
    observe_sites(model, batches, everything.append)
    observe_sites(model, batches, some.append, select=select)
    names = chosen(select, [observation.site for observation in everything[:4]])
    expected = [observation for observation in everything if observation.place in names]
    assert [(a.site, a.batch) for a in some] == [(b.site, b.batch) for b in expected]
    assert all(torch.equal(a.y, b.y) for a, b in zip(some, expected, strict=True))


def test_selection_of_handwritten_activations_holds_in_later_batches():
    class Swish(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(x)

    class Wrapped(nn.Module):
        def forward(self, x):
            return torch.relu(x)

    model = nn.Sequential(nn.Linear(4, 4), Swish(), nn.ReLU(), Wrapped())
    observations = []
    observe_sites(model, [torch.randn(8, 4)] * 3, observations.append, select="1,3")
    assert [observation.place for observation in observations] == ["1", "3"] * 3


@pytest.mark.parametrize(
    ("select", "names"), [("kind:relu6", ["1"]), ("kind:relu", ["2"]), ("kind:silu", ["3"])]
)
def test_module_kind_can_be_selected(select, names):
    class Scaled(nn.Module):
        def forward(self, x):
            return torch.relu(x) * 1.7

    class Swish(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(x)

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU6(), Scaled(), Swish())
    observations = []
    observe_sites(model, [torch.randn(8, 4)] * 2, observations.append, select=select)
    assert [observation.place for observation in observations] == names * 2
