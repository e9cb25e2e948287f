"""Claims of studies that need no trained networks."""

import numpy as np
import pandas as pd
import pytest
from paths_of_networks import record, run_of
from scipy import stats

from nlbench.studies.activations import CENTRED_WIDTHS, SHAPES, _compare_centred
from nlbench.studies.asymmetry import _independent_verdict, _measure_independent
from nlbench.studies.definitions import _compare_sampling
from nlbench.studies.framework import Context
from nlbench.studies.shared.single_functions import normal_score


def test_independent_numbers_score_one_against_the_claim(tmp_path):
    run = _measure_independent(Context(tmp_path, "asymmetry"))
    verdict = _independent_verdict(run)
    assert verdict.word == "no"
    values = {r.measure.name: r.result.summary["value"] for r in run.records}
    # Both sides are the same numbers in another order.
    assert values["affinity"] == pytest.approx(1)
    assert values["r2"] < 0.005


def by_shape(*rows):
    return pd.DataFrame(
        [
            (width, name, value)
            for width, values in zip(CENTRED_WIDTHS, rows, strict=True)
            for name, value in zip(SHAPES, values, strict=True)
        ],
        columns=["width", "function", "value"],
    )


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ([(0.5, 0.6, 0.7)] * 3, "yes"),
        ([(0.8, 0.6, 0.7)] * 3, "no"),
        ([(0.6, 0.8, 0.9), (0.6, 0.7, 0.8), (0.6, 0.5, 0.7)], "can't tell"),
    ],
)
def test_shapes_are_compared_at_every_width(rows, word):
    assert _compare_centred(by_shape(*rows)).word == word


def test_relu_is_not_most_nonlinear_of_wide_inputs():
    # tanh of very wide inputs is a sign, whose correlation with its input is √(2/π).
    step = 1 - np.sqrt(1 - np.sqrt(2 / np.pi))
    x = stats.norm.ppf((np.arange(20_000) + 0.5) / 20_000)
    assert np.corrcoef(x, np.tanh(1e6 * x))[0, 1] == pytest.approx(np.sqrt(2 / np.pi), abs=1e-3)
    assert step < normal_score("relu") < normal_score("tanh") < normal_score("sigmoid")


def test_sampling_that_finds_all_boundaries_misses_none():
    def runs(found):
        made = record("density", "clean", 0, [], summary=found)
        return {"vgg8": run_of([made]), "sampled100": run_of([made])}

    assert _compare_sampling(runs(499.0), 1000).word == "yes"
    assert "50.0% at 100 steps" in _compare_sampling(runs(499.5), 1000).ours
    assert _compare_sampling(runs(999.0), 1000).word == "no"
