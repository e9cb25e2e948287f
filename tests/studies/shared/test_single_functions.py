"""Studies of single activations: theory against integration, verdicts that follow from cells.

The runs are the quick ones or smaller; what the paper states of them is asserted.
"""

import math
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from made_records import with_numbers
from made_signatures import make_signatures
from torch import nn

from nlbench import registry
from nlbench.store.run import Run
from nlbench.studies import activations, pooling, shrinkage
from nlbench.studies.framework import Context
from nlbench.studies.networks.functions import ACTIVATIONS
from nlbench.studies.polynomials import closed_form
from nlbench.studies.shared.single_functions import (
    PAPER_ACTIVATIONS,
    PUBLISHED_NORMAL_SCORES,
    normal_score,
    relu_on_uniform,
)


def changed(runs, change):
    """The same runs with other numbers; `change` is told the part, too."""
    return {part: with_numbers(run, partial(change, part)) for part, run in runs.items()}


def study_of(name, tmp_path, **settings):
    study = registry.load("studies", name)()
    return study, study.measure(Context(tmp_path, name, True, **settings))


def answers(study, runs):
    return [verdict.agrees for verdict in study.analyse(runs).verdicts]


@pytest.mark.parametrize("name", PAPER_ACTIVATIONS)
def test_the_score_of_many_normals_is_the_slides(name):
    # By Gauss-Hermite quadrature of PyTorch's own function; kinks cost it digits.
    x, weights = np.polynomial.hermite_e.hermegauss(200)
    weights /= weights.sum()
    y = getattr(nn, ACTIVATIONS[name])()(torch.tensor(x)).numpy()
    y = y - weights @ y
    expected = 1 - math.sqrt(1 - weights @ (x * y) / math.sqrt(weights @ (y * y)))
    assert normal_score(name) == pytest.approx(expected, abs=2e-3)
    # The slides round, and draw.
    assert normal_score(name) == pytest.approx(PUBLISHED_NORMAL_SCORES[name], abs=0.006)


@pytest.mark.parametrize(("low", "high"), [(-1, 1), (-4.9, 0.1), (0, 5), (-0.2, 3)])
def test_relu_on_uniform_equals_its_limit(low, high):
    x = np.linspace(low, high, 200_001)
    y = np.maximum(x, 0)
    mapped = (x - x.mean()) * y.std() / x.std()
    distance = math.sqrt(np.mean((np.sort(mapped) - np.sort(y - y.mean())) ** 2))
    bound = math.sqrt(2) * y.std()
    expected = (distance, bound, 1 - distance / bound)
    assert relu_on_uniform(low, high) == pytest.approx(expected, abs=1e-4)


def test_powers_have_the_scores_of_the_slides(tmp_path):
    study, runs = study_of("polynomials", tmp_path)
    table = study.analyse(runs).tables["Affinity of powers"]
    assert table.here.round(2).tolist() == table.published.tolist()
    assert table.here.tolist() == pytest.approx([closed_form(k) for k in table.order], abs=3e-3)
    assert answers(study, runs) == [True] * 7
    # Other numbers: none agrees, then not even the order does.
    assert answers(study, changed(runs, lambda _, value: value - 0.02)) == [False] * 6 + [True]
    assert answers(study, changed(runs, lambda _, value: 1 - value))[-1] is False


def test_relu_on_windows_has_scores_of_notebook(tmp_path):
    study, runs = study_of("relu-domain", tmp_path)
    assert answers(study, runs) == [True] * 5 + [True, False]
    assert answers(study, changed(runs, lambda _, value: value * 0.8))[1:6] == [False] * 5
    # Of one draw each nobody knows how far another would be.
    first = {
        part: Run(run.manifest, [r for r in run.records if r.subject.seed == 0], run.path)
        for part, run in runs.items()
    }
    assert answers(study, first)[:5] == [None] * 5


def test_relus_asymmetry_comes_from_spread_of_its_output(tmp_path):
    study, runs = study_of("asymmetry", tmp_path)
    # Independent inputs and outputs of one law score 1, not the published 0.
    assert answers(study, runs) == [True] * 5 + [False]
    table = study.analyse(runs).tables["ReLU on [-a, -a + 5]"]
    assert (table.score - table["score, closed form"]).abs().max() < 3e-3
    halved = answers(study, changed(runs, lambda _, value: 0.5 + value / 2))
    assert [halved[number] for number in (0, 2, 4, 5)] == [False, True, False, False]
    zero = answers(study, changed(runs, lambda _, value: value / 100))
    assert zero[5] is True


@pytest.mark.slow
def test_activations_differ_in_depth_and_width(tmp_path):
    study, runs = study_of("activations", tmp_path)
    findings = study.analyse(runs)
    # A quick study has one width, and the sigmoid's lowest score depends on it.
    assert [v.agrees for v in findings.verdicts][:3] == [True, None, None]
    lowest = findings.tables["Lowest score and nonlinear range"].set_index("function").lowest
    assert lowest["tanh"] < lowest["sigmoid"] < 0.15 < lowest["leaky-relu"]
    linear = study.analyse(changed(runs, lambda _, value: 0.9 + value / 10)).verdicts
    # Ranges that are all empty are not ordered.
    assert [v.agrees for v in linear][:5] == [False, None, None, None, None]


@pytest.mark.parametrize(
    ("differences", "answer"),
    [([0.1, 0.2], True), ([-0.1, -0.2], False), ([0.1, -0.2], None), ([0.1], None)],
)
def test_all_widths_of_the_inputs_have_to_agree(differences, answer):
    assert activations._at_all_widths(pd.Series(differences)) is answer


def test_shrinkage_keeps_the_slides_scores_at_all_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(shrinkage, "PAPER_ACTIVATIONS", ("relu", "gelu", "sigmoid"))
    monkeypatch.setattr(
        shrinkage,
        "PUBLISHED_NORMAL_SCORES",
        {n: PUBLISHED_NORMAL_SCORES[n] for n in shrinkage.PAPER_ACTIVATIONS},
    )
    monkeypatch.setattr(shrinkage, "ENDS", {"sigmoid": 0.95, "gelu": 0.78})
    study, runs = study_of("shrinkage", tmp_path)
    findings = study.analyse(runs)
    assert [v.agrees for v in findings.verdicts] == [True] * 5
    # Where there are twice as many dimensions as samples the slides' other curves end.
    table = findings.tables["Affinity by size and covariance"]
    end = table[(table.dimensions == 256) & (table.shrinkage == "none")].set_index("function")
    assert end["mean"].round(2).to_dict() == {"relu": 0.79, "gelu": 0.78, "sigmoid": 0.95}
    flat = changed(runs, lambda part, value: 0.5 if part.endswith("none") else value - 0.05)
    assert answers(study, flat)[:3] == [False] * 3


@pytest.mark.slow
def test_pooling_keeps_score_of_many_channels_only(tmp_path, monkeypatch):
    names = ("sigmoid", "relu")
    monkeypatch.setattr(pooling, "SAMPLES", 128)
    monkeypatch.setattr(pooling, "PAPER_ACTIVATIONS", names)
    monkeypatch.setattr(pooling, "PUBLISHED", {n: pooling.PUBLISHED[n] for n in names})
    study, runs = study_of("pooling", tmp_path)
    assert answers(study, runs) == [True, True, False, False]
    off = changed(runs, lambda part, value: value + 0.03 * part.endswith("spatial"))
    assert answers(study, off)[:2] == [False, False]
    same = {**runs, "network-spatial": runs["network-flatten"]}
    assert answers(study, same)[-1] is True


def batch_size_answers(shift, networks=3):
    base = np.linspace(0.5, 0.9, 7)
    rng = np.random.default_rng(0)
    runs = {}
    for size, moved in (("128", 0.0), ("512", shift)):
        values = {
            ("vgg8", "file", "digits", seed): base * (1 + moved) + rng.normal(0, 1e-3, 7)
            for seed in range(networks)
        }
        runs[size] = make_signatures(values)
    return answers(registry.load("studies", "batch-size")(), runs)


def test_batch_size_is_decided_by_several_networks():
    assert batch_size_answers(0.0) == [True, True]
    assert batch_size_answers(0.1) == [True, False]
    assert batch_size_answers(0.1, networks=1) == [None, None]


def test_batch_size_is_measured_on_the_bundled_network(tmp_path):
    study, runs = study_of("batch-size", tmp_path)
    verdicts = study.analyse(runs).verdicts
    assert [verdict.word for verdict in verdicts] == ["needs 3 networks"] * 2
    assert float(verdicts[0].ours.split()[2]) > 0.9
