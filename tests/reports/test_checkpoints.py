"""Checkpoints of a training: their names and their order."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from made_scores import Replicates, page_content, scores_of
from torch import nn

import nlbench
from nlbench.reports.checkpoints import Checkpoint, parse_checkpoint, split_seed
from nlbench.reports.compare import compare_runs
from nlbench.reports.findings import findings
from nlbench.reports.leaderboard import is_training, leaderboard
from nlbench.reports.page import render_page
from nlbench.reports.training import change_table, training_runs


@pytest.fixture
def training(conftest):
    """Checkpoints of three seeds, of which one place changes most."""

    def build(epochs=(0, 2, 10), seeds=(0, 1, 2), name="mlp-seed{seed}/epoch{epoch}.pt"):
        rows = []
        for epoch in epochs:
            for seed in seeds:
                noise = np.random.default_rng(seed).normal(0, 0.005)
                subject = ("mlp", name.format(seed=seed, epoch=epoch), "digits", 0)
                sites = {"net.1": 0.95 + noise, "net.3": 0.91 - 0.017 * epoch + noise,
                         "net.5": 0.9 - 0.001 * epoch + noise}  # fmt: skip
                rows += conftest.cell_rows(subject, "affinity", sites)
                paths = {f"path{i}": 2.0 + i + epoch for i in range(4)}
                rows += conftest.cell_rows(subject, "absdev", paths)
        table = conftest.frame(rows)
        manifest = conftest.manifest_of(table, ("affinity", "absdev"))
        return conftest.FakeRun("training", None, table, manifest)

    return build


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("epoch0002.safetensors", ("", "epoch", 2)),
        ("noisy-seed1.training/epoch10.pt", ("noisy", "epoch", 10)),
        ("step 500", ("", "step", 500)),
        ("checkpoint-500", ("", "step", 500)),
        ("epoch=3-step=1200.ckpt", ("", "epoch", 3)),
        ("resnet_iter_4000_seed_2.pth", ("resnet", "iteration", 4000)),
        ("120.pt", ("", "step", 120)),
    ],
)
def test_steps_are_parsed(name, expected):
    assert parse_checkpoint(name) == Checkpoint(*expected)


@pytest.mark.parametrize("name", ["init", "trained", "best.pt", "epoch0.5", "omega0.003", "v2.pt"])
def test_other_names_have_no_step(name):
    assert parse_checkpoint(name) is None


def test_seed_is_parsed_as_separate_word():
    assert split_seed("random-0.5-seed10") == ("random-0.5", 10)
    assert split_seed("reseed3") == ("reseed3", None)


def test_checkpoints_are_in_the_order_of_steps(training):
    run = training(epochs=(10, 2, 0))
    rows = leaderboard(scores_of(run.scores, run.manifest["measures"]))
    assert [row.label for row in rows] == ["mlp · epoch 0", "mlp · epoch 2", "mlp · epoch 10"]
    assert is_training(rows)
    assert [len(row.subjects) for row in rows] == [3, 3, 3]
    values = [row.entries["affinity"].value for row in rows]
    assert values == sorted(values, reverse=True)


def test_one_seed_twice_is_not_folded(conftest):
    rows = []
    for seed in (0, 1):  # one training, on two samples
        subject = ("mlp", "clean-seed3.pt", "digits", seed)
        rows += conftest.cell_rows(subject, "affinity", {"net.1": 0.9 + 0.01 * seed})
    scores = scores_of(conftest.frame(rows))
    assert [len(row.subjects) for row in leaderboard(scores)] == [1, 1]


def test_checkpoint_pages_open_with_the_largest_change(training):
    run = training()
    measures = run.manifest["measures"]
    scores = scores_of(run.scores, measures)
    rows = leaderboard(scores)
    first, second, *rest = findings(rows, scores, [], {})
    assert first.startswith("By affinity, net.3 changed most (−0.17")
    assert "between epoch 0 and epoch 10; 2 of 3 layers changed." in first
    assert second.startswith("The whole network changed in affinity (")
    assert rest == []


def test_changes_are_paired_by_seed(training):
    run = training()
    measures = run.manifest["measures"]
    scores = scores_of(run.scores, measures)
    [found] = training_runs(leaderboard(scores))
    whole = found.changes(scores)["affinity"]
    top = whole.most_changed
    # The noise of a seed is the same at all steps, so that it is no part of a difference.
    assert (top.place, top.first.unit) == ("net.3", "3 seeds")
    assert top.change == pytest.approx(-0.17)
    assert top.error == pytest.approx(0, abs=1e-9)
    assert top.is_significant
    assert whole.change == pytest.approx(-0.06)
    assert [d.place for d in found.changes(scores)["absdev"].places] == []


def test_changes_alike_within_errors_have_no_largest(conftest):
    rows = []
    for epoch in (0, 1):
        for seed in (0, 1, 2):
            subject = ("mlp", f"mlp-seed{seed}/epoch{epoch}.pt", "digits", 0)
            sites = {"net.1": 0.9 - epoch * (0.21 + 0.02 * seed),
                     "net.3": 0.9 - epoch * (0.26 - 0.02 * seed)}  # fmt: skip
            rows += conftest.cell_rows(subject, "affinity", sites)
    scores = scores_of(
        conftest.frame(rows), conftest.manifest_of(conftest.frame(rows), ["affinity"])["measures"]
    )
    board = leaderboard(scores)
    first, *_ = findings(board, scores, [], {})
    expected = (
        "By affinity, 2 of 2 layers changed between epoch 0 and epoch 1; largest: net.3 (−0.24"
    )
    assert first.startswith(expected)
    assert training_runs(board)[0].changes(scores)["affinity"].most_changed is None


def test_one_seed_without_replicates_has_no_error(training):
    run = training(seeds=(4,))
    measures = run.manifest["measures"]
    scores = scores_of(run.scores, measures)
    [found] = training_runs(leaderboard(scores))
    changes = found.changes(scores)
    assert math.isnan(changes["affinity"].error)
    assert changes["affinity"].verdict == "unknown"
    assert len(change_table(changes).rows) == 1 + 2 + 1  # net.1 did not change


def test_one_seed_is_paired_over_its_samples(training):
    run = training(seeds=(4,))
    random = np.random.default_rng(0)
    noise = random.normal(0, 0.05, 8)
    known = {}
    for row in run.scores.query("measure == 'affinity'").itertuples():
        if row.statistic == "value":
            key = (row.model, row.weights, row.data, row.seed, "affinity")
            cell = known.setdefault(key, Replicates((), {}, "same"))
            numbers = tuple(row.value + noise + random.normal(0, 1e-5, 8))
            if row.place:
                cell.places[row.place] = numbers
            else:
                known[key] = Replicates(numbers, cell.places, "same")
    measures = run.manifest["measures"]
    scores = scores_of(run.scores, measures, known)
    [found] = training_runs(leaderboard(scores))
    whole = found.changes(scores)["affinity"]
    assert whole.first.error > 0.05 > 1e-3 > whole.error > 0
    assert [d.place for d in whole.places if d.is_significant] == ["net.3", "net.5"]
    assert whole.verdict == "yes; 2 of 3 layers"


def test_trainings_of_one_page_are_apart(training):
    runs = [training(name=f"{name}-seed{{seed}}/epoch{{epoch}}.pt") for name in ("clean", "noisy")]
    table = pd.concat([run.scores for run in runs])
    scores = scores_of(table, runs[0].manifest["measures"])
    found = training_runs(leaderboard(scores))
    assert [training.label for training in found] == ["clean", "noisy"]
    assert [len(training.rows) for training in found] == [3, 3]


def test_the_page_draws_curves_and_lists_changes(training):
    html = render_page([training()])
    assert 'id="curves"' in html
    assert "<td>net.3</td>" in html or ">net.3</th>" in html
    content = page_content(html)
    [packed] = content["trainings"]
    assert packed["steps"] == [0, 2, 10]
    assert packed["top"]["affinity"] == "net.3"


def test_two_trainings_are_compared_by_step():
    model, inputs = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.randn(32, 3)
    clean, noisy = (
        nlbench.evaluate({f"{name}-seed1 epoch {e}": model for e in epochs}, inputs, ["cka"])
        for name, epochs in (("clean", (0, 2)), ("noisy", (0, 10)))
    )
    comparison = compare_runs(clean, noisy)
    [difference] = comparison.differences
    assert "clean-seed1 epoch 0 →" in difference.subject
    assert difference.subject.endswith("noisy-seed1 epoch 0")
    assert difference.change == 0
    assert len(comparison.alone) == 2
