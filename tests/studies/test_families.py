"""Distances of signatures within and between families."""

import numpy as np
import pytest
from made_signatures import made_signatures

import nlbench
from nlbench.studies.families import Families
from nlbench.studies.shared.classifiers import CLASSIFIERS, FAMILIES


def test_one_network_is_refused_in_a_line():
    run = made_signatures({("torchvision/alexnet", "trained", "imagenet", 0): [0.5, 0.6]})
    with pytest.raises(nlbench.RequestError, match="only torchvision/alexnet has a signature here"):
        Families().analyse({"run": run})


def answers(level):
    rng = np.random.default_rng(0)
    run = made_signatures(
        {
            (name, "trained", "imagenet", 0): level(one) + rng.normal(0, 0.002, 6)
            for name, one in CLASSIFIERS.items()
        }
    )
    findings = Families().analyse({"run": run})
    assert findings.tables["Distances of signatures"].shape == (36, 37)
    return [verdict.agrees for verdict in findings.verdicts]


def test_the_published_pattern_agrees_and_its_opposite_does_not():
    order = list(FAMILIES)

    def as_published(one):
        if one.group == "post-ViT":
            return 0.5
        return 0.0 if one.family == "ViT" else 0.5 + 0.03 * order.index(one.family)

    assert answers(as_published) == [True, True, True, True]
    rng = np.random.default_rng(1)
    assert answers(lambda _: rng.uniform(0.4, 0.6))[0] in (None, False)

    def backwards(one):
        if one.group == "post-ViT":
            return 1.5
        return 0.2 if one.family == "AlexNet" else 0.9 - 0.03 * order.index(one.family)

    assert answers(backwards)[1:3] == [False, False]
    assert answers(lambda one: 0.9 if one.family == "DenseNet" else 0.5)[3] is False
