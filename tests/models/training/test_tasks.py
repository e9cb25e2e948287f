from dataclasses import replace

import pytest
import torch
from torch import nn

from nlbench.errors import NotFinite, RequestError
from nlbench.models.datasets.number_words import number_words
from nlbench.models.networks.transformer import TransformerTiny
from nlbench.models.sparsified import nonlinear_units
from nlbench.models.training.linearisation_recipes import post_training
from nlbench.models.training.loop import train
from nlbench.models.training.recipes import translation
from nlbench.models.training.tasks import get_task

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data():
    return number_words(train=60, test=20, largest=99)


class Copies(nn.Module):
    """Translates by repeating the source; its logits at a place depend on the place alone."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens = tokens

    def forward(self, tokens):
        return nn.functional.one_hot(tokens[:, 0], self.tokens).float()


def test_token_accuracy_ignores_padding(data):
    copies = Copies(data.classes)
    pairs = data.test
    right = total = 0
    for source, targets in zip(
        pairs.inputs[:, 0].tolist(), pairs.target_tokens.tolist(), strict=True
    ):
        for a, b in zip(source, targets, strict=True):
            total += b != -100
            right += b != -100 and a == b
    assert get_task(data, translation, 0).accuracy(copies, "test", CPU) == right / total


def test_the_loss_ignores_padding(data):
    task = get_task(data, translation, 0)
    wanted = data.train.target_tokens[:4]
    logits = torch.randn(*wanted.shape, data.classes, generator=torch.Generator().manual_seed(0))
    by_hand = [
        -float(logits[i, j].log_softmax(0)[token])
        for i, row in enumerate(wanted.tolist())
        for j, token in enumerate(row)
        if token != -100
    ]
    assert float(task.loss(logits, wanted)) == pytest.approx(sum(by_hand) / len(by_hand), rel=1e-5)


def test_non_translator_network_raises(data):
    task = get_task(data, translation, 0)
    with pytest.raises(RequestError):
        task.loss(torch.zeros(4, 10), data.train.target_tokens[:4])


def test_translator_accuracy_of_nan_is_an_error(data):
    network = TransformerTiny(data.classes)
    nn.init.constant_(network.logits.bias, float("nan"))
    with pytest.raises(NotFinite):
        get_task(data, translation, 0).accuracy(network, "test", CPU)


@pytest.mark.slow
def test_the_recipe_trains_a_translator():
    data = number_words(train=400, test=50, largest=499, length=14)
    recipe = replace(translation, epochs=8, batch_size=16)
    result = train(lambda: TransformerTiny(data.classes), data, recipe, seed=0)
    assert result.test_accuracy > 0.9
    assert result.scores["bleu"] > 70
    assert result.metadata["vocabulary"] == data.vocabulary.text


def test_a_transformer_is_linearised(data):
    torch.manual_seed(0)
    recipe = replace(post_training, epochs=2, omega=0.5, learning_rate=0.01)
    result = train(lambda: TransformerTiny(data.classes), data, recipe)
    assert [units for _, units in nonlinear_units(result.model).values()] == [128] * 4
    assert result.metadata["transform"] == "sparsify"
    assert "bleu" in result.scores
