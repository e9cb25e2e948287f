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
    is_positive,
    signed_rank_p,
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
    # The differences of all networks have one sign, and Holm's factor is the number of criteria.
    assert costs["p (Holm)"].min() == pytest.approx(5 * 2 / 2**12)
    assert findings.headline[0].startswith("Fisher term E(g·(ŷ − y))² predicts the cost best")


def test_holm_corrects_scipys_signed_ranks():
    correlations, _ = frames(MEANS)
    separations = _separations(correlations, ["fisher", "affinity", "r2"])
    difference = _differences(correlations, "fisher", "affinity")
    assert len(difference) == 12
    p = stats.wilcoxon(difference).pvalue
    assert separations["p (Holm)"].iloc[0] == pytest.approx(2 * p)


def test_verdicts_need_networks():
    names = {"Unexplained variance predicts the cost better than R²": True}
    for networks, answer in ((12, True), (4, None)):
        verdicts = {v.claim: v.agrees for v in _verdicts(*frames(MEANS, networks))}
        assert [verdicts[name] for name in names] == [answer]


def test_unmeasured_criterion_is_undecided():
    verdicts = {v.claim: v for v in _verdicts(*frames(MEANS))}
    verdict = verdicts["Learned masks predict better than affinity"]
    assert (verdict.agrees, verdict.ours) == (None, "not measured")


def test_decisions_by_interval_and_signed_ranks():
    assert is_positive(np.linspace(0.1, 1, 8)) is True
    assert is_positive(np.linspace(-1, -0.1, 8)) is False
    assert is_positive(np.linspace(-1, 1, 8)) is None
    assert is_positive(np.linspace(0.1, 1, 5)) is None
    assert signed_rank_p(np.zeros(9)) == 1


def test_signal_cnn_calls_ten_relus():
    sites = list_sites(signal_cnn((40,), 7), torch.randn(2, 40))
    assert [site.kind for site in sites] == ["relu"] * 10
    assert signal_cnn((40,), 7)(torch.randn(2, 40)).shape == (2, 7)
