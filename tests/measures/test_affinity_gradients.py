"""Derivatives of the affinity score against finite differences, and where they could be NaN."""

from functools import partial

import pytest
import torch
from torch.autograd import grad, gradcheck
from torch.autograd import gradgradcheck as gradgradcheck_in_all_directions

from nlbench.errors import RequestError
from nlbench.measures.affinity import affinity_score
from nlbench.measures.linear_algebra import products
from nlbench.measures.transport import gaussian_map

# Along one random direction: along all of them a check takes ten times as long.
gradgradcheck = partial(gradgradcheck_in_all_directions, fast_mode=True)


def leaf(seed, n, d):
    values = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.requires_grad_()


@pytest.mark.parametrize("shrinkage", ["ledoit-wolf", "none"])
@pytest.mark.parametrize(
    ("n", "d"), [(8, 3), (9, 1), (5, 5), (3, 7)], ids=["tall", "line", "square", "in a basis"]
)
def test_gradients_are_those_of_finite_differences(n, d, shrinkage):
    # Unrelated points: the optimal matching is unique, and not the identity.
    # Without shrinkage and with n <= d the ridge alone holds the covariance: the score
    # bends at the scale of its root, so it is made larger than the differences' step.
    ridge = 1e-6 if n > d else 1e-1
    x, y = leaf(n, n, d), leaf(n + 100, n, d)
    assert gradcheck(lambda x, y: affinity_score(x, y, shrinkage=shrinkage, ridge=ridge), (x, y))


def test_gradients_through_singular_values_are_the_same(monkeypatch):
    x, y = leaf(10, 15, 4), leaf(11, 15, 4)
    expected = torch.autograd.grad(affinity_score(x, y), (x, y))
    monkeypatch.setattr("nlbench.measures.transport.gaussian_map.MIN_EIGENVALUE_RATIO", 2.0)
    found = torch.autograd.grad(affinity_score(x, y), (x, y))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_gradients_are_right_where_shrinkage_reaches_its_limit():
    x, y = leaf(2, 4, 3), leaf(3, 4, 3)
    assert gradcheck(affinity_score, (x, y))


def test_gradients_through_activation_are_those_of_finite_differences():
    x = leaf(0, 20, 4)
    assert gradcheck(lambda x: affinity_score(x, torch.tanh(2 * x)), (x,))


def test_gradients_are_right_at_repeated_eigenvalues():
    # Both covariances are isotropic: all eigenvalues of the root's argument are equal.
    x = torch.linalg.qr(leaf(5, 12, 3).detach() - leaf(5, 12, 3).detach().mean(0)).Q
    y = (x @ torch.linalg.qr(leaf(6, 3, 3).detach()).Q).requires_grad_()
    x = x.clone().requires_grad_()
    assert gradcheck(lambda x, y: affinity_score(x, y, shrinkage="none"), (x, y))


@pytest.mark.parametrize("shrinkage", ["ledoit-wolf", "none"])
@pytest.mark.parametrize("ridge", [1e-6, 0.0])
def test_dead_channels_have_finite_gradients(shrinkage, ridge):
    x = leaf(7, 30, 5)
    y = torch.relu(x - torch.tensor([0.0, 50.0, 0.0, 60.0, 0.0]))
    affinity_score(x, y, shrinkage=shrinkage, ridge=ridge).backward()
    assert torch.isfinite(x.grad).all()
    assert x.grad.abs().max() > 0


@pytest.mark.parametrize("factor", [1.0, 3.0])
@pytest.mark.parametrize("d", [1, 4])
def test_a_perfect_score_has_a_finite_gradient(d, factor):
    # The root of a squared distance of zero would give 0/0.
    x = leaf(8, 30, d)
    score = affinity_score(x, factor * x, shrinkage="none")
    score.backward()
    assert score.item() == pytest.approx(1, abs=1e-12)
    assert torch.isfinite(x.grad).all()


def test_few_samples_in_float32_have_finite_gradients():
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    affinity_score(x, torch.relu(x)).backward()
    assert x.grad.dtype == torch.float32
    assert torch.isfinite(x.grad).all()


def test_gradient_ascent_makes_an_activation_more_affine():
    x = leaf(9, 64, 4)
    first = affinity_score(x, torch.relu(x))
    (gradient,) = torch.autograd.grad(first, x)
    moved = (x + 0.5 * gradient / gradient.abs().max()).detach()
    assert affinity_score(moved, torch.relu(moved)) > first + 0.01


@pytest.fixture(params=[True, False], ids=["one core", "several"])
def library(request, monkeypatch):
    for module in (products, gaussian_map):
        monkeypatch.setattr(module, "uses_one_core", lambda values: request.param)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("n", "d", "shrinkage"),
    [(6, 3, "none"), (7, 1, "ledoit-wolf"), (4, 4, "none"), (3, 5, "ledoit-wolf"), (3, 5, "none")],
    ids=["tall", "line", "square", "in a basis", "in a basis alone"],
)
def test_second_derivatives_are_those_of_finite_differences(n, d, shrinkage):
    ridge = 1e-6 if n > d else 1e-1
    score = partial(affinity_score, shrinkage=shrinkage, ridge=ridge)
    assert gradgradcheck(score, (leaf(n, n, d), leaf(n + 100, n, d)))


def test_second_derivatives_through_relu_equal_finite_differences():
    assert gradgradcheck(lambda x: affinity_score(x, torch.relu(x)), (leaf(0, 12, 3),))


def test_a_sample_at_the_mean_has_second_derivatives():
    half = leaf(8, 4, 3).detach()
    x = torch.cat([half, -half, torch.zeros(1, 3)]).requires_grad_()
    assert gradgradcheck(lambda x: affinity_score(x, torch.tanh(3 * x)), (x,))


def test_third_derivatives_are_those_of_finite_differences():
    x, y = leaf(0, 7, 2), leaf(1, 7, 2).detach()

    def slope(x):
        (gradient,) = grad(affinity_score(x, y, ridge=0.1), x, create_graph=True)
        return gradient

    assert gradgradcheck(slope, (x,))


def test_unsupported_second_derivative_is_refused():
    # Fewer samples than half the columns: a basis of theirs is only right to second order.
    x, y = leaf(0, 4, 10), leaf(1, 4, 10).detach()
    (first,) = grad(affinity_score(x, y, ridge=0.1), x, create_graph=True)
    (second,) = grad(first.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="third derivative"):
        second.square().sum().backward()
    alike = leaf(0, 4, 10)
    (first,) = grad(affinity_score(alike, 3 * alike, ridge=0.1), alike, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        first.square().sum().backward()


@pytest.mark.parametrize(("n", "d"), [(9, 3), (4, 10)])
def test_functional_gradients_are_those_of_backward(n, d):
    x, y = leaf(0, n, d), leaf(1, n, d).detach()

    (first,) = grad(affinity_score(x, y), x, create_graph=True)
    (second,) = grad(first.square().sum(), x)
    functional = torch.func.grad(affinity_score)
    torch.testing.assert_close(functional(x.detach(), y), first.detach(), rtol=0, atol=1e-14)
    twice = torch.func.grad(lambda x: functional(x, y).square().sum())(x.detach())
    torch.testing.assert_close(twice, second, rtol=1e-9, atol=1e-14)


def test_pair_map_is_refused_with_advice():
    pairs = torch.zeros(3, 9, 2)
    with pytest.raises(RequestError):
        torch.func.vmap(affinity_score)(pairs, pairs)
