from dataclasses import replace

import pytest
import torch
from torch import nn

from nlbench.errors import NotFinite, RequestError
from nlbench.models.datasets.number_words import number_words
from nlbench.models.datasets.parallel_text import END, PAD, START
from nlbench.models.networks.transformer import TransformerTiny, transformer_tiny
from nlbench.models.sparsified import nonlinear_units
from nlbench.models.sparsified.linearisation import post_training
from nlbench.models.training.loop import task_of, train
from nlbench.models.training.recipes import translation
from nlbench.models.training.translation import bleu, translate

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


class Counts(nn.Module):
    """Says the token after the one before it: only right decoding, token by token, shows it."""

    def forward(self, tokens):
        before = tokens[:, 1]
        following = torch.where(before == START, 5, before + 1)
        return nn.functional.one_hot(torch.where(following > 8, END, following), 12).float()


def test_each_token_is_decoded_from_those_decoded_before():
    found = translate(Counts(), torch.ones(3, 7, dtype=torch.long), CPU)
    assert found.tolist() == [[5, 6, 7, 8, END, PAD, PAD]] * 3


def test_a_sentence_without_an_end_fills_the_length():
    found = translate(Counts(), torch.ones(1, 3, dtype=torch.long), CPU)
    assert found.tolist() == [[5, 6, 7]]


def test_decoding_is_that_of_the_published_loop_sentence_by_sentence(data):
    torch.manual_seed(0)
    network = TransformerTiny(data.classes).eval()
    sources = data.test.inputs[:5, 0]
    with torch.no_grad():
        for source, found in zip(sources, translate(network, sources, CPU), strict=True):
            said = [START]
            while len(said) <= len(source):
                target = torch.full_like(source, PAD)
                target[: len(said)] = torch.tensor(said)
                token = int(network(torch.stack([source, target])[None])[0, len(said) - 1].argmax())
                said.append(token)
                if token == END or len(said) > len(source):
                    break
            assert found.tolist()[: len(said) - 1] == said[1:]


def test_token_accuracy_counts_tokens_and_end_marks_but_no_padding(data):
    copies = Copies(data.classes)
    pairs = data.test
    right = total = 0
    for source, wanted in zip(pairs.inputs[:, 0].tolist(), pairs.wanted.tolist(), strict=True):
        for a, b in zip(source, wanted, strict=True):
            total += b != -100
            right += b != -100 and a == b
    assert task_of(data, translation, 0.0, 0).accuracy(copies, "test", CPU) == right / total


def test_the_loss_leaves_padding_out(data):
    task = task_of(data, translation, 0.0, 0)
    wanted = data.train.wanted[:4]
    logits = torch.randn(*wanted.shape, data.classes, generator=torch.Generator().manual_seed(0))
    by_hand = [
        -float(logits[i, j].log_softmax(0)[token])
        for i, row in enumerate(wanted.tolist())
        for j, token in enumerate(row)
        if token != -100
    ]
    assert float(task.loss(logits, wanted)) == pytest.approx(sum(by_hand) / len(by_hand), rel=1e-5)


def test_a_network_that_is_no_translator_is_refused(data):
    task = task_of(data, translation, 0.0, 0)
    with pytest.raises(RequestError, match="one logit a class"):
        task.loss(torch.zeros(4, 10), data.train.wanted[:4])


def test_accuracy_of_a_translator_that_gives_nan_is_an_error(data):
    network = TransformerTiny(data.classes)
    nn.init.constant_(network.logits.bias, float("nan"))
    with pytest.raises(NotFinite, match="not finite"):
        task_of(data, translation, 0.0, 0).accuracy(network, "test", CPU)


def test_bleu_is_that_of_the_formula():
    # One sentence: precisions 5/6, 3/5, 2/4, 1/3, no brevity penalty.
    found, wanted = "the cat sat on a mat", "the cat sat on the mat"
    expected = 100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25
    assert bleu([found], [wanted]) == pytest.approx(expected)


def test_bleu_of_unknown_tokens_is_refused():
    with pytest.raises(RequestError, match="unknown tokens 'words'; there are: 13a"):
        bleu(["a"], ["a"], "words")


def test_a_place_sees_nothing_of_the_target_after_it():
    torch.manual_seed(0)
    network = TransformerTiny(20).eval()
    tokens = torch.randint(4, 20, (2, 2, 9))
    changed = tokens.clone()
    changed[:, 1, 5:] = 7
    before, after = network(tokens), network(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_padding_of_the_source_changes_nothing():
    torch.manual_seed(0)
    network = TransformerTiny(20).eval()
    tokens = torch.randint(4, 20, (2, 2, 6))
    longer = nn.functional.pad(tokens, (0, 3))
    torch.testing.assert_close(network(tokens), network(longer)[:, :6])


def test_evaluation_without_gradients_gives_what_training_gives():
    # PyTorch's fused encoder layer would apply a ReLU of its own here.
    torch.manual_seed(0)
    network = TransformerTiny(20)
    for module in network.modules():
        if isinstance(getattr(module, "activation", None), nn.ReLU):
            module.activation = nn.Tanh()
    tokens = torch.randint(4, 20, (2, 2, 6))
    expected = network.train()(tokens)
    with torch.no_grad():
        torch.testing.assert_close(network.eval()(tokens), expected)


def test_the_transformer_refuses_images():
    with pytest.raises(
        RequestError, match=r"token pairs of shape \(2, length\), not \(3, 32, 32\)"
    ):
        transformer_tiny(10, (3, 32, 32))


def test_the_transformer_has_the_parameters_that_its_sizes_give():
    attention = 4 * (64 * 64 + 64)
    feed_forward = 64 * 128 + 128 + 128 * 64 + 64
    encoder = 2 * (attention + feed_forward + 2 * 128) + 128
    decoder = 2 * (2 * attention + feed_forward + 3 * 128) + 128
    ends = 50 * 64 + 64 * 50 + 50
    found = sum(p.numel() for p in TransformerTiny(50).parameters())
    assert found == encoder + decoder + ends


@pytest.mark.slow
def test_the_recipe_leads_to_a_network_that_translates_numbers_it_never_saw():
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
