"""Single functions are ordinary models, and powers are sites of no other network."""

import pytest
import torch
from torch import nn

import nlbench
from nlbench import registry
from nlbench.probes.sites.sites_observation import list_sites
from nlbench.studies.networks.functions import ACTIVATIONS


def network(name):
    return registry.load("models", f"functions/{name}")()


@pytest.mark.parametrize("name", [*ACTIVATIONS, "power-4"])
def test_a_function_is_one_site(name):
    (site,) = list_sites(network(name), torch.randn(3, 2))
    kind = "formula" if name.startswith("power") else name.replace("-", "_")
    assert (site.name, site.kind) == ("function", kind)


def test_other_powers_are_not_sites():
    class Squares(nn.Module):
        def forward(self, x):
            return torch.relu(x**2).pow(3)

    network("power-3")  # Registers the power.
    assert [site.kind for site in list_sites(Squares(), torch.randn(3, 2))] == ["relu"]


@pytest.mark.parametrize("order", [1, 2, 5])
def test_derivatives_of_a_power_are_those_of_autograd(order):
    x, v = torch.randn(2, 7, 1, dtype=torch.float64)
    power, plain = network(f"power-{order}"), lambda x: x**order
    for mine, theirs in zip(
        torch.func.jvp(power, (x,), (v,)), torch.func.jvp(plain, (x,), (v,)), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(torch.func.vjp(power, x)[1](v)[0], torch.func.vjp(plain, x)[1](v)[0])


def test_the_score_of_a_power_is_the_slides():
    points = torch.linspace(-1, 1, 1000)[:, None]
    options = {"affinity.shrinkage": "none", "sites.batch": 1000}
    run = nlbench.evaluate(network("power-11"), points, measures=["affinity"], settings=options)
    assert round(run["affinity"].summary["value"], 2) == 0.40
