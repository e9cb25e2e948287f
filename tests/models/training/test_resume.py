from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from nlbench.errors import RequestError
from nlbench.models.training.linearisation_recipes import from_start
from nlbench.models.training.loop import read_state, train
from nlbench.models.training.recipes import Recipe
from nlbench.serialization.hashing import state_hash
from nlbench.subjects.data import Dataset


def images(n=40):
    random = torch.Generator().manual_seed(3)
    pixels = torch.rand(n, 1, 6, 6, generator=random)
    labels = torch.arange(n) % 3
    pixels[torch.arange(n), 0, labels, labels] += 1
    split = TensorDataset(pixels.clamp(0, 1), labels)
    return Dataset("images", split, split, (1, 6, 6), 3, (0.5,), (0.3,), "none")


def network():
    """With batch norm, dropout and ReLU: buffers and randomness that a state has to hold."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3),
        nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip


BASE = Recipe("r", 6, batch_size=16, learning_rate=0.05, shift=2, flip=True, label_noise=0.1)


class Stop(Exception):
    pass


def interrupted(recipe, state, at_epoch):
    """Train until an epoch has ended, and stop there as Ctrl-C would."""

    def stop(epoch):
        if epoch.number == at_epoch:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(network, images(), recipe, seed=5, state=state, progress=stop)


@pytest.mark.parametrize(
    ("recipe", "at_epoch"),
    [
        (BASE, 1),
        (replace(BASE, optimizer="adam", learning_rate=0.01), 4),
        (replace(BASE, optimizer="adamw", schedule="cosine", weight_decay=0.1), 1),
        (replace(BASE, warmup_steps=10, decay=0.5, decay_every=2), 4),
        (replace(from_start, epochs=6, batch_size=8, omega=0.05, shift=1), 1),
    ],
    ids=["sgd", "adam", "adamw-cosine", "warm-up", "linearising"],
)
def test_resumed_training_has_the_same_weights(recipe, at_epoch, tmp_path):
    whole = train(network, images(), recipe, seed=5)
    interrupted(recipe, tmp_path / "state", at_epoch)
    resumed = train(network, images(), recipe, seed=5, state=tmp_path / "state")
    assert state_hash(resumed.model) == state_hash(whole.model)
    assert resumed.history == whole.history
    assert resumed.scores == whole.scores


def test_an_interrupted_epoch_is_repeated(tmp_path):
    class Fragile(nn.Module):
        def __init__(self, calls):
            super().__init__()
            self.inner = network()
            self.left = calls

        def forward(self, x):
            self.left -= self.training
            if self.left < 0:
                raise Stop
            return self.inner(x)

    whole = train(lambda: Fragile(10**9), images(), BASE, seed=2)
    state = tmp_path / "state"
    with pytest.raises(Stop):
        train(lambda: Fragile(3 * 3 + 1), images(), BASE, seed=2, state=state)
    resumed = train(lambda: Fragile(10**9), images(), BASE, seed=2, state=state)
    assert state_hash(resumed.model) == state_hash(whole.model)


def test_interruption_in_the_first_epoch_leaves_no_state(tmp_path):
    def broken():
        raise Stop

    with pytest.raises(Stop):
        train(broken, images(), BASE, state=tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_finished_state_returns_its_result(tmp_path):
    state = tmp_path / "state"
    first = train(network, images(), replace(BASE, epochs=1), state=state)
    again = train(network, images(), replace(BASE, epochs=1), state=state)
    assert again.history == first.history
    assert state_hash(again.model) == state_hash(first.model)


def test_state_without_running_accuracy_loads(tmp_path):
    whole = train(network, images(), BASE, seed=5)
    state = tmp_path / "state"
    interrupted(BASE, state, 2)
    content = torch.load(state, weights_only=True)
    for epoch in content["history"]:
        del epoch["running_accuracy"]
        epoch["train_accuracy"] = 0.5
    torch.save(content, state)
    resumed = train(network, images(), BASE, seed=5, state=state)
    assert state_hash(resumed.model) == state_hash(whole.model)
    assert [epoch.running_accuracy is None for epoch in resumed.history] == [True] * 2 + [False] * 4


def test_resuming_reports_the_earlier_epochs_first(tmp_path):
    interrupted(BASE, tmp_path / "state", 3)
    heard = []
    train(network, images(), BASE, seed=5, state=tmp_path / "state", progress=heard.append)
    assert [epoch.number for epoch in heard] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"recipe": replace(BASE, learning_rate=0.1)}, "learning_rate"),
        ({"seed": 6}, "seed"),
        ({"recipe": replace(BASE, label_noise=0.5)}, "label_noise"),
    ],
)
def test_the_state_of_another_training_is_refused(changes, name, tmp_path):
    interrupted(BASE, tmp_path / "state", 2)
    arguments = {"recipe": BASE, "seed": 5, **changes}
    with pytest.raises(RequestError, match=name):
        train(network, images(), state=tmp_path / "state", **arguments)


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04 cut short", b"\x80\x02."])
def test_a_damaged_state_is_refused_in_one_line(content, tmp_path):
    file = tmp_path / "state"
    file.write_bytes(content)
    with pytest.raises(RequestError) as error:
        read_state(file, {})
    assert "\n" not in str(error.value)


def test_state_that_would_run_code_is_not_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return (exec, ("raise SystemExit('run')",))

    file = tmp_path / "state"
    torch.save({"format": 1, "identity": Trap()}, file)
    with pytest.raises(RequestError):
        read_state(file, {})
