"""Geometric complexity against linear maps and explicit Jacobians."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import nlbench
from nlbench.errors import NotFinite
from nlbench.measures.geometric_complexity import _directions, squared_jacobian_norms


@given(st.integers(0, 999), st.integers(1, 9), st.integers(1, 6), st.integers(1, 6))
def test_linear_map_has_the_norm_of_its_matrix(seed, n, d, k):
    torch.manual_seed(seed)
    weight, x = torch.randn(d, k).double(), torch.randn(n, d).double()
    norms = squared_jacobian_norms(lambda x: x @ weight - 3, x)
    torch.testing.assert_close(norms, weight.square().sum().expand(n), rtol=1e-12, atol=0)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh(), nn.GELU()])
@pytest.mark.parametrize("limit", [None, 2])
def test_equals_norm_of_explicit_jacobian(activation, limit):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 16), activation, nn.Linear(16, 4)).double()
    x = torch.randn(7, 3).double()
    jacobians = [torch.autograd.functional.jacobian(network, sample) for sample in x]
    expected = torch.stack([jacobian.square().sum() for jacobian in jacobians])
    torch.testing.assert_close(squared_jacobian_norms(network, x, limit=limit), expected)


def test_fewer_directions_are_unbiased():
    weight = torch.randn(3, 400, generator=torch.Generator().manual_seed(1)).double()
    zero = torch.zeros(1, 3).double()
    (norm,) = squared_jacobian_norms(lambda x: x @ weight, zero, directions=100)
    # Relative standard deviation about √(2 / (3 · 100)) for three inputs.
    assert norm.item() == pytest.approx(weight.square().sum().item(), rel=0.2)
    orthonormal = torch.eye(400).double()
    (norm,) = squared_jacobian_norms(
        lambda x: x @ orthonormal, torch.zeros(1, 400).double(), directions=7
    )
    assert norm.item() == pytest.approx(400)


def test_the_measure_is_the_mean_over_samples():
    x = torch.tensor([[-1.0], [1.0], [2.0], [3.0]])
    run = nlbench.evaluate(nn.ReLU(), x, "geometric-complexity")
    assert run["geometric-complexity"].numbers == pytest.approx({"value": 0.75, "error": 0.25})


@pytest.mark.parametrize("directions", [3, 16])
def test_the_measure_takes_its_option(directions):
    torch.manual_seed(0)
    network, x = nn.Linear(4, 12).double(), torch.randn(5, 4).double()
    settings = {"geometric-complexity.directions": directions}
    run = nlbench.evaluate(network, x, "geometric-complexity", settings=settings)
    expected = squared_jacobian_norms(network, x, directions=directions).mean().item()
    assert run["geometric-complexity"].summary["value"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("function", "value"), [(torch.sqrt, 0.0), (torch.relu, float("nan"))])
def test_non_finite_derivatives_and_outputs_raise(function, value):
    with pytest.raises(NotFinite):
        squared_jacobian_norms(function, torch.full((2, 2), value))


def test_random_directions_are_orthonormal_and_differ_by_sample():
    directions = torch.stack(list(_directions(40, 16, torch.tensor([1, 2]))), 1)
    identity = torch.eye(16).double().expand(2, 16, 16)
    torch.testing.assert_close(directions @ directions.mT, identity)
    assert not torch.allclose(directions[0], directions[1])


def test_the_error_contains_that_of_random_directions():
    ratios = []
    for seed in range(40):
        torch.manual_seed(seed)
        network, x = nn.Linear(8, 100), torch.randn(64, 8)
        run = nlbench.evaluate(network, x, "geometric-complexity")
        numbers = run["geometric-complexity"].numbers
        expected = network.weight.square().sum().item()
        ratios.append((numbers["value"] - expected) / numbers["error"])
    assert sum(abs(ratio) < 2 for ratio in ratios) >= 32
    assert abs(sum(ratios)) < 4 * 40**0.5
