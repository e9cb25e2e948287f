"""Scores by matrix roots are the measure's in float64, and the verdicts follow from both."""

import pytest
import torch

import nlbench
from nlbench import registry
from nlbench.measures.affinity import affinity_score
from nlbench.studies.published_roots import (
    PublishedRoots,
    RootsInSinglePrecision,
    features,
    score_by_roots,
)


@pytest.mark.parametrize("routine", ["eigh", "svd"])
def test_float64_score_equals_absolute_ridge(routine):
    x = torch.from_numpy(features(60, 12))
    y = torch.relu(x - 0.3)
    expected = affinity_score(x, y, ridge_unit="absolute").item()
    found = score_by_roots(x, y, routine=routine, precision="float64")
    assert found == pytest.approx(expected, abs=1e-9)


def test_float32_score_of_wide_spectrum_is_wrong():
    x = torch.from_numpy(features(512, 200))
    y = torch.relu(x)
    right = affinity_score(x, y).item()
    off = [abs(score_by_roots(x, y, routine=one) - right) for one in ("eigh", "svd")]
    assert max(off) > 100 * abs(score_by_roots(x, y, precision="float64") - right)


def test_verdicts_follow_from_the_recorded_scores():
    relu, runs = torch.nn.Sequential(torch.nn.ReLU()), {}
    for name, d in (("many", 100), ("few", 4)):
        inputs = torch.from_numpy(features(160, d))
        runs[name] = nlbench.evaluate(
            relu,
            inputs,
            ["affinity", RootsInSinglePrecision],
            settings={"sites.batch": 160},
            name=f"ReLU on {d} features",
        )
    words = [v.word for v in PublishedRoots().analyse(runs).verdicts]
    assert words[1:] == ["yes", "yes"]
    turned = PublishedRoots().analyse({"many": runs["few"], "few": runs["few"]})
    assert turned.verdicts[0].word == "no"
    assert RootsInSinglePrecision.name not in registry.entries("measures")
