"""Distances between signatures within and between families."""

import numpy as np
import pandas as pd
import pytest
from made_signatures import make_signatures

import nlbench
from nlbench.studies.families import Families, _compare_depths, _compare_patches
from nlbench.studies.shared.classifiers import CLASSIFIERS, FAMILIES


def test_single_network_is_refused():
    run = make_signatures({("torchvision/alexnet", "trained", "imagenet", 0): [0.5, 0.6]})
    with pytest.raises(nlbench.RequestError):
        Families().analyse({"run": run})


@pytest.mark.parametrize(("by_family", "alike"), [(True, 13), (False, 2)])
def test_families_of_zoo_are_compared_with_initialised_networks(by_family, alike):
    classifiers = {
        (name, "trained", "imagenet", 0): np.linspace(0.5, 0.6 + 0.01 * i, 8)
        for i, name in enumerate(CLASSIFIERS)
    }
    zoo = {}
    for i, name in enumerate(Families.zoo):
        family = name.partition("-")[0]
        # Neighbours alternate between families, or are of one.
        level = {"neuralfoil": 0.1, "mtcnn": 0.5, "crepe": 0.9}[family] + 0.001 * i
        apart = i if family == "neuralfoil" else i - 8 + 0.4
        zoo[f"zoo/{name}", "trained", "own", 0] = [level if by_family else apart, 0.0]
        zoo[f"zoo/{name}", "init", "own", 0] = [0.5 + 0.01 * i, 0.0]
    runs = {"run": make_signatures(classifiers), "zoo": make_signatures(zoo)}
    verdict = Families().analyse(runs).verdicts[-1]
    assert "initialised" in verdict.ours
    assert verdict.ours.startswith(f"{alike} of 13 networks")
    assert verdict.word == "needs 5 families"


def answers(level):
    rng = np.random.default_rng(0)
    run = make_signatures(
        {
            (name, "trained", "imagenet", 0): level(one) + rng.normal(0, 0.002, 6)
            for name, one in CLASSIFIERS.items()
        }
    )
    findings = Families().analyse({"run": run})
    assert findings.tables["Distances between signatures"].shape == (36, 37)
    return [verdict.agrees for verdict in findings.verdicts[:4]]


def test_published_pattern_agrees_and_its_opposite_does_not():
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


def scores_by_place(change):
    """Return scores of a VGG and ResNets after additions, which change from network to network."""
    rows = []
    for step, name in enumerate(("18", "34", "50", "101", "152")):
        for number in (1, 2):
            blocks = f"layer1.{number}.relu"
            rows += [(f"torchvision/resnet{name}", blocks, 0.5)]
            rows += [(f"torchvision/resnet{name}", f"{blocks}:1", 0.8 + change * step)]
    rows += [
        (f"torchvision/vgg{name}", "features.1", 0.6 + 4 * change * step)
        for step, name in enumerate((11, 13, 16, 19))
    ]
    return pd.DataFrame(rows, columns=["model", "place", "value"])


def test_depth_is_followed_after_additions():
    assert [v.word for v in _compare_depths(scores_by_place(0.03))] == ["no", "yes"]
    assert [v.word for v in _compare_depths(scores_by_place(-0.005))] == ["yes", "no"]
    assert _compare_depths(scores_by_place(0.03))[1].ours == "0.800 < 0.830 < 0.860 < 0.890 < 0.920"
    nothing = scores_by_place(0.0)[:0]
    assert [v.word for v in _compare_depths(nothing)] == ["can't tell"] * 2


def test_patches_are_followed_from_layer_to_layer():
    rising, late = np.linspace(0.3, 0.8, 24), np.repeat([0.4, 0.5, 0.5, 0.8], 6)
    names = "torchvision/vit_l_16", "torchvision/vit_l_32"
    words = [
        [v.word for v in _compare_patches(dict(zip(names, pair, strict=True)))]
        for pair in ((rising, late), (-rising, late[::-1]), (late[:2], rising))
    ]
    assert words == [["yes", "yes"], ["no", "no"], ["can't tell", "no"]]
    assert _compare_patches({}) == []
