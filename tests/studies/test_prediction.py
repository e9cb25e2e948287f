"""Predictors that are planted in tables of networks."""

import numpy as np
import pandas as pd
import pytest
from paths_of_networks import run_of

from nlbench.studies.framework import Context
from nlbench.studies.prediction import (
    JACOBIAN,
    LOSS,
    NORM,
    SIZE,
    TASKS,
    Prediction,
    _associations,
    _networks,
    _verdicts,
    association,
    network_table,
)


def networks(count=40, *, signal=1.0):
    """Return networks whose gap rises with size and, by a signal, with the measure nlc."""
    random, frames = np.random.default_rng(0), []
    for task in TASKS:
        size, loss, nlc, r2, *noise = random.standard_normal((9, count))
        nlc += size
        frames.append(
            pd.DataFrame(
                {
                    "task": task,
                    "shape": range(count),
                    "activation": random.choice(["relu", "tanh"], count),
                    "gap": 2 * size + signal * (nlc - size) + 0.5 * noise[0],
                    "fragility": noise[1],
                    "nonlinear": noise[2],
                    "accuracy": 0.9,
                    "train accuracy": 1.0,
                    SIZE: size,
                    LOSS: loss,
                    NORM: noise[3],
                    JACOBIAN: noise[4],
                    "nlc": nlc,
                    "r2": r2,
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


@pytest.fixture(scope="module")
def result():
    return _associations(networks())


def test_only_planted_predictor_is_found(result):
    decided = result[result["p (Holm)"] < 0.05]
    found = set(decided[~decided.measure.isin([SIZE])].itertuples(index=False, name=None))
    assert {(row[0], row[1]) for row in found} == {("gap", "nlc")}
    verdicts = {v.claim: v for v in _verdicts(networks(), result)}
    words = [verdict.word for verdict in verdicts.values()]
    assert words == ["yes", "no", "can't tell", "yes"]
    wider = result.assign(high=result.high + 0.3)
    assert _verdicts(networks(), wider)[1].word == "can't tell"


def test_predictor_of_network_size_adds_nothing():
    table = networks(signal=0.0)
    assert association(table, "nlc", "gap", ()).low > 0.3
    assert abs(association(table, "nlc", "gap").value) < 0.15


def test_size_is_controlled_by_the_loss_alone(result):
    row = result.query("outcome == 'gap' and measure == @SIZE").iloc[0]
    assert row["τ"] == association(networks(), SIZE, "gap", (LOSS,)).value
    assert row["τ"] > 0.4


def test_activation_is_a_control():
    table = networks()
    table["nlc"] = (table.activation == "tanh") + 1e-6 * table.r2
    table["gap"] = (table.activation == "tanh") + 1e-6 * table[NORM]
    assert association(table, "nlc", "gap").value > 0.4
    given = association(table, "nlc", "gap", (SIZE, LOSS, "activation"))
    assert abs(given.value) < 0.2


def test_shapes_differ_within_activation_and_noises_are_balanced(tmp_path):
    context = Context(tmp_path, "prediction")
    for task in TASKS:
        by_model = _networks(context, task)
        assert len(by_model) == 15
        assert {len(files) for files in by_model.values()} == {4}
    requests = list(context.pending.values())
    assert len(requests) == 180
    assert sorted({r.label_noise for r in requests}) == [0, 0.1, 0.2, 0.4]
    quick = Context(tmp_path, "prediction", quick=True)
    assert len(_networks(quick, "digits")) == 3


def test_quick_study_records_what_the_analysis_needs(tmp_path, monkeypatch):
    monkeypatch.setattr("nlbench.studies.prediction.QUICK_TASKS", ("spirals",))
    monkeypatch.setattr("nlbench.studies.prediction.ACTIVATIONS", ("relu", "tanh"))
    context = Context(tmp_path, "prediction", quick=True, measures=("r2",))
    runs = Prediction().measure(context)
    table = network_table(runs)
    assert len(table) == 4
    assert (
        table[["r2", SIZE, LOSS, NORM, JACOBIAN, "fragility", "nonlinear"]].notna().all(axis=None)
    )
    assert table.gap.notna().equals(table["train accuracy"] >= 0.5)
    reliability = Prediction().analyse(runs).tables["Reliability of outcomes"]
    assert reliability.reliability.dropna().between(-1, 1).all()
    # R² falls with nonlinearity, so that its sign is changed.
    assert (table.r2 < 0).all()
    assert set(table.activation) == {"relu", "tanh"}
    assert table["shape"].value_counts().to_list() == [2, 2]
    again = network_table({name: run_of(run.records) for name, run in runs.items()})
    pd.testing.assert_frame_equal(table, again)
    findings = Prediction().analyse(runs)
    assert {verdict.word for verdict in findings.verdicts} == {"can't tell"}
