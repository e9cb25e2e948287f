"""The study of linearity in the weights, on planted tables and small networks."""

import numpy as np
import pandas as pd
import pytest
import torch
from made_records import make_record
from torch import nn

import nlbench
from nlbench.measure import Result
from nlbench.models.sparsified.sparsification import linear_share, sparsify
from nlbench.store.manifest import Manifest
from nlbench.store.run import Run
from nlbench.studies.weight_linearity import (
    WeightLinearityStudy,
    _verdicts,
    comparison_measure,
    jackknife,
    linearity_table,
    slope_within,
    unfrozen,
)
from nlbench.weight_linearity import weight_linearity

OMEGAS = (0.001, 0.003, 0.01)
BEST = 0.9


def planted(slope, gap, seeds=8, spread=0.05, epochs=30):
    """Return runs in which kernel distances cost `slope`, and early networks also lose `gap`."""
    random = np.random.default_rng(0)
    records = {"networks": [], "weights": []}

    def add(mode, omega, seed, accuracy, length, kernel):
        label = f"{mode}-{omega}-{seed}"
        metadata = {"recipe": mode, "seed": str(seed), "epochs": str(epochs)}
        if omega is not None:
            metadata["omega"] = str(omega)
        subject = {"model": "m", "weights": label, "data": "d", "seed": 0}
        subject["weights_metadata"] = metadata
        for part, name, summary in (
            ("networks", "accuracy", {"value": accuracy}),
            ("networks", "pathlength", {"value": length}),
            ("networks", "linear-units", {"value": 0.3}),
            ("weights", "linearity-since-start", {"value": kernel, "kernel": kernel}),
        ):
            records[part].append(
                make_record(
                    key=f"{label}-{name}",
                    subject=subject,
                    measure={"name": name, "version": "1", "options": {}},
                    probe={"name": "function", "options": {}},
                    result=Result(summary),
                    seconds=0.0,
                    finished="",
                )
            )

    for seed in range(seeds):
        add("reference", None, seed, BEST, 7.0, 0.9)
        for mode, distance in (("post-training", 0.1), ("from-start", 0.6)):
            for step, omega in enumerate(OMEGAS):
                kernel = distance + spread * random.normal()
                length = 6 - step + 0.1 * random.normal()
                accuracy = BEST - slope * kernel - gap * (mode == "from-start")
                add(mode, omega, seed, accuracy, length, kernel)
    return {part: Run(Manifest().describe_records(rows), rows) for part, rows in records.items()}


def words(runs):
    return [verdict.word for verdict in _verdicts(linearity_table(runs))]


@pytest.mark.parametrize(
    ("slope", "gap", "answers"),
    [(0.2, 0.0, ["yes", "yes"]), (0.0, 0.1, ["can't tell", "no"]), (0.02, 0.1, ["yes", "no"])],
)
def test_planted_explanations_are_recovered(slope, gap, answers):
    assert words(planted(slope, gap))[2:] == answers


def test_distances_are_compared_by_seed():
    assert words(planted(0.1, 0.0))[:2] == ["yes", "yes"]
    assert words(planted(0.1, 0.0, seeds=2))[:2] == ["needs 3 networks"] * 2
    assert words(planted(0.1, 0.0, seeds=1))[2:] == ["can't tell"] * 2


def test_few_epochs_decide_nothing():
    assert set(words(planted(0.2, 0.0, epochs=2))) == {"can't tell"}


def test_slope_is_within_networks_trained_alike():
    findings = WeightLinearityStudy().analyse(planted(0.3, 0.2))
    assert len(findings.verdicts) == 4
    assert slope_within(findings.tables["Networks"]) == pytest.approx(-0.3)


def test_interval_of_a_mean_is_student_s():
    values = np.array([0.3, 1.4, 2.2, 0.9])
    table = pd.DataFrame({"seed": range(4), "value": values})
    low, high = jackknife(table, lambda rows: rows.value.mean())
    half = 3.182446 * values.std(ddof=1) / 2
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), rel=1e-4)


def test_unfrozen_networks_have_equal_outputs():
    model = sparsify(nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)))
    with torch.no_grad():
        model[1].weight.fill_(0.4)
    model[1].frozen[::2] = True
    copy, inputs = unfrozen(model), torch.randn(16, 3)
    assert torch.equal(copy(inputs), model(inputs))
    assert not copy[1].frozen.any()
    assert linear_share(copy) == linear_share(model) == 0.5


def test_networks_are_compared_with_their_start():
    torch.manual_seed(0)
    start, end = (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(2))
    inputs = torch.randn(24, 3)
    run = nlbench.evaluate(end, inputs, [comparison_measure({id(end): start})], errors="none")
    expected = weight_linearity(start, end, inputs)
    (record,) = run.records
    assert record.result.n == 24
    assert record.result.summary["value"] == pytest.approx(expected.value)
