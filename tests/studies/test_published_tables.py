"""Verdicts on the published tables by both integrals."""

from dataclasses import replace

import numpy as np
import pytest
from paths_of_networks import record, run_of
from scipy import stats

from nlbench.studies.density_vs_deviation import PUBLISHED
from nlbench.studies.framework import Context
from nlbench.studies.published_integral import AbsdevAsPublished
from nlbench.studies.published_tables import PublishedTables
from nlbench.studies.shared import linear_regions

LEVELS = {"initialised": 10, "augmented": 60, "clean": 100, "noise 0.2": 150, "noise 0.4": 200}


def runs_of(published, seeds=40, parts=("paths",)):
    """Runs of both integrals; the published one is a function of setting, deviation, density."""
    random = np.random.default_rng(3)
    runs = {}
    for part in parts:
        own, other = [], []
        for setting, level in LEVELS.items():
            for seed in range(seeds):
                deviation, density = (1 + 0.02 * random.normal(size=(2, 40))) * [[level], [1000]]
                own.append(record("absdev", setting, seed, deviation))
                own.append(record("density", setting, seed, density))
                numbers = published(setting, deviation, density)
                made = record(AbsdevAsPublished.name, setting, seed, numbers)
                # An evaluation in memory has no checkpoint.
                other.append(replace(made, subject=replace(made.subject, weights_metadata=None)))
        runs |= {part: run_of(own), f"{part}-as-published": run_of(other)}
    return runs


def verdicts_of(runs):
    findings = PublishedTables().analyse(runs)
    return findings, {verdict.claim.split(": ")[0]: verdict for verdict in findings.verdicts[:2]}


def scaled(setting, deviation, density):
    return 4 * deviation


def test_a_factor_changes_no_verdict():
    findings, verdicts = verdicts_of(runs_of(scaled))
    assert [verdict.word for verdict in verdicts.values()] == ["yes", "yes"]
    claims, networks = findings.tables.values()
    assert len(claims) == 4 + 3 + 4
    assert (claims["as defined"] == claims["by published code"]).all()
    assert set(claims["by published code: agrees"][4:7]) == {"yes"}
    assert networks.ratio.tolist() == pytest.approx([4.0] * 200)
    assert " 11 of 11 claims are decided alike, 0 oppositely" in findings.headline[0]


def test_reversed_order_changes_a_verdict_on_table_2():
    def reverses(setting, deviation, density):
        return deviation * (4 if setting == "augmented" else 1)

    findings, verdicts = verdicts_of(runs_of(reverses))
    assert [verdict.word for verdict in verdicts.values()] == ["yes", "no"]
    assert " 1 oppositely" in verdicts["VGG8, table 2"].ours
    assert ", 1 oppositely" in findings.headline[0]


def test_correlation_with_density_changes_verdicts_on_table_1():
    def correlated(setting, deviation, density):
        return density + deviation

    verdicts = verdicts_of(runs_of(correlated, seeds=6))[1]
    assert verdicts["VGG8, table 1"].word == "no"
    assert verdicts["VGG8, table 1"].ours.startswith("0 of 4 claims are decided alike")


def test_three_seeds_leave_table_2_undecided():
    assert verdicts_of(runs_of(scaled, seeds=3))[1]["VGG8, table 2"].word == "can't tell"


@pytest.mark.parametrize(
    "other", [scaled, lambda setting, deviation, density: deviation - density / 20]
)
def test_distances_from_published_correlations_are_those_of_networks(other):
    runs = runs_of(other, seeds=3)
    verdict = PublishedTables().analyse(runs).verdicts[2]
    values = {
        r.key: [v.statistics["value"] for v in r.result.values] for r in runs["paths"].records
    }
    for r in runs["paths-as-published"].records:
        values[r.key] = [v.statistics["value"] for v in r.result.values]
    means = {
        measure: np.mean(
            [
                abs(
                    stats.spearmanr(values[f"{measure}-{key}"], values[f"density-{key}"]).statistic
                    - PUBLISHED["VGG8"][setting][0]
                )
                for setting in LEVELS
                if setting in PUBLISHED["VGG8"]
                for key in (f"{setting}-{seed}".replace(" ", "-") for seed in range(3))
            ]
        )
        for measure in ("absdev", AbsdevAsPublished.name)
    }
    assert verdict.ours.startswith(
        f"mean distance {means[AbsdevAsPublished.name]:.2f}, {means['absdev']:.2f} as defined"
    )
    assert verdict.word == ("can't tell" if other is scaled else "no")


@pytest.mark.parametrize(("factor", "word"), [(6.0, "yes"), (3.0, "no"), (4.0, "can't tell")])
def test_effect_of_wrong_labels_grows_with_their_ratio(factor, word):
    def of_noise(setting, deviation, density):
        return deviation * (factor if "noise" in setting else 4.0)

    assert PublishedTables().analyse(runs_of(of_noise, seeds=3)).verdicts[3].word == word


def test_both_networks_are_judged():
    findings = PublishedTables().analyse(runs_of(scaled, seeds=3, parts=("paths", "resnet18")))
    assert [v.claim.split(",")[0].split(":")[0] for v in findings.verdicts] == (
        ["VGG8"] * 4 + ["ResNet18"] * 4
    )


def test_quick_study_is_undecided(tmp_path, monkeypatch):
    monkeypatch.setattr(
        linear_regions, "LINES", {"lines.anchors": 2, "lines.tolerance": 0.1, "lines.radius": 1.0}
    )
    monkeypatch.setattr(linear_regions, "QUICK_PATHS", 2)
    study = PublishedTables()
    runs = study.measure(Context(tmp_path, "published-tables", quick=True))
    assert list(runs) == ["paths", "paths-as-published"]
    both = [r for run in runs.values() for r in run.records if r.measure.name != "density"]
    assert len(both) == 6
    assert len({r.probe.facts["paths_hash"] for r in both}) == 1
    assert len({r.subject.weights_hash for r in both}) == 3
    defined, published = ({r.subject.weights: r for r in half} for half in (both[:3], both[3:]))
    for weights, r in defined.items():
        assert published[weights].subject.weights_hash == r.subject.weights_hash
        for value, other in zip(r.result.values, published[weights].result.values, strict=True):
            assert 1 < other.statistics["value"] / value.statistics["value"] < 20
    assert {verdict.word for verdict in study.analyse(runs).verdicts} == {
        "can't tell",
        "needs 3 networks",
        "needs 4 networks",
    }
