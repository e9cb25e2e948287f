"""Batches that take other ways through a network than the first one."""

import pytest
import torch
from torch import nn

import nlbench
from nlbench.errors import Undefined
from nlbench.probes.sites.sites_observation import observe_sites


class Branching(nn.Module):
    """Calls f then g on some batches, and something else on others."""

    def __init__(self, other):
        super().__init__()
        self.f, self.g, self.other = nn.Linear(4, 4), nn.Linear(4, 4), other

    def forward(self, x):
        if x.sum() > 0:
            return torch.relu(self.g(torch.relu(self.f(x))))
        return self.other(self, x)


OTHERS = {
    "a call more": lambda m, x: torch.relu(m.g(torch.relu(m.f(torch.relu(m.f(x)))))),
    "a call less": lambda m, x: torch.relu(m.f(x)),
    "another kind": lambda m, x: torch.tanh(m.g(torch.relu(m.f(x)))),
    "the other order": lambda m, x: torch.relu(m.f(torch.relu(m.g(x)))),
}
BATCHES = [torch.ones(5, 4), torch.ones(5, 4), -torch.ones(5, 4)]


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_batch_that_calls_other_activations_is_named(other):
    with pytest.raises(Undefined, match="batch 2"):
        observe_sites(Branching(other), BATCHES, lambda observation: None)


def test_calls_sharing_only_a_name_have_no_score():
    run = nlbench.evaluate(
        Branching(OTHERS["a call more"]), iter(BATCHES), ["r2"], settings={"sites.batch": 5}
    )
    assert run["r2"].status == "undefined"
    assert "in batch 2 than in batch 0" in run["r2"].reason


def test_other_batch_sizes_call_the_same_sites():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = torch.relu(layer(x)) if x.ndim else x
            return x

    seen = []
    observe_sites(Tokens(), [torch.randn(5, n, 4) for n in (3, 7, 3)], seen.append)
    assert [observation.place for observation in seen] == ["relu", "relu:1", "relu:2"] * 3


def test_activation_in_some_calls_keeps_its_name():
    class Sometimes(nn.Module):
        def forward(self, x):
            return torch.relu(x) if x.shape[1] == 4 else torch.relu(x.flip(1))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.act, self.layer = Sometimes(), nn.Linear(4, 5)

        def forward(self, x):
            return self.act(self.layer(self.act(x)))

    seen = []
    observe_sites(Model(), BATCHES, seen.append)
    assert [observation.place for observation in seen] == ["act", "act/relu"] * 3
