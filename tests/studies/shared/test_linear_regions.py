"""The five studies of linear regions: verdicts follow from the paths' numbers."""

from dataclasses import replace

import numpy as np
import pytest
from paths_of_networks import record, run_of
from scipy import stats

from nlbench import registry
from nlbench.studies import density_vs_deviation
from nlbench.studies.framework import Context
from nlbench.studies.shared import linear_regions

SETTINGS = ("initialised", "augmented", "clean", "noise 0.2", "noise 0.4", "noise 0.8")
PATHS = 40


def paths(deviation, density, seeds=3, *, tied=0.0):
    """Networks of each setting, of which the paths' values spread by a tenth around a level."""
    random = np.random.default_rng(5)
    records = []
    for setting in SETTINGS:
        for seed in range(seeds):
            first, second = random.normal(size=(2, PATHS))
            second = tied * first + (1 - tied) * second
            for name, level, spread in (
                ("absdev", deviation[setting], first),
                ("density", density[setting], second),
            ):
                records.append(record(name, setting, seed, level * (1 + 0.02 * spread)))
    return run_of(records)


def rising(*levels):
    return dict(zip(SETTINGS, levels, strict=True))


# As the paper has VGG8 on CIFAR-10: deviation rises with the noise, density falls.
PAPER = (rising(10, 60, 100, 150, 200, 300), rising(500, 1000, 1000, 900, 800, 600))
# All the other way round.
TURNED = (rising(400, 300, 200, 150, 100, 60), rising(1500, 500, 600, 800, 900, 1000))


def words(name, runs):
    return [verdict.word for verdict in registry.load("studies", name)().analyse(runs).verdicts]


@pytest.mark.parametrize("name", ["noise", "ranking", "paired"])
def test_published_numbers_agree_and_opposites_do_not(name):
    # Most pairs of networks takes six of them, an order of two settings four of each.
    seeds = {"paired": 6, "noise": 4}.get(name, 3)
    published = words(name, {"paths": paths(*PAPER, seeds=seeds)})
    turned = words(name, {"paths": paths(*TURNED, seeds=seeds)})
    if name == "paired":  # The last three are claims that the paper doesn't make.
        published, turned = published[:-3], turned[:-3]
    assert set(published) == {"yes"}
    assert set(turned) == {"no"}


@pytest.mark.parametrize("name", ["paired", "density-vs-deviation"])
def test_columns_of_published_tables_are_judged_separately(name):
    study, both = registry.load("studies", name)(), {"paths": paths(*PAPER, seeds=6)}
    alone = study.analyse(both)
    found = study.analyse({**both, "resnet18": paths(*TURNED, seeds=6)})
    own = [v for v in found.verdicts if not v.claim.startswith("ResNet18: ")]
    assert own == list(alone.verdicts)
    resnet = {v.claim: v for v in found.verdicts if v not in own}
    assert len(resnet) == len(own)
    (table,) = found.tables.values()
    assert set(table.network) == {"VGG8", "ResNet18"}
    if name == "paired":
        # The densities of the turned networks are above those of clean ones, as published.
        claim = "ResNet18: Deviation of noise 0.4 is above that of clean on nearly all paths"
        assert resnet[claim].word == "no"
        assert resnet[claim].published == "1.00 ± 0.00"
        assert "some paths" in list(resnet)[5]


def test_resnets_are_trained_for_the_second_column(tmp_path, monkeypatch):
    asked = []

    def trained(self, model, data, recipe, seed, **more):
        asked.append((model, recipe, more.get("label_noise")))
        return tmp_path / f"{len(asked)}"

    monkeypatch.setattr(Context, "request_training", trained)
    monkeypatch.setattr(Context, "run", lambda self, request, part: (request.models, part))
    study = registry.load("studies", "paired")()
    runs = study.measure(Context(tmp_path, "paired", seeds=(0,)))
    assert runs["resnet18"] == (("resnet18-w4",), "resnet18")
    assert asked[-3:] == [
        ("resnet18-w4", "adam", None),
        ("resnet18-w4", "augmented", None),
        ("resnet18-w4", "adam", 0.4),
    ]
    assert list(study.measure(Context(tmp_path, "paired", quick=True))) == ["paths"]


def test_paths_of_three_networks_are_undecided():
    assert set(words("paired", {"paths": paths(*PAPER)})) == {"needs 6 networks"}


def test_shares_of_paths_are_those_that_are_counted():
    run = paths(*PAPER)
    values = linear_regions.path_values(run, "absdev")
    for same in (True, False):
        found = linear_regions.compare_paths(values, "noise 0.2", "clean", same_seed=same)
        expected = [
            float(a > b)
            for r in run.records
            for s in run.records
            if r.key.startswith("absdev-noise-0.2") and s.key.startswith("absdev-clean")
            if (r.key[-1] == s.key[-1]) == same
            for a, b in (
                (x.statistics["value"], y.statistics["value"])
                for x, y in zip(r.result.values, s.result.values, strict=True)
            )
        ]
        assert len(expected) == PATHS * len(found.fractions)
        assert (len(found.fractions), found.networks) == ((3, 3) if same else (6, 3))
        assert found.fractions.mean() == pytest.approx(np.mean(expected))


def test_correlated_and_uncorrelated_density_differ():
    name = "density-vs-deviation"
    assert set(words(name, {"paths": paths(*PAPER, tied=0.9)})) == {"no"}
    assert "no" not in words(name, {"paths": paths(*PAPER)})


def test_the_interval_of_correlations_is_over_networks():
    spread = np.random.default_rng(0).normal(size=(4, 2, 30))
    correlations = [density_vs_deviation.spearman(*pair).value for pair in spread]
    mean = density_vs_deviation.mean_correlation(correlations)
    transformed = np.arctanh(correlations)
    expected = stats.t.interval(0.95, 3, transformed.mean(), stats.sem(transformed))
    assert mean.value == pytest.approx(np.tanh(transformed.mean()))
    assert (mean.low, mean.high) == pytest.approx(tuple(np.tanh(expected)))


def test_test_error_follows_deviation_or_does_not():
    deviation, density = PAPER
    errors = [
        record("accuracy", setting, seed, [], summary=1 - deviation[setting] / 1000 - seed / 1e4)
        for setting in SETTINGS[1:]
        for seed in range(3)
    ]
    runs = {"paths": paths(deviation, density), "accuracy": run_of(errors)}
    assert words("test-error", runs)[0] == "yes"
    assert words("test-error", {**runs, "paths": paths(*TURNED)})[0] == "no"


def test_path_kinds_are_judged_separately():
    kinds = ("closed", "open", "random")
    flat = (rising(10, 60, 100, 150, 200, 300), rising(500, 500, 500, 500, 500, 500))
    alike = words("paths", {kind: paths(*flat, seeds=6) for kind in kinds})
    assert alike[:5] == ["yes"] * 5
    assert alike[-1] == "no"
    turned = words("paths", {kind: paths(*TURNED, seeds=6) for kind in kinds})
    assert turned[:5:2] == ["no"] * 3


@pytest.mark.parametrize(
    ("name", "numbers"),
    [("paired", PAPER), ("density-vs-deviation", TURNED), ("noise", PAPER), ("ranking", TURNED)],
)
def test_two_networks_per_setting_are_undecided(name, numbers):
    runs = {"paths": paths(*numbers, seeds=2, tied=0.9)}
    found = words(name, runs)
    assert all(word.startswith("needs") for word in found)
    assert {"paired": "needs 6 networks", "noise": "needs 4 networks"}.get(
        name, "needs 3 networks"
    ) in found


def test_single_pair_does_not_separate_paths():
    runs = {kind: paths(*TURNED, seeds=1) for kind in ("closed", "open", "random")}
    assert set(words("paths", runs)[:5]) == {"needs 6 networks"}


def test_unfitted_networks_are_named():
    made = [record("absdev", "noise 0.4", 1, [1.0], fits=0.31), record("absdev", "clean", 0, [1.0])]
    _, said = linear_regions.path_remarks(run_of(made))
    assert said.endswith("Training accuracy: noise 0.4, seed 1: 31%.")
    assert len(linear_regions.path_remarks(run_of(made[1:]))) == 1


def test_trainings_have_shared_names(tmp_path, monkeypatch):
    asked = []

    def trained(self, model, data, recipe, seed, **more):
        asked.append((recipe, seed, more.get("label_noise"), more.get("name")))
        # A mirrored digit is no digit.
        assert (more.get("flip") is False) == (recipe == "augmented")
        return tmp_path / f"{len(asked)}"

    monkeypatch.setattr(Context, "request_training", trained)
    made = linear_regions.trained_networks(Context(tmp_path, "noise", seeds=(4,)))
    assert len(made) == len(asked) == 7
    assert asked[:3] == [
        ("vanilla", 4, None, ""),
        ("augmented", 4, None, "shifted"),
        ("noisy-labels", 4, 0.2, "noise0.2"),
    ]
    quick = linear_regions.trained_networks(Context(tmp_path, "noise", quick=True))
    assert len(asked) == 7
    assert all(file.is_file() for file in quick)


def test_networks_without_a_header_are_initialised():
    made = record("absdev", "initialised", 3, [1.0])
    subject = replace(made.subject, weights_metadata=None)
    values = linear_regions.path_values(run_of([replace(made, subject=subject)]), "absdev")
    assert values.setting.tolist() == ["initialised"]
