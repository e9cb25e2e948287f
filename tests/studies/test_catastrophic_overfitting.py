"""The study of catastrophic overfitting: attacks, the collapse, and planted changes."""

import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import nlbench
from nlbench.studies import catastrophic_overfitting as study
from nlbench.studies.catastrophic_overfitting import (
    COLLAPSING,
    MEASURES,
    SAFE,
    attack,
    change_table,
    find_collapse,
    robustness_measure,
    train_with_fgsm,
)
from nlbench.studies.shared.outcomes import fgsm_robustness

ROBUST = {COLLAPSING: (0.2, 0.4, 0.6, 0.1, 0.1), SAFE: (0.3, 0.5, 0.6, 0.7, 0.7)}


def checkpoints(rates, seeds=8, robust=ROBUST):
    """Return checkpoints whose measures grow by `rates`: before, at the collapse, and if safe."""
    before, during, safe = rates
    random = np.random.default_rng(0)
    rows = []
    for seed, (epsilon, accuracies) in itertools.product(range(seeds), robust.items()):
        noise = 0.01 * random.normal()
        logs = [0.0, before, 2 * before, 2 * before + during, 2 * before + during]
        if epsilon == SAFE:
            logs = [index * safe for index in range(5)]
        for index, accuracy in enumerate(accuracies):
            row = {"epsilon": epsilon, "seed": seed, "epoch": 2 * index + 2}
            row |= dict.fromkeys(("clean", "fgsm"), 0.5) | {"robust": accuracy}
            rows.append(row | dict.fromkeys(MEASURES, np.exp(2 * logs[index] + noise)))
    return pd.DataFrame(rows)


def words(table):
    return [verdict.word for verdict in study._verdicts(table, change_table(table))]


@pytest.mark.parametrize(
    ("rates", "answers"),
    [
        ((0.1, 0.5, 0.1), ["yes", "yes"]),
        ((0.3, 0.2, 0.1), ["yes", "no"]),
        ((0.1, 0.2, 0.3), ["no", "yes"]),
        ((-0.3, -0.1, -0.2), ["no", "no"]),
    ],
)
def test_planted_changes_are_recovered(rates, answers):
    table = checkpoints(rates)
    assert words(table) == ["yes", *answers * len(MEASURES)]
    changes = change_table(table)
    assert changes["at collapse"].mean() == pytest.approx(rates[1])
    assert changes["before"].mean() == pytest.approx(rates[0])
    assert changes["safe"].mean() == pytest.approx(rates[2])


def test_few_seeds_decide_nothing():
    assert set(words(checkpoints((0.1, 0.5, 0.1), seeds=3))) == {"needs 6 networks"}


def test_networks_that_stay_robust_do_not_collapse():
    assert find_collapse(ROBUST[SAFE]) is None
    table = checkpoints((0.1, 0.5, 0.1), robust={COLLAPSING: ROBUST[SAFE], SAFE: ROBUST[SAFE]})
    assert change_table(table).empty
    assert words(table)[0] == "no"


def test_attacks_stay_within_their_bounds():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    images, labels = torch.rand(64, 1, 4, 4), torch.randint(3, (64,))

    def loss(attacked):
        return nn.functional.cross_entropy(model(attacked), labels).item()

    attacked = [attack(model, images, labels, 0.1, steps) for steps in (1, 10)]
    for each in attacked:
        assert (each - images).abs().max() <= 0.1 + 1e-6
        assert each.min() >= 0
        assert each.max() <= 1
    assert loss(images) < loss(attacked[0]) <= loss(attacked[1])
    assert torch.equal(attack(model, images, labels, 0.0, 1), images)


def test_attack_of_a_linear_network_is_exact():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    images, labels = 0.4 + 0.2 * torch.rand(32, 1, 2, 2), torch.randint(2, (32,))
    weight = model[1].weight
    direction = (weight[1 - labels] - weight[labels]).sign().reshape(images.shape)
    for steps in (1, 10):
        attacked = attack(model, images, labels, 0.1, steps)
        assert torch.allclose(attacked, images + 0.1 * direction)
    correct = model(images).argmax(1) == labels
    robust = model(attacked).argmax(1) == labels
    assert fgsm_robustness(model, images, labels, 0.1) * correct.sum() == robust.sum()


def test_training_is_repeatable_and_robust(monkeypatch):
    monkeypatch.setattr(study, "EPOCHS", 4)
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (256,), generator=generator)
    images = (0.5 + 0.25 * (2 * labels[:, None] - 1)).expand(-1, 16).reshape(-1, 1, 4, 4)
    images = images + 0.05 * torch.randn(images.shape, generator=generator)
    first, second = (dict(train_with_fgsm(images, labels, 0.1, 0)) for _ in range(2))
    assert list(first) == [2, 4]
    states = [run[4].state_dict() for run in (first, second)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    model = first[4]
    facts = {id(model): {"epsilon": 0.1, "seed": 0, "epoch": 4}}
    measure = robustness_measure(images, labels, facts)
    run = nlbench.evaluate(model, images[:8], [measure], errors="none")
    summary = run["robust-accuracy"].summary
    assert summary["clean"] > 0.95
    robust = (model(attack(model, images, labels, 0.1, 10)).argmax(1) == labels).double().mean()
    assert summary["value"] == pytest.approx(robust.item())
    assert summary["epoch"] == 4
