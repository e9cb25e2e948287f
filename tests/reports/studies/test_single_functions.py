"""Studies of single activations: closed forms against integration, verdicts that follow from cells.

Their runs are the quick ones, with what the paper states asserted.
"""

import dataclasses
import math

import numpy as np
import pytest
from scipy import integrate, stats

from nlbench import registry
from nlbench.models.networks.functions import ACTIVATIONS
from nlbench.reports.studies.polynomials import in_theory
from nlbench.reports.studies.single_functions import NINE, NORMAL, normal_score, relu_on_uniform
from nlbench.reports.studies.study import Context
from nlbench.store.run_folder import Run


def changed(runs, change):
    """The same runs with other summaries."""

    def other(record):
        summary = {name: change(value) for name, value in record.result.summary.items()}
        return dataclasses.replace(
            record, result=dataclasses.replace(record.result, summary=summary)
        )

    return {
        part: Run(r.manifest, [other(c) for c in r.records], r.path) for part, r in runs.items()
    }


def study_of(name, tmp_path, **settings):
    study = registry.load("studies", name)()
    return study, study.measure(Context(tmp_path, name, True, **settings))


def answers(study, runs):
    return [verdict.agrees for verdict in study.analyse(runs).verdicts]


@pytest.mark.parametrize("name", NINE)
def test_the_score_of_many_normals_is_the_slides(name):
    import torch

    function = getattr(torch.nn, ACTIVATIONS[name])()

    def of(power):
        def value(x):
            y = function(torch.tensor(x, dtype=torch.float64)).item()
            return (y - of_mean) ** power * x ** (2 - power) * stats.norm.pdf(x)

        return integrate.quad(value, -9, 9, points=(-3, -1, 0, 1, 3, 6), limit=200)[0]

    of_mean = 0.0
    of_mean = integrate.quad(
        lambda x: function(torch.tensor(x, dtype=torch.float64)).item() * stats.norm.pdf(x), -9, 9
    )[0]
    expected = 1 - math.sqrt(1 - of(1) / math.sqrt(of(2)))
    assert normal_score(name) == pytest.approx(expected, abs=1e-6)
    # The slides round, and draw.
    assert normal_score(name) == pytest.approx(NORMAL[name], abs=0.006)


@pytest.mark.parametrize(("low", "high"), [(-1, 1), (-4.9, 0.1), (0, 5), (-0.2, 3)])
def test_relu_on_a_uniform_is_what_many_points_give(low, high):
    x = np.linspace(low, high, 200_001)
    y = np.maximum(x, 0)
    mapped = (x - x.mean()) * y.std() / x.std()
    distance = math.sqrt(np.mean((np.sort(mapped) - np.sort(y - y.mean())) ** 2))
    bound = math.sqrt(2) * y.std()
    expected = (distance, bound, 1 - distance / bound)
    assert relu_on_uniform(low, high) == pytest.approx(expected, abs=1e-4)


def test_powers_have_the_scores_of_the_slides(tmp_path):
    study, runs = study_of("polynomials", tmp_path)
    findings = study.analyse(runs)
    table = findings.tables["Affinity of powers"]
    assert table.here.round(2).tolist() == table.published.tolist()
    assert table.here.tolist() == pytest.approx([in_theory(k) for k in table.order], abs=3e-3)
    assert answers(study, runs) == [True] * 7
    # Another measure: no number agrees, and the order does.
    assert answers(study, changed(runs, lambda value: value - 0.02)) == [False] * 6 + [True]
    assert answers(study, changed(runs, lambda value: 1 - value))[-1] is False


def test_relu_on_windows_has_the_scores_of_the_notebook(tmp_path):
    study, runs = study_of("relu-domain", tmp_path)
    *published, rises, constant = answers(study, runs)
    assert (published, rises, constant) == ([True] * 5, True, False)
    moved = changed(runs, lambda value: value * 0.8)
    assert answers(study, moved)[1:6] == [False] * 5


def test_with_one_draw_a_window_cannot_tell(tmp_path):
    study, runs = study_of("relu-domain", tmp_path, seeds=(0,))
    assert answers(study, runs)[:5] == [None] * 5


def test_relus_asymmetry_comes_from_the_spread_of_its_output(tmp_path):
    study, runs = study_of("asymmetry", tmp_path)
    assert answers(study, runs) == [True] * 5
    table = study.analyse(runs).tables["ReLU on [-a, -a + 5]"]
    assert (table.score - table["score, closed form"]).abs().max() < 3e-3
    same, _, symmetric, _, near = answers(study, changed(runs, lambda value: 0.5 + value / 2))
    assert (same, symmetric, near) == (False, True, False)
