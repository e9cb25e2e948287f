"""Affinity against other measures of sites."""

import numpy as np
import pytest
from made_signatures import make_signatures, merge_runs

from nlbench.studies.correlations import (
    AVERAGE,
    OTHERS,
    PUBLISHED,
    Correlations,
    _none_follows,
    correlate_sites,
)
from nlbench.studies.shared.classifiers import CLASSIFIERS

NETWORKS = [f"torchvision/{name}" for name in PUBLISHED]


def made(names, mixture):
    """Every measure with what `mixture` says of affinity in it, and noise else."""
    rng = np.random.default_rng(0)
    affinity = {(name, "trained", "imagenet", 0): rng.normal(0, 1, 40) for name in names}
    runs = [make_signatures(affinity)]
    for other, statistic in OTHERS.items():
        mixed = {}
        for key, values in affinity.items():
            noise = rng.normal(0, 1, 40)
            noise -= np.polyval(np.polyfit(values, noise, 1), values)
            noise /= noise.std()
            r = mixture(key[0], other)
            mixed[key] = r * (values - values.mean()) / values.std() + np.sqrt(1 - r * r) * noise
        runs.append(make_signatures(mixed, other, statistic))
    return merge_runs(*runs)


def as_published(name, other):
    return PUBLISHED[name.rpartition("/")[2]][other]


def test_the_published_table_has_the_published_averages():
    assert set(NETWORKS) <= set(CLASSIFIERS)
    for other, (mean, std) in AVERAGE.items():
        values = np.array([row[other] for row in PUBLISHED.values()])
        # One network more than the table has entered the published averages.
        assert values.mean() == pytest.approx(mean, abs=0.03)
        assert values.std() == pytest.approx(std, abs=0.03)


def test_correlations_are_pearson_s_over_sites():
    found = correlate_sites(made(NETWORKS[:3], as_published)).set_index("network")
    for name in NETWORKS[:3]:
        for other in OTHERS:
            assert found.loc[name, other] == pytest.approx(as_published(name, other), abs=1e-9)


def test_undefined_site_is_dropped_from_its_pair():
    keys = ("vgg8", "file", "digits", 0)
    affinity = make_signatures({keys: {"a": 0.1, "b": None, "c": 0.3, "d": 0.5, "e": 0.2}})
    cka = make_signatures({keys: {"a": 0.3, "b": 0.9, "c": 0.2, "d": 0.0, "e": 0.1}}, "cka")
    (row,) = correlate_sites(merge_runs(affinity, cka)).to_dict("records")
    assert row["sites"] == 4
    assert row["cka"] == pytest.approx(
        np.corrcoef([0.1, 0.3, 0.5, 0.2], [0.3, 0.2, 0.0, 0.1])[0, 1]
    )
    assert np.isnan(row["norm"])


def answers(mixture):
    runs = {
        "classifiers": made(NETWORKS, mixture),
        "digits": made(["vgg8", "resnet20", "plain20"], mixture),
        "zoo": made(["zoo/mtcnn-pnet", "zoo/mtcnn-rnet", "zoo/mtcnn-onet"], mixture),
    }
    return [verdict.agrees for verdict in Correlations().analyse(runs).verdicts]


def test_measure_defined_in_one_network_is_undecided():
    table = correlate_sites(made(NETWORKS[:4], lambda *_: 0.1))
    assert _none_follows("", table.assign(r2=[0.9, 0.89, 0.9, np.nan])).agrees is False
    assert _none_follows("", table.assign(r2=[0.9, 0.5, 0.8, np.nan])).agrees is None
    assert _none_follows("", table.assign(r2=[0.9, *[np.nan] * 3])).agrees is True


def test_missing_zoo_networks_decide_nothing():
    run = made(NETWORKS, as_published)
    findings = Correlations().analyse({"classifiers": run, "digits": run})
    assert findings.verdicts[-1].agrees is None
    assert any("zoo/minilm-l6 was not measured" in remark for remark in findings.remarks)


def test_published_pattern_agrees_and_its_opposite_does_not():
    known = set(PUBLISHED)
    published = answers(lambda n, o: as_published(n, o) if n.rpartition("/")[2] in known else 0.1)
    assert published == [True] * 9
    assert answers(lambda _, other: 0.9 if other == "entropy" else 0.0)[3:] == [
        False,  # entropy's mean
        None,  # R²'s, which differs by 0.13
        False,
        False,
        False,
        False,
    ]
