"""Effective depth, on decoders whose blocks can be skipped by construction."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import nlbench
from nlbench.measures.effective_depth import least_depth

VOCABULARY, WIDTH, LENGTH = 11, 8, 6


class Block(nn.Module):
    """A residual block over tokens, which does nothing if its strength is 0."""

    def __init__(self, strength, turn=False):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.strength, self.turn = strength, turn

    def forward(self, x):
        return -x if self.turn else x + self.strength * self.mlp(x)


class Decoder(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def decoder(*strengths):
    torch.manual_seed(0)
    return Decoder([Block(strength) for strength in strengths])


def data(model, n=40):
    """Return tokens, and the model's own predictions as labels, some of them ignored."""
    tokens = torch.randint(VOCABULARY, (n, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = model(tokens).argmax(-1)
    labels[:, -1] = -100
    return tokens, labels


def measure(model, *, n=40, **settings):
    tokens, labels = data(model, n)
    settings = {f"effective-depth.{name}": value for name, value in settings.items()}
    run = nlbench.evaluate(model, tokens, ["effective-depth"], labels=labels, settings=settings)
    return run["effective-depth"]


def test_identity_blocks_are_not_needed():
    result = measure(decoder(0.0, 9.0, 0.0, 0.0, 9.0, 0.0), tolerance=1e-9)
    assert result.summary == {"value": 2, "last": 5, "places": 6}
    assert result.error is None  # of a whole number, which no group changes
    costs = result.parts["influence"]
    assert list(costs)[:4] == [f"layers.{index}" for index in (0, 2, 3, 5)]
    assert max(list(costs.values())[:4]) == 0
    assert list(result.parts["last"]) == [f"layers.{index}" for index in reversed(range(6))]


def test_costs_are_those_of_shorter_networks():
    model = decoder(0.5, 2.0, 0.2, 1.0)
    tokens, labels = data(model)
    result = measure(model)
    losses = []
    for count in range(5):
        x = model.embedding(tokens)
        for layer in model.layers[: 4 - count]:
            x = layer(x)
        logits = model.head(x).double().flatten(0, 1)
        losses.append(functional.cross_entropy(logits, labels.flatten()).item())
    costs = list(result.parts["last"].values())
    assert costs == pytest.approx([loss - losses[0] for loss in losses[1:]], abs=1e-6)
    order = list(result.parts["influence"])
    x = model.embedding(tokens)
    changes = {}
    for index, layer in enumerate(model.layers):
        before, x = x, layer(x)
        changes[f"layers.{index}"] = 1 - functional.cosine_similarity(before, x, dim=-1).mean()
    assert order == sorted(changes, key=changes.get)
    assert result.parts["influence"][order[-1]] == pytest.approx(costs[-1], abs=1e-6)


def test_affine_blocks_that_cancel_are_not_needed():
    # Each block flips the stream: two of them are the identity, one is not.
    model = decoder(9.0)
    model.layers.extend([Block(0.0, turn=True) for _ in range(4)])
    result = measure(model, tolerance=1e-6)
    assert result.summary["last"] == 1
    assert [cost > 1e-6 for cost in result.parts["last"].values()] == [True, False] * 2 + [True]


def test_depth_depends_on_the_tolerance():
    model = decoder(0.5, 2.0, 0.2, 1.0)
    costs = list(measure(model).parts["last"].values())
    assert min(costs) > 1e-3
    assert measure(model, tolerance=max(0.0, min(costs) - 1e-3)).summary["last"] == 4
    assert measure(model, tolerance=1e6).summary["value"] == 0
    assert least_depth([0.5, 0.1], 0.2, 4) == 2
    assert least_depth([0.5, 0.3], 0.2, 4) == 4


def test_samples_limit_what_is_measured():
    model = decoder(1.0, 0.0)
    assert measure(model).n == 40
    assert measure(model, samples=10).n == 10
    assert measure(model, n=200, samples=0).n == 200


def test_networks_without_blocks_skip_activations():
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.LeakyReLU(1.0), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)]
    model, inputs = nn.Sequential(*layers), 5 * torch.randn(32, 4)
    labels = model(inputs).argmax(1)
    settings = {"effective-depth.tolerance": 1e-9}
    run = nlbench.evaluate(model, inputs, ["effective-depth"], labels=labels, settings=settings)
    result = run["effective-depth"]
    assert list(result.parts["influence"]) == ["1", "3"]
    assert result.parts["influence"]["1"] == pytest.approx(0, abs=1e-9)
    settings["effective-depth.of"] = "blocks"
    run = nlbench.evaluate(model, inputs, ["effective-depth"], labels=labels, settings=settings)
    assert run["effective-depth"].status == "undefined"


def test_networks_without_labels_have_none():
    model = decoder(1.0, 0.0)
    run = nlbench.evaluate(model, data(model)[0], ["effective-depth"])
    assert run["effective-depth"].status != "ok"
    assert "label" in run["effective-depth"].reason


def test_blocks_that_cannot_be_skipped_leave_depth_undefined():
    class Reordering(Decoder):
        def forward(self, tokens):
            x = self.embedding(tokens)
            order = x[:, 0, 0].argsort()
            x = self.layers[1](self.layers[0](x)[order])[order.argsort()]
            return self.head(self.layers[2](x))

    result = measure(Reordering([Block(strength) for strength in (1.0, 0.0, 1.0)]))
    assert result.status == "undefined"
    assert "layers.1" in result.reason


def test_outputs_without_samples_are_undefined():
    class Total(Decoder):
        def forward(self, tokens):
            return super().forward(tokens).sum()

    model = Total([Block(1.0), Block(1.0)])
    labels = torch.zeros(40, LENGTH).long()
    run = nlbench.evaluate(model, data(decoder(1.0))[0], ["effective-depth"], labels=labels)
    assert run["effective-depth"].status == "undefined"
    assert "returns shape ()" in run["effective-depth"].reason


class Masked(Decoder):
    def forward(self, tokens, attention_mask):
        return super().forward(tokens)


def test_padding_has_no_part_in_the_cost():
    model = decoder(0.5, 2.0)
    tokens, labels = data(model)
    masked = Masked([Block(0.5), Block(2.0)])
    masked.load_state_dict(model.state_dict())
    mask = torch.arange(LENGTH) < torch.arange(40)[:, None] % 4 + 2
    results = []
    for label in (0, 3, -100):
        filled = torch.where(mask, labels, label)
        inputs = tokens, mask
        run = nlbench.evaluate(masked, inputs, ["effective-depth"], labels=filled)
        results.append(run["effective-depth"].parts)
    assert results[0] == results[1] == results[2]


def test_depth_of_probabilities_is_that_of_logits():
    class Probabilities(Decoder):
        def forward(self, tokens):
            return super().forward(tokens).softmax(-1)

    model = decoder(0.5, 2.0)
    probabilities = Probabilities([Block(0.5), Block(2.0)])
    probabilities.load_state_dict(model.state_dict())
    expected, found = (measure(each) for each in (model, probabilities))
    assert found.parts["last"] == pytest.approx(expected.parts["last"], abs=1e-5)
    assert "probabilities" in found.reason


def test_blocks_that_receive_a_mask_first_are_skipped():
    class Masked(Block):
        def forward(self, mask, x):
            return super().forward(x)

    class WithMask(Decoder):
        def forward(self, tokens):
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x[:, :, :1].expand(-1, -1, LENGTH).sigmoid(), x)
            return self.head(x)

    torch.manual_seed(0)
    masked = WithMask([Masked(strength) for strength in (0.5, 2.0, 0.2)])
    assert measure(masked).parts == measure(decoder(0.5, 2.0, 0.2)).parts
