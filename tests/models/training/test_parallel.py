"""Trainings side by side come to the same as one after the other."""

import contextlib

import psutil
import pytest
import torch

from nlbench.errors import NlbenchError, NotFinite, RequestError
from nlbench.execution.supervisor import keep_workers
from nlbench.models.training import parallel
from nlbench.models.training.parallel import train_networks
from nlbench.models.training.training_request import TrainingRequest
from nlbench.progress import ProgressMonitor

TINY = {
    "model": "ladders/mlp-relu-gain2-depth3",
    "data": "curves",
    "recipe": "adam",
    "changes": {"epochs": 2, "learning_rate": 0.01},
}


class RecordingMonitor(ProgressMonitor):
    def __init__(self, after=None):
        super().__init__()
        self.steps, self.lines, self.after = [], [], after

    def step(self, what):
        self.steps.append(what)
        if len(self.steps) == self.after:
            raise KeyboardInterrupt

    def warn(self, message):
        self.lines.append(message)


def requests(folder, **changes):
    """Two networks, and one that starts from the first of them."""
    folder.mkdir(exist_ok=True)
    files = [folder / f"{name}.safetensors" for name in ("one", "other", "next")]
    given = {**TINY, **changes}
    return dict(
        zip(
            files,
            [
                TrainingRequest(**given),
                TrainingRequest(**given, seed=1),
                TrainingRequest(**TINY, weights=str(files[0])),
            ],
            strict=True,
        )
    )


def content(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}


@pytest.fixture(scope="module", autouse=True)
def others():
    """What else this process has started; the workers of this module are kept to its end."""
    others = set(psutil.Process().children())
    with keep_workers():
        yield others
    assert set(psutil.Process().children()) <= others


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serial")
    before = torch.get_num_threads()
    train_networks(requests(folder), command="c")
    assert torch.get_num_threads() == before
    return content(folder)


def test_parallel_checkpoints_match_serial_ones(tmp_path, serial):
    monitor = RecordingMonitor()
    train_networks(requests(tmp_path), workers=2, progress=monitor, command="c")
    assert content(tmp_path) == serial
    assert len(serial) == 3
    assert len(monitor.steps) == 6
    # Another time nothing is trained.
    train_networks(requests(tmp_path), workers=2, progress=monitor, command="another")
    assert len(monitor.steps) == 6
    assert content(tmp_path) == serial


@pytest.mark.parametrize("workers", [1, 2])
def test_failure_is_named_and_the_others_are_trained(tmp_path, serial, workers):
    monitor = RecordingMonitor()
    wanted = requests(tmp_path)
    first = next(iter(wanted))
    wanted[first] = TrainingRequest(**{**TINY, "changes": {"epochs": 2, "learning_rate": 1e30}})
    with pytest.raises(NotFinite, match=r"^training one") as caught:
        train_networks(wanted, workers=workers, progress=monitor, command="c")
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("; skipped because they start from failed ones: next")
    assert not monitor.lines
    assert content(tmp_path) == {"other.safetensors": serial["other.safetensors"]}


def test_interrupted_trainings_resume_and_finished_ones_stay(tmp_path, serial):
    with pytest.raises(KeyboardInterrupt):
        train_networks(
            requests(tmp_path), workers=2, progress=RecordingMonitor(after=5), command="c"
        )
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.safetensors")}
    assert kept
    train_networks(requests(tmp_path), command="c")
    assert content(tmp_path) == serial
    assert {file: file.stat().st_mtime_ns for file in kept} == kept


def test_another_training_of_the_same_name_is_refused(tmp_path, serial):
    (tmp_path / "before").mkdir()
    train_networks(requests(tmp_path / "before"))
    monitor = RecordingMonitor()
    changes = {"epochs": 3, "learning_rate": 0.01}
    with pytest.raises(RequestError):
        train_networks(requests(tmp_path / "before", changes=changes), progress=monitor)
    assert not monitor.steps


def test_a_killed_process_is_reported_with_its_network(tmp_path, others):
    class Killing(RecordingMonitor):
        def step(self, what):
            super().step(what)
            for child in set(psutil.Process().children()) - others:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()

    monitor = Killing()
    endless = requests(tmp_path, changes={"epochs": 10**6})
    with pytest.raises(NlbenchError, match=r"^training (one|other)"):
        train_networks(endless, workers=2, progress=monitor)
    assert any("the worker was killed" in line for line in monitor.lines)
    assert not any("training next: " in line for line in monitor.lines)


def test_a_dependent_training_reports_the_failed_one(tmp_path, monkeypatch):
    made = parallel.run_training

    def failing(training, file, **options):
        if file.stem == "one":
            raise error
        return made(training, file, **options)

    monkeypatch.setattr(parallel, "run_training", failing)
    monitor, error = RecordingMonitor(), RequestError("no room")
    with pytest.raises(RequestError, match=r"^training one"):
        train_networks(requests(tmp_path), progress=monitor)
    assert not monitor.lines
    # Unexpected exceptions are not caught.
    error = KeyError()
    with pytest.raises(KeyError):
        train_networks(requests(tmp_path / "again"))
