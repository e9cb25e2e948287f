"""Outcomes of networks against cases where they are known."""

import math

import pytest
import torch
from torch import nn

import nlbench
from nlbench.studies.shared.outcomes import (
    TaskSamples,
    fgsm_robustness,
    first_loss,
    generalisation_gap,
    nonlinear_fraction,
    outcomes_measure,
)


def absolute_value(extra=0):
    """Build a classifier of |x| < 1 from two ReLUs, with more ReLUs that nothing depends on."""
    first, last = nn.Linear(1, 2 + extra), nn.Linear(2 + extra, 2)
    with torch.no_grad():
        first.weight.copy_(torch.tensor([1.0, -1.0] + [1.0] * extra)[:, None])
        first.bias.zero_()
        last.weight.copy_(torch.tensor([[-1.0, -1.0] + [0.0] * extra, [0.0] * (2 + extra)]))
        last.bias.copy_(torch.tensor([1.0, 0.0]))
    return nn.Sequential(first, nn.ReLU(), last)


@pytest.fixture
def samples():
    points = torch.linspace(-2, 2, 401)[:, None]
    labels = (points[:, 0].abs() > 1).long()
    return TaskSamples((points, labels), (points, labels), 2, 0.1)


def test_memorised_noise_gap_matches_noisy_test_labels():
    labels = torch.arange(100_000) % 5
    noisy = nlbench_corrupted(labels, 0.3)
    predictions = nlbench_corrupted(labels, 0.2, seed=7)
    accuracy = float((predictions == labels).double().mean())
    on_noisy = float((predictions == noisy).double().mean())
    assert generalisation_gap(1.0, accuracy, 0.3, 5) == pytest.approx(1 - on_noisy, abs=0.005)


def nlbench_corrupted(labels, share, seed=0):
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.rand(len(labels), generator=generator) < share
    steps = torch.randint(1, 5, (len(labels),), generator=generator)
    return torch.where(wrong, (labels + steps) % 5, labels)


def test_attack_of_a_linear_classifier_moves_its_margin(samples):
    inputs, labels = samples.test
    model = nn.Linear(1, 2, bias=False)
    model.weight.data.copy_(torch.tensor([[0.0], [1e4]]))
    labels = (inputs[:, 0] > 0).long()
    # The softmax is saturated, so that the gradient of the cross-entropy vanishes.
    expected = (inputs[:, 0].abs() > 0.5).double().sum() / (labels == model(inputs).argmax(1)).sum()
    assert fgsm_robustness(model, inputs, labels, 0.5) == pytest.approx(float(expected), abs=0.01)


def test_attack_follows_the_gradient_of_the_cross_entropy():
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(50, 4)
    points = inputs.clone().requires_grad_()
    labels = model(inputs).argmax(1)
    nn.functional.cross_entropy(model(points), labels).backward()
    moved = model(inputs + 0.3 * points.grad.sign()).argmax(1)
    expected = float((moved == labels).double().mean())
    assert 0 < expected < 1
    assert fgsm_robustness(model, inputs, labels, 0.3) == pytest.approx(expected)


def test_attack_on_always_wrong_network_is_zero(samples):
    inputs, labels = samples.test
    assert fgsm_robustness(absolute_value(), inputs, 1 - labels, 0.1) == 0


def test_first_loss_is_interpolated():
    assert first_loss([0, 0.5, 1], [1.0, 0.99, 0.95], 0.01) == pytest.approx(0.5)
    assert first_loss([0, 0.5, 1], [1.0, 0.98, 0.99], 0.01) == pytest.approx(0.25)
    assert first_loss([0, 0.5, 1], [0.5, 0.9, 0.9], 0.01) == 1


def test_unused_units_can_be_removed(samples):
    with torch.no_grad():
        # Two of 40 units are needed, so 95 % go before the accuracy falls.
        share = nonlinear_fraction(absolute_value(38), samples)
    assert 0 < share <= 0.05


def test_affine_networks_need_no_nonlinear_unit(samples):
    model = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].bias.fill_(100)
        assert nonlinear_fraction(model, samples) == 0


def test_outcomes_are_recorded_for_each_network(samples):
    models = {"a": absolute_value(), "b": absolute_value(6)}
    trainings = {id(models["a"]): (0.0, 0), id(models["b"]): (0.25, 3)}
    measure = outcomes_measure(samples, trainings)
    run = nlbench.evaluate(models, samples.test[0][:4], [measure])
    first, second = (record.result.summary for record in run.records)
    assert first["value"] == first["train"] == second["value"] == 1
    assert first["gap"] == 0
    assert second["train"] == pytest.approx(1 - round(0.25 * 401) / 401)
    assert second["gap"] == pytest.approx(second["train"] - 0.75)
    assert first["norm"] == pytest.approx(2)
    margins = (1 - samples.train[0].abs()[:, 0]).double()
    labels = samples.train[1]
    loss = -torch.where(labels == 0, margins.sigmoid(), (-margins).sigmoid()).log().mean()
    assert first["loss"] == pytest.approx(float(loss))
    attacked = 1 - float(((1 - samples.test[0].abs()).abs() >= 0.1).double().mean())
    assert first["fragility"] == pytest.approx(attacked, abs=0.01)
    assert not math.isnan(first["nonlinear"])


def test_task_has_both_splits_normalised():
    task = TaskSamples.load("spirals", 0.1)
    assert [len(part) for part in (*task.train, *task.test)] == [512, 512, 1024, 1024]
    assert task.classes == 3
    assert task.train[0].std() == pytest.approx(0.75, abs=0.25)
    digits = TaskSamples.load("digits", 0.1)
    assert digits.train[0].std() == pytest.approx(1, abs=0.01)
