"""Seeds of one architecture against other architectures."""

import math

import numpy as np
from made_signatures import make_signatures, merge_runs

from nlbench.studies.correlations import OTHERS
from nlbench.studies.seeds import TABLE_3, Seeds


def answers(step=0.0, moved=0.3, apart=0.2, others=3):
    rng = np.random.default_rng(0)
    found = {}
    for seed in range(6):
        found["vgg8", "file", "digits", seed] = 0.6 + step * (seed - 2.5) + rng.normal(0, 0.002, 7)
        found["vgg8", "calibrated", "digits", seed] = np.full(7, 0.6 + moved)
    for seed in range(others):
        found["resnet20", "file", "digits", seed] = 0.6 + apart + rng.normal(0, 0.002, 9)
    recipes = {("vgg8", f"recipe{i}", "digits", 0): [0.5 + i / 10, None] for i in (0, 1, 2)}
    by_measure = [make_signatures(recipes, name, OTHERS.get(name, "value")) for name in TABLE_3]
    runs = {"run": make_signatures(found), "recipes": merge_runs(*by_measure)}
    findings = Seeds().analyse(runs)
    criteria = findings.tables["Five criteria over one architecture, trained in several ways"]
    assert list(criteria.here) == ["0.60 ± 0.10"] * 5
    table = findings.tables["Distances between signatures"]
    assert len(table) == math.comb(6 + others, 2)
    assert table.same.sum() == 15 + math.comb(others, 2)
    return [verdict.agrees for verdict in findings.verdicts]


def test_verdicts_follow_spread_and_distance():
    assert answers() == [True, True, True, True]
    assert answers(apart=0.0)[1] is None
    assert answers(moved=0.0)[3] is not True
    assert answers(step=0.1, moved=0.0)[3] is False
    assert answers(step=0.1)[0] is False
    # The deviation is a bit less than half of the distance: six networks can't tell.
    assert answers(step=0.04)[0] is None
    assert answers(others=2)[:2] == [None, None]
