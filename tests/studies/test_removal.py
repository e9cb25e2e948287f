"""Correlations, areas and verdicts of the study of removal, on tables made by hand."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from nlbench.probes.sites import list_sites
from nlbench.studies import removal
from nlbench.studies.networks.signals import signal_cnn
from nlbench.studies.removal import (
    RemovalStudy,
    _differences,
    _headline,
    _separations,
    _summary,
    _verdicts,
)


def frames(means, networks=12, spread=0.05):
    """Return correlations and areas of networks with the given means by criterion."""
    random = np.random.default_rng(0)
    rows = [
        ("mnist1d", seed, criterion, mean + random.normal(0, spread))
        for seed in range(networks)
        for criterion, mean in means.items()
    ]
    correlations = pd.DataFrame(rows, columns=["task", "seed", "criterion", "spearman"])
    areas = correlations.rename(columns={"spearman": "accuracy"}).assign(kl=0.1, flops=0.5)
    return correlations, areas


MEANS = {"fisher": 0.9, "affinity": 0.6, "residual": 0.88, "r2": 0.3, "random": 0.0}


def test_best_criterion_and_those_not_separable_lead():
    correlations, areas = frames(MEANS)
    table = _summary(correlations, areas)
    assert list(table.criterion)[-1] == "random"
    separations = _separations(correlations, ["fisher", "affinity", "random"])
    assert (separations["p (Holm)"] < 0.05).all()
    equal = frames({"fisher": 0.9, "residual": 0.9, "random": 0.0})[0]
    separations = _separations(equal, ["fisher", "residual", "random"])
    (headline,) = _headline(_summary(equal, areas), separations)
    assert "Not significantly worse: unexplained variance." in headline


def test_cost_is_tested_against_every_criterion(monkeypatch):
    correlations, areas = frames({"substitution": 0.95, **MEANS})
    monkeypatch.setattr(removal, "_correlations", lambda runs: correlations)
    monkeypatch.setattr(removal, "_areas", lambda runs: areas)
    monkeypatch.setattr(removal, "_remarks", lambda runs: [])
    findings = RemovalStudy().analyse({})
    tests = findings.tables["Differences from substitution and from the best criterion"]
    costs, best = (tests[tests["first"] == name] for name in ("substitution", "fisher"))
    assert set(costs.criterion) == set(MEANS)
    assert set(best.criterion) == set(MEANS) - {"fisher"}
    assert len(tests) == len(costs) + len(best)
    # Holm's factor of the smallest p-value is the number of criteria.
    p_values = [
        stats.ttest_rel(*(correlations[correlations.criterion == c].spearman for c in pair)).pvalue
        for pair in (("substitution", name) for name in MEANS)
    ]
    assert costs["p (Holm)"].min() == pytest.approx(5 * min(p_values))
    assert findings.headline[0].startswith("Fisher term E(g·(ŷ − y))² predicts the cost best")


def test_holm_corrects_paired_t_tests():
    correlations, _ = frames(MEANS)
    separations = _separations(correlations, ["fisher", "affinity", "r2"])
    difference = _differences(correlations, "fisher", "affinity")
    assert len(difference) == 12
    low, high = stats.ttest_1samp(difference, 0).confidence_interval()
    assert separations[["low", "high"]].iloc[0].to_list() == pytest.approx([low, high])
    smaller, larger = sorted(
        stats.ttest_1samp(_differences(correlations, "fisher", other), 0).pvalue
        for other in ("affinity", "r2")
    )
    assert sorted(separations["p (Holm)"]) == pytest.approx(sorted([2 * smaller, larger]))


def test_verdicts_need_networks():
    names = {"Unexplained variance predicts the cost better than R²": True}
    for networks, answer in ((12, True), (2, None)):
        verdicts = {v.claim: v.agrees for v in _verdicts(*frames(MEANS, networks))}
        assert [verdicts[name] for name in names] == [answer]


def test_unmeasured_criterion_is_undecided():
    verdicts = {v.claim: v for v in _verdicts(*frames(MEANS))}
    verdict = verdicts["Learned masks predict better than affinity"]
    assert (verdict.agrees, verdict.ours) == (None, "not measured")


def test_claim_holds_in_each_task_or_fails_in_one():
    correlations, areas = frames(MEANS)
    claim = "affinity predicts the cost"
    for mean, answer in ((0.6, True), (0.0, None), (-0.6, False)):
        other = frames({"affinity": mean})[0].assign(task="digits")
        (verdict,) = (
            v for v in _verdicts(pd.concat([correlations, other]), areas) if v.claim == claim
        )
        assert verdict.agrees is answer


def test_signal_cnn_calls_ten_relus():
    sites = list_sites(signal_cnn((40,), 7), torch.randn(2, 40))
    assert [site.kind for site in sites] == ["relu"] * 10
    assert signal_cnn((40,), 7)(torch.randn(2, 40)).shape == (2, 7)
