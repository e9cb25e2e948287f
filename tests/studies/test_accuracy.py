"""Scores against published accuracy."""

import math

import pytest
from made_signatures import make_signatures

from nlbench.studies.accuracy import AccuracyStudy, add_accuracy, airfoil_networks, pearson
from nlbench.studies.airfoils import SIZES
from nlbench.studies.history import signature_statistics
from nlbench.studies.shared.classifiers import CLASSIFIERS


@pytest.fixture(scope="module")
def stated():
    run = make_signatures({(n, "trained", "imagenet", 0): [0.1, 0.2] for n in CLASSIFIERS})
    return add_accuracy(signature_statistics(run)).set_index("network")


def answers(stated, signature):
    run = make_signatures(
        {
            (name, "trained", "imagenet", 0): signature(CLASSIFIERS[name], row.accuracy)
            for name, row in stated.iterrows()
        }
    )
    findings = AccuracyStudy().analyse({"run": run})
    return [verdict.agrees for verdict in findings.verdicts]


def test_torchvision_states_accuracy_and_size(stated):
    alexnet = stated.loc["torchvision/alexnet"]
    assert alexnet.accuracy == pytest.approx(56.522)
    assert alexnet.parameters == pytest.approx(61.100840)
    assert stated.accuracy.between(50, 90).all()


def test_published_pattern_agrees_and_its_opposite_does_not(stated):
    def rising(one, accuracy):
        if one.family == "ViT":
            return [1 - accuracy / 100, 0.9]
        return [0.3, 0.3, 0.3 + accuracy / 200] if one.group != "searched" else [0.5, 0.5]

    assert answers(stated, rising)[:5] == [True] * 5

    def falling(one, accuracy):
        return [accuracy / 200, 0.6]

    assert answers(stated, falling)[:2] == [False, False]


def test_airfoils_follow_their_generating_statistic(stated):
    run = make_signatures({(n, "trained", "imagenet", 0): [0.1, 0.2] for n in CLASSIFIERS})
    zoo = {
        (f"zoo/neuralfoil-{size}", "trained", "airfoils", 0): [0.5, 0.5 - math.log(error) / 10]
        for size, (_, error) in SIZES.items()
    }
    runs = {"run": run, "zoo": make_signatures(zoo)}
    table = airfoil_networks(runs)
    assert table.accuracy.iloc[-1] == pytest.approx(-math.log(0.020))
    spread, closest = AccuracyStudy().analyse(runs).verdicts[-2:]
    assert spread.agrees is True
    assert spread.ours.startswith("r = 1.00")
    assert closest.agrees is True
    without = AccuracyStudy().analyse({"run": run})
    assert [verdict.agrees for verdict in without.verdicts[-2:]] == [None, None]
    assert any("zoo/neuralfoil-large was not measured" in remark for remark in without.remarks)


def test_two_networks_have_no_correlation():
    assert pearson([1.0, 2.0], [1.0, 2.0]).value != pearson([1.0, 2.0], [1.0, 2.0]).value
