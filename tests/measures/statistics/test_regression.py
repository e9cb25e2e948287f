"""Fits from sums and rows drawn from a stream."""

import pytest
import torch

from nlbench.measures.statistics.regression import RegressionSums
from nlbench.measures.statistics.reservoir import Reservoir

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(200, 6, generator=GENERATOR).double() + 2
Y = X @ torch.randn(6, 3, generator=GENERATOR).double() + X.square()[:, :3]


def test_a_fit_is_least_squares_with_an_intercept():
    fit = RegressionSums.of(X, Y).fit(X.abs().amax(0))
    design = torch.cat([X, torch.ones(200, 1).double()], 1)
    expected = design @ torch.linalg.lstsq(design, Y).solution
    assert torch.allclose(fit(X), expected, atol=1e-10)
    assert fit.rank == 6


def test_parts_add_up_and_come_apart():
    first, second = RegressionSums.of(X[:70], Y[:70]), RegressionSums.of(X[70:], Y[70:])
    whole = first.plus(second)
    fit = whole.minus(second).fit(X.abs().amax(0))
    assert torch.allclose(fit(X), first.fit(X.abs().amax(0))(X), atol=1e-9)
    errors = (Y[70:] - fit(X[70:])).square().sum().item()
    assert second.squared_errors(fit) == pytest.approx(errors, rel=1e-9)


def test_dependent_inputs_have_the_smallest_coefficients():
    doubled = torch.cat([X, X[:, :1]], 1)
    fit = RegressionSums.of(doubled, Y).fit(doubled.abs().amax(0))
    assert fit.rank == 6
    assert torch.allclose(fit.coefficients[0], fit.coefficients[6], atol=1e-9)
    plain = RegressionSums.of(X, Y).fit(X.abs().amax(0))
    assert torch.allclose(fit(doubled), plain(X), atol=1e-8)


def test_fewer_rows_than_inputs_have_least_norm_coefficients():
    rows = torch.randn(12, 60, generator=GENERATOR).double() * torch.logspace(0, -2, 60)
    targets = torch.randn(12, 2, generator=GENERATOR).double()
    fit = RegressionSums.of(rows, targets).fit(torch.zeros(60))
    # Inputs are standardised; of equal fits that with the least norm is the pseudoinverse's.
    centred, scale = rows - rows.mean(0), (rows - rows.mean(0)).norm(dim=0)
    expected = torch.linalg.pinv(centred / scale) @ (targets - targets.mean(0))
    assert fit.rank == 11
    torch.testing.assert_close(fit.coefficients, expected / scale[:, None])


def test_constant_inputs_take_no_part():
    padded = torch.cat([X, torch.full((200, 1), 3.0).double()], 1)
    fit = RegressionSums.of(padded, Y).fit(padded.abs().amax(0), 1e-16)
    assert fit.rank == 6
    assert not fit.coefficients[6].any()


def test_a_reservoir_does_not_depend_on_batches():
    whole, parts = Reservoir(20), Reservoir(20)
    whole.add(X, Y)
    for start, end in ((0, 3), (3, 150), (150, 200)):
        parts.add(X[start:end], Y[start:end])
    assert torch.equal(whole.columns[0], parts.columns[0])
    assert torch.equal(whole.columns[1], parts.columns[1])
    assert len(whole.columns[0].unique(dim=0)) == 20


def test_every_row_is_drawn_equally_often():
    counts = torch.zeros(40)
    for seed in range(400):
        reservoir = Reservoir(10, seed)
        for part in torch.arange(40).split(7):
            reservoir.add(part)
        counts[reservoir.columns[0]] += 1
    # Binomial with mean 100 and deviation sqrt(75).
    assert (counts - 100).abs().max() < 5 * 75**0.5
