"""Linearity of blocks against direct computations in float64."""

import math

import numpy as np
import pytest
import torch
from drawing import before_drawing
from torch import Tensor, nn

import nlbench
from nlbench.measures.linearity import linearity_score, linearity_statistics


def _stream(n: int, d: int, condition: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return a residual stream before and after a block, of a condition number."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(d, d, generator=generator).double()).Q
    scale = torch.logspace(0, -math.log10(condition), d).double()
    centred = torch.randn(n, d, generator=generator).double() * scale @ basis
    noise = torch.randn(n, d, generator=generator).double()
    return centred + offset, centred + offset + 0.5 * (3 * centred).tanh() + 0.1 * noise


def _direct(x: Tensor, y: Tensor) -> float:
    x, y = x - x.mean(0), y - y.mean(0)
    left = torch.linalg.svd(x, full_matrices=False).U
    return (1 - (y - left @ (left.T @ y)).square().sum() / y.square().sum()).item()


@pytest.mark.parametrize("offset", [0.0, 1e3])
@pytest.mark.parametrize("condition", [1e2, 1e6])
def test_in_sample_is_the_direct_score(condition, offset):
    x, y = _stream(2000, 60, condition, offset)
    assert linearity_score(x, y).item() == pytest.approx(_direct(x, y), abs=1e-8)
    numbers = linearity_statistics(x, y)
    assert numbers["in_sample"] == pytest.approx(_direct(x, y), abs=1e-8)
    assert numbers["branch_in_sample"] == pytest.approx(_direct(x, y - x), abs=1e-7)


def test_the_published_formula_differs_by_its_rounding():
    x, y = (side.float() for side in _stream(1000, 40, 1e2, 1.0))
    # Centred, at unit Frobenius norm, with the pseudoinverse from float32 singular values.
    a, b = x - x.mean(0), y - y.mean(0)
    a, b = a / a.norm(), b / b.norm()
    u, s, v = torch.linalg.svd(a, full_matrices=False)
    published = 1 - (a @ (v.T @ ((u.T @ b) / s[:, None])) - b).square().sum()
    assert linearity_score(x, y).item() == pytest.approx(published.item(), abs=1e-4)


def _held_out(x: Tensor, y: Tensor, fold: Tensor) -> float:
    errors = 0.0
    for index in fold.unique():
        train, test = fold != index, fold == index
        design = torch.cat([x[train], torch.ones(int(train.sum()), 1).double()], 1)
        weights = torch.linalg.lstsq(design, y[train]).solution
        mapped = torch.cat([x[test], torch.ones(int(test.sum()), 1).double()], 1) @ weights
        errors += (y[test] - mapped).square().sum().item()
    return 1 - errors / (y - y.mean(0)).square().sum().item()


def test_held_out_sequences_are_predicted_by_the_others():
    x, y = _stream(600, 20, 10.0, 3.0)
    sample_index = torch.arange(60).repeat_interleave(10)
    numbers = linearity_statistics(x, y, sample_index=sample_index, folds=3)
    assert numbers["value"] == pytest.approx(_held_out(x, y, sample_index % 3), abs=1e-10)
    assert numbers["branch_value"] == pytest.approx(
        _held_out(x, y - x, sample_index % 3), abs=1e-10
    )
    per_row = linearity_statistics(x, y, folds=3)["value"]
    assert per_row == pytest.approx(_held_out(x, y, torch.arange(600) % 3), abs=1e-10)


def test_unrelated_rows_reach_the_null():
    generator = torch.Generator().manual_seed(1)
    x, y = _stream(300, 30, 10.0)
    scores = []
    for _ in range(60):
        numbers = linearity_statistics(x, y[torch.randperm(300, generator=generator)])
        scores.append(numbers["in_sample"])
    assert numbers["null"] == pytest.approx(30 / 299)
    mean, error = torch.tensor(scores).mean(), torch.tensor(scores).std() / 60**0.5
    assert abs(mean - 30 / 299) < 4 * error
    assert abs(linearity_statistics(x, y)["adjusted"] - 1) < 1


def test_adjusted_score_of_relu_branch_is_population_score():
    # R² of a ReLU of a standard normal is 1/4 / (1/2 - 1/(2 pi)).
    x = torch.randn(4000, 200, generator=torch.Generator().manual_seed(0)).double()
    numbers = linearity_statistics(x, x + x.relu())
    exact = 0.25 / (0.5 - 0.5 / math.pi)
    assert numbers["branch_adjusted"] == pytest.approx(exact, abs=3e-3)
    assert numbers["branch_in_sample"] > exact + 0.01
    assert numbers["branch_value"] < exact - 0.01


def test_statistics_of_single_rows():
    x, y = _stream(400, 5, 3.0)
    y[7] += 100  # One row holds nearly all squares.
    numbers = linearity_statistics(x, y, folds=2)
    squares = (y - y.mean(0)).square().sum(1)
    assert numbers["top_share"] == pytest.approx(squares.topk(4).values.sum() / squares.sum())
    fold, predicted = torch.arange(400) % 2, torch.zeros_like(y)
    for index in range(2):
        train, test = fold != index, fold == index
        design = torch.cat([x, torch.ones(400, 1).double()], 1)
        weights = torch.linalg.lstsq(design[train], y[train]).solution
        predicted[test] = design[test] @ weights
    errors = (y - predicted).square().sum(1)
    assert numbers["per_token"] == pytest.approx((errors / squares).mean().item(), abs=1e-9)
    unit, unit_predicted = (side / side.norm(dim=1, keepdim=True) for side in (y, predicted))
    share = (unit - unit_predicted).square().sum() / (unit - unit.mean(0)).square().sum()
    assert numbers["after_norm"] == pytest.approx(1 - share.item(), abs=1e-9)
    for prefix, target in (("", y), ("branch_", y - x)):
        relative = errors / (target - target.mean(0)).square().sum(1)
        expected = (relative < 0.01).double().mean().item()
        assert numbers[f"{prefix}affine_tokens"] == pytest.approx(expected)
        for percent in (10, 50, 90):
            expected = np.percentile(relative.numpy(), percent)
            assert numbers[f"{prefix}token_p{percent}"] == pytest.approx(expected, abs=1e-9)
    cosine = ((x - x.mean(0)) * (y - y.mean(0))).sum() ** 2
    cosine = cosine / (x - x.mean(0)).square().sum() / squares.sum()
    assert numbers["identity"] == pytest.approx(cosine.item(), abs=1e-12)


def test_affine_map_is_linear_and_its_branch_too():
    x, _ = _stream(500, 8, 10.0)
    y = x @ torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).double() + 2
    numbers = linearity_statistics(x, y)
    for name in ("value", "in_sample", "adjusted", "branch_value"):
        assert numbers[name] == pytest.approx(1, abs=1e-9)
    assert numbers["per_token"] == pytest.approx(0, abs=1e-9)


def test_float32_rounding_adds_no_direction():
    generator = torch.Generator().manual_seed(0)
    few = torch.randn(300, 4, generator=generator).double()
    x = (few @ torch.randn(4, 200, generator=generator).double()).float()
    y = torch.randn(300, 3, generator=generator)
    assert linearity_statistics(x, y)["null"] == pytest.approx(4 / 299)


def test_more_inputs_than_rows_have_no_adjusted_value():
    x, y = _stream(20, 40, 2.0)
    numbers = linearity_statistics(x, y)
    assert numbers["null"] == 1
    assert numbers["in_sample"] == pytest.approx(1, abs=1e-8)
    assert "adjusted" not in numbers
    assert numbers["value"] < 1


def test_single_sequence_cannot_be_held_out():
    x, y = _stream(50, 3, 2.0)
    with pytest.raises(nlbench.Undefined):
        linearity_statistics(x, y, sample_index=torch.zeros(50, dtype=torch.long))


class Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU())
        self.out = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.out(self.inner(x))


def test_a_run_accumulates_what_the_function_computes():
    torch.manual_seed(0)
    model = nn.Sequential(Residual(6), Residual(6))
    x = torch.randn(40, 9, 6)
    settings = {"sites.of": "blocks", "sites.batch": 7}
    drawn = before_drawing(x)
    run = nlbench.evaluate(model, drawn, ["linearity"], settings=settings)
    first, second = run["linearity"].values
    before, after = model[0](x).detach(), model(x).detach()
    sample_index = torch.arange(40).repeat_interleave(9)
    expected = linearity_statistics(
        before.flatten(0, 1), after.flatten(0, 1), sample_index=sample_index
    )
    assert second.statistics == pytest.approx({**expected, "rows": 360}, abs=1e-6)
    assert (first.n, first.place) == (40, "0")
    whole = nlbench.evaluate(model, drawn, ["linearity"], settings={"sites.of": "blocks"})
    assert whole["linearity"].values[1].statistics == pytest.approx(second.statistics, abs=1e-9)


def test_non_block_places_have_no_branch():
    torch.manual_seed(0)
    run = nlbench.evaluate(
        nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(99, 3), ["linearity"]
    )
    (value,) = run["linearity"].values
    assert 0 < value.statistics["value"] < 1
    assert not any(name.startswith("branch") for name in value.statistics)


def test_first_rows_are_fitted_but_not_scored():
    generator = torch.Generator().manual_seed(3)
    sequences, length, d = 24, 6, 3
    x = torch.randn(sequences, length, d, generator=generator, dtype=torch.float64)
    x[:, 0] *= 100
    y = x.tanh() + x @ torch.randn(d, d, generator=generator, dtype=torch.float64)
    sample_index = torch.arange(sequences).repeat_interleave(length)
    rows = [side.reshape(-1, d) for side in (x, y)]
    statistics = linearity_statistics(*rows, sample_index=sample_index)
    errors = 0.0
    for fold in range(4):
        is_held_out = torch.arange(sequences) % 4 == fold
        fitted = x[~is_held_out].reshape(-1, d).numpy()
        fitted = np.hstack([fitted, np.ones((len(fitted), 1))])
        target = y[~is_held_out].reshape(-1, d).numpy()
        weights = torch.from_numpy(np.linalg.lstsq(fitted, target, rcond=None)[0])
        rest = x[is_held_out][:, 1:]
        errors += (rest @ weights[:-1] + weights[-1] - y[is_held_out][:, 1:]).square().sum()
    rest = y[:, 1:].reshape(-1, d)
    expected = 1 - errors / (rest - rest.mean(0)).square().sum()
    assert statistics["without_first"] == pytest.approx(expected.item(), rel=1e-9)
    assert statistics["value"] > statistics["without_first"]


def test_sample_rows_have_no_first_position():
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    assert "without_first" not in linearity_statistics(x, x.relu())
    sample_index = torch.arange(50)
    assert "without_first" not in linearity_statistics(x, x.relu(), sample_index=sample_index)


def test_affine_tokens_are_counted_without_first_ones():
    # Deviations ± r at equal inputs cancel in every fold, so that the fit is the affine map.
    generator = torch.Generator().manual_seed(0)
    sequences, length, d = 32, 21, 4
    x = torch.randn(sequences, length, d, generator=generator, dtype=torch.float64)
    x[:, 12:17] = x[:, 7:12]
    y = x @ torch.randn(d, d, generator=generator, dtype=torch.float64) + 1
    deviation = torch.randn(sequences, 5, d, generator=generator, dtype=torch.float64)
    y[:, 7:12] += 2 * deviation
    y[:, 12:17] -= 2 * deviation
    sample_index = torch.arange(sequences).repeat_interleave(length)
    rows = [side.reshape(-1, d) for side in (x, y)]
    numbers = linearity_statistics(*rows, sample_index=sample_index)
    assert numbers["affine_tokens"] == numbers["branch_affine_tokens"] == 0.5
    assert numbers["token_p10"] < 1e-20 < 0.1 < numbers["token_p90"]
    assert numbers["first_token"] < 1e-20
    y[0::2, 0] += 1000.0
    y[1::2, 0] -= 1000.0
    x[:, 0] = 0.0
    numbers = linearity_statistics(*rows, sample_index=sample_index, folds=2)
    assert numbers["first_token"] == pytest.approx(1, abs=0.1)


def test_percentiles_ignore_first_tokens():
    x, y = _stream(400, 5, 3.0)
    sample_index = torch.arange(40).repeat_interleave(10)
    numbers = linearity_statistics(x, y, sample_index=sample_index, folds=2)
    fold, predicted = sample_index % 2, torch.zeros_like(y)
    design = torch.cat([x, torch.ones(400, 1).double()], 1)
    for index in range(2):
        weights = torch.linalg.lstsq(design[fold != index], y[fold != index]).solution
        predicted[fold == index] = design[fold == index] @ weights
    is_later = torch.arange(400) % 10 > 0
    errors = (y - predicted).square().sum(1)
    relative = errors / (y - y[is_later].mean(0)).square().sum(1)
    expected = np.percentile(relative[is_later].numpy(), 50)
    assert numbers["token_p50"] == pytest.approx(expected, abs=1e-9)
    expected = relative[~is_later].median().item()
    assert numbers["first_token"] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("n", "has_error"),
    # Of 24 directions: 3/4 of the samples are fitted, and 5/8 without a group.
    [(16, True), (28, False), (33, False), (36, False), (40, False), (48, True)],
)
def test_errors_are_unknown_next_to_the_peak(n, has_error):
    model = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 2)).eval()
    inputs = torch.randn(n, 24, generator=torch.Generator().manual_seed(0))
    (value,) = nlbench.evaluate(model, inputs, ["linearity"])["linearity"].values
    assert value.status == "ok"
    assert (value.error is not None) == has_error
    assert has_error or value.reason.startswith("no standard error: without a group, fits")
