"""Studies with ``--data`` use the chosen dataset: here a few files in CIFAR-10's format."""

import pickle

import numpy as np
import pytest

from nlbench import registry
from nlbench.studies.framework import Context
from nlbench.studies.shared import linear_regions


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    random = np.random.RandomState(0)
    folder = tmp_path / "data" / "cifar10"
    folder.mkdir(parents=True)
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        batch = {
            "labels": random.randint(0, 10, 8).tolist(),
            "data": random.randint(0, 256, (8, 3072)).astype(np.uint8),
        }
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    monkeypatch.setenv("NLBENCH_DATA", str(tmp_path / "data"))
    few = {"lines.number": 1, "lines.anchors": 2, "lines.tolerance": 0.1}
    monkeypatch.setattr(linear_regions, "LINES", few)


@pytest.mark.parametrize("name", ["batch-size", "noise"])
def test_a_study_runs_on_other_images(pictures, tmp_path, name):
    study = registry.load("studies", name)()
    runs = study.measure(Context(tmp_path, name, quick=True, data="cifar10"))
    records = [record for run in runs.values() for record in run.records]
    assert {record.subject.data for record in records} == {"cifar10"}
    assert {record.result.status for record in records} == {"ok"}
    trained = [made for r in records if (made := r.subject.weights_metadata)]
    assert {made["data"] for made in trained} == {"cifar10"}
    assert study.analyse(runs).verdicts
