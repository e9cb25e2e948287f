import pytest
import torch
from torch import nn

from nlbench.models.datasets.number_words import number_words
from nlbench.models.datasets.parallel_text import END, PAD, START
from nlbench.models.networks.transformer import TransformerTiny
from nlbench.models.training.tasks import bleu, translate

CPU = torch.device("cpu")


class Counts(nn.Module):
    """Predicts the successor of the previous token, which only sequential decoding shows."""

    def forward(self, tokens):
        before = tokens[:, 1]
        following = torch.where(before == START, 5, before + 1)
        return nn.functional.one_hot(torch.where(following > 8, END, following), 12).float()


def test_each_token_is_decoded_from_those_before():
    found = translate(Counts(), torch.ones(3, 7, dtype=torch.long), CPU)
    assert found.tolist() == [[5, 6, 7, 8, END, PAD, PAD]] * 3


def test_a_sentence_without_an_end_fills_the_length():
    found = translate(Counts(), torch.ones(1, 3, dtype=torch.long), CPU)
    assert found.tolist() == [[5, 6, 7]]


def test_decoding_matches_the_published_loop():
    data = number_words(train=60, test=20, largest=99)
    torch.manual_seed(0)
    network = TransformerTiny(data.classes).eval()
    sources = data.test.inputs[:5, 0]
    with torch.no_grad():
        for source, found in zip(sources, translate(network, sources, CPU), strict=True):
            decoded = [START]
            while len(decoded) <= len(source):
                target = torch.full_like(source, PAD)
                target[: len(decoded)] = torch.tensor(decoded)
                token = int(
                    network(torch.stack([source, target])[None])[0, len(decoded) - 1].argmax()
                )
                decoded.append(token)
                if token == END or len(decoded) > len(source):
                    break
            assert found.tolist()[: len(decoded) - 1] == decoded[1:]


def test_bleu_matches_the_formula():
    # One sentence: precisions 5/6, 3/5, 2/4, 1/3, no brevity penalty.
    found, wanted = "the cat sat on a mat", "the cat sat on the mat"
    expected = 100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25
    assert bleu([found], [wanted]) == pytest.approx(expected)
