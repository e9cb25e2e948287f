import math
import os
from dataclasses import replace

import pytest
import torch
from accuracies import accuracy
from torch import nn
from torch.utils.data import TensorDataset

from nlbench.errors import NotFinite, RequestError
from nlbench.models.datasets.digits import digits
from nlbench.models.networks.vgg import vgg8
from nlbench.models.training.loop import read_state, train
from nlbench.models.training.recipes import Recipe, vanilla
from nlbench.serialization.hashing import state_hash
from nlbench.subjects.data import Dataset
from nlbench.subjects.model import model_info
from nlbench.subjects.weights import load_weights

SHIPPED = model_info(vgg8).trained["digits"]


def tiny_data(n=24):
    """Three classes of 1×2×2 images with one bright corner each."""
    random = torch.Generator().manual_seed(5)
    labels = torch.arange(n) % 3
    images = 0.2 * torch.rand(n, 1, 2, 2, generator=random)
    images.flatten(1)[torch.arange(n), labels] += 0.8
    split = TensorDataset(images, labels)
    return Dataset("tiny", split, split, (1, 2, 2), 3, (0.25,), (0.5,), "none")


def tiny_network():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))


class Answers(nn.Module):
    """Logits that are one-hot at the brightest of the first three pixels, after an offset."""

    def __init__(self, offset=0):
        super().__init__()
        self.offset = offset
        self.child = nn.Dropout()

    def forward(self, images):
        right = images.flatten(1)[:, :3].argmax(dim=1)
        return nn.functional.one_hot((right + self.offset) % 3, 3).float()


QUICK = Recipe("quick", epochs=3, batch_size=10, learning_rate=0.5)


def test_training_matches_momentum_descent_by_hand():
    data = tiny_data(4)
    recipe = Recipe(
        "r", 5, batch_size=4, learning_rate=0.5, momentum=0.9, weight_decay=0.1, warmup_steps=3
    )
    result = train(tiny_network, data, recipe, seed=7)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        start = tiny_network()[1]
    # Softmax regression by hand: the batch is the whole split, so its order is of no account.
    weights = torch.cat([start.weight, start.bias[:, None]], dim=1).detach().double()
    images, labels = data.train.tensors
    x = torch.cat([(images.flatten(1) - 0.25) / 0.5, torch.ones(4, 1)], dim=1).double()
    target = torch.eye(3).double()[labels]
    velocity = torch.zeros_like(weights)
    losses = []
    for step in range(5):
        shares = (x @ weights.T).softmax(dim=1)
        losses.append(-(target * shares.log()).sum(dim=1).mean().item())
        gradient = (shares - target).T @ x / 4 + 0.1 * weights
        velocity = 0.9 * velocity + gradient
        weights = weights - 0.5 * min(1, (step + 1) / 3) * velocity
    found = torch.cat([result.model[1].weight, result.model[1].bias[:, None]], dim=1).detach()
    torch.testing.assert_close(found.double(), weights, rtol=1e-5, atol=1e-5)
    assert [epoch.loss for epoch in result.history] == pytest.approx(losses, rel=1e-4)


def test_every_image_is_used_once_per_epoch():
    data = tiny_data(24)
    seen = []

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = tiny_network()

        def forward(self, inputs):
            if self.training:
                seen.append(inputs.flatten(1))
            return self.layer(inputs)

    train(Watched, data, replace(QUICK, epochs=2))
    assert [len(batch) for batch in seen] == [10, 10, 4] * 2
    first, second = torch.cat(seen[:3]), torch.cat(seen[3:])
    everything = data.normalize(data.train.tensors[0]).flatten(1)
    for epoch in (first, second):
        assert sorted(epoch.tolist()) == sorted(everything.tolist())
    assert not torch.equal(first, second)


def test_the_seed_decides_the_weights():
    def trained(seed):
        return state_hash(train(tiny_network, tiny_data(), QUICK, seed=seed).model)

    assert trained(0) == trained(0)
    assert trained(0) != trained(1)


@pytest.mark.parametrize("name", ["format", "identity", "history", "model", "optimizer", "shuffle"])
def test_damaged_training_state_is_refused(tmp_path, name):
    file = tmp_path / "state"
    train(tiny_network, tiny_data(), QUICK, state=file)
    state = torch.load(file, weights_only=True)
    for damaged in ({**state, name: 3}, {n: v for n, v in state.items() if n != name}):
        torch.save(damaged, file)
        with pytest.raises(RequestError, match=str(file)):
            train(tiny_network, tiny_data(), QUICK, state=file)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_pipe_as_training_state_raises(tmp_path):
    os.mkfifo(tmp_path / "state")
    with pytest.raises(RequestError):
        read_state(tmp_path / "state", {})


def test_training_preserves_the_random_state():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    train(tiny_network, tiny_data(), QUICK)
    assert torch.equal(torch.rand(1), expected)


def test_progress_receives_every_epoch():
    heard = []
    result = train(tiny_network, tiny_data(), QUICK, progress=heard.append)
    assert result.history == tuple(heard)
    assert [epoch.number for epoch in heard] == [1, 2, 3]
    assert result.test_accuracy == accuracy(result.model, "test", tiny_data())
    assert not result.model.training


@pytest.mark.parametrize(
    ("changes", "measured"),
    [
        ({}, [False, False, True]),
        ({"until_loss": 10.0}, [True]),
        ({"until_train_accuracy": 1.0, "learning_rate": 1e-9}, [True, True, True]),
        ({"until_train_accuracy": 0.01, "until_loss": 1e-9}, [False, False, True]),
        ({"until_train_accuracy": 1.0, "until_loss": 10.0, "learning_rate": 1e-9}, [True] * 3),
    ],
)
def test_training_accuracy_is_measured_where_training_may_end(changes, measured):
    history = train(tiny_network, tiny_data(), replace(QUICK, **changes)).history
    assert [epoch.train_accuracy is not None for epoch in history] == measured


def test_training_accuracy_is_that_of_the_final_network():
    result = train(tiny_network, tiny_data(), QUICK)
    assert result.train_accuracy == accuracy(result.model, "train", tiny_data())


def test_running_accuracy_is_measured_before_each_step():
    seen = []

    class Seen(nn.Linear):
        def forward(self, x):
            logits = super().forward(x)
            if self.training:
                seen.append((x.detach(), logits.detach()))
            return logits

    def build():
        return nn.Sequential(nn.Flatten(), Seen(4, 3))

    (epoch,) = train(build, tiny_data(), replace(QUICK, epochs=1)).history
    inputs, logits = (torch.cat(parts) for parts in zip(*seen, strict=True))
    # An image's label is which of its pixels is bright.
    right = (logits.argmax(dim=1) == inputs[:, :3].argmax(dim=1)).double().mean().item()
    assert len(inputs) == 24
    assert epoch.running_accuracy == pytest.approx(right)


def test_training_accuracy_counts_corrupted_labels():
    # The problem is so easy that a quarter of wrong labels doesn't matter.
    recipe = replace(QUICK, epochs=30)
    result = train(tiny_network, tiny_data(), replace(recipe, label_noise=0.25), seed=2)
    assert result.test_accuracy == 1.0
    assert result.train_accuracy == 0.75


def test_an_overflowing_loss_is_an_error():
    def explosive():
        network = tiny_network()
        nn.init.constant_(network[1].weight, 1e38)
        return nn.Sequential(network, nn.Linear(3, 3), nn.Linear(3, 3))

    with pytest.raises(NotFinite):
        train(explosive, tiny_data(), QUICK)


def test_network_without_one_logit_a_class_is_refused():
    with pytest.raises(RequestError, match=r"\(10, 10\)"):
        train(lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 10)), tiny_data(), QUICK)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_bounds_is_refused(seed):
    with pytest.raises(RequestError):
        train(tiny_network, tiny_data(), QUICK, seed=seed)


def test_accuracy_is_fraction_of_correct_answers():
    data = tiny_data(10)
    images, labels = data.test.tensors
    wrong = TensorDataset(images, torch.where(torch.arange(10) < 3, (labels + 1) % 3, labels))
    assert accuracy(Answers(), "test", data) == 1.0
    assert accuracy(Answers(1), "test", data) == 0.0
    mixed = replace(data, test=wrong)
    assert accuracy(Answers(), "test", mixed) == 0.7
    assert accuracy(Answers(), "train", mixed) == 1.0


def test_accuracy_restores_the_mode_of_modules():
    network = Answers().train()
    network.child.eval()
    accuracy(network, "test", tiny_data())
    assert network.training
    assert not network.child.training


def test_accuracy_of_nan_is_an_error():
    network = tiny_network()
    nn.init.constant_(network[1].bias, math.nan)
    with pytest.raises(NotFinite):
        accuracy(network, "test", tiny_data())


def test_accuracy_on_an_unknown_split_is_refused():
    with pytest.raises(RequestError):
        accuracy(Answers(), "validation", tiny_data())


def test_the_shipped_checkpoint_matches_its_header():
    network = vgg8()
    metadata = load_weights(network, SHIPPED)
    assert SHIPPED.stat().st_size < 1_000_000
    assert all(p.dtype == torch.float32 for p in network.parameters())
    assert {k: metadata[k] for k in ("model", "data", "recipe", "seed")} == {
        "model": "vgg8",
        "data": "digits",
        "recipe": "vanilla",
        "seed": "0",
    }
    measured = accuracy(network, "test", digits())
    assert measured == pytest.approx(float(metadata["test_accuracy"]), abs=0.002)
    assert measured > 0.97


def test_half_the_recipe_fits_most_digits():
    def perceptron():
        return nn.Sequential(nn.Flatten(), nn.Linear(3072, 32), nn.ReLU(), nn.Linear(32, 10))

    recipe = replace(vanilla, epochs=20, until_train_accuracy=0.9)
    result = train(perceptron, digits(), recipe, seed=0)
    assert result.thresholds_reached
    assert result.test_accuracy > 0.85


def test_last_incomplete_batch_is_step_of_schedule():
    # 24 samples in batches of 10: three steps an epoch, six to the full rate.
    recipe = replace(QUICK, epochs=2, warmup_steps=6)
    history = train(tiny_network, tiny_data(24), recipe).history
    assert [epoch.learning_rate for epoch in history] == pytest.approx([0.5 * 3 / 6, 0.5])
