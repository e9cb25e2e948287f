import pytest
import torch
from torch import nn

from nlbench.errors import UnsupportedOperation
from nlbench.models.networks.transformer import TransformerTiny
from nlbench.probes.graph.graph_observation import channel_graph

TOKENS = torch.randint(1, 20, (1, 5), generator=torch.Generator().manual_seed(0))


class Embedded(nn.Module):
    """Tokens, embedded, through a ReLU; what is done with them besides is a subclass's."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 4)
        self.linear = nn.Linear(4, 3)
        self.relu = nn.ReLU()
        self.other = nn.Linear(20, 3)

    def hidden(self, tokens):
        return self.relu(self.linear(self.embedding(tokens)))


class Plain(Embedded):
    def forward(self, tokens):
        return self.hidden(tokens).sum(1)


class Filled(Embedded):
    def forward(self, tokens):
        return self.hidden(tokens).masked_fill((tokens == 0)[..., None], 0.0).sum(1)


class Multiplied(Embedded):
    def forward(self, tokens):
        return (self.hidden(tokens) * (tokens != 0).unsqueeze(2).float()).sum(1)


class OneHot(Embedded):
    def forward(self, tokens):
        hot = (tokens[..., None] == torch.arange(20, device=tokens.device)).float()
        return (self.hidden(tokens) + self.other(hot)).sum(1)


class Sieve(nn.Module):
    """A ReLU in disguise."""

    def forward(self, x):
        return x * (x > 0)


class WholeSieve(nn.Module):
    def forward(self, x):
        return x * (x.long() > 0)


def shape(model, example):
    graph = channel_graph(model, example)
    return graph.inputs, [(unit.size) for unit in graph.units], len(graph.outputs)


@pytest.mark.parametrize("masked", [Filled, Multiplied])
def test_token_mask_leaves_graph_unchanged(masked):
    assert shape(masked(), TOKENS) == shape(Plain(), TOKENS)


@pytest.mark.parametrize("sieve", [Sieve, WholeSieve])
def test_a_mask_of_real_numbers_is_refused(sieve):
    with pytest.raises(UnsupportedOperation):
        channel_graph(sieve(), torch.randn(1, 3))


def test_tokens_turned_into_numbers_by_comparison_are_refused():
    with pytest.raises(UnsupportedOperation):
        channel_graph(OneHot(), TOKENS)


def test_padding_adds_no_transformer_paths():
    class Unpadded(TransformerTiny):
        def forward(self, tokens):
            source, target = tokens[:, 0], tokens[:, 1]
            later = torch.ones(6, 6, dtype=torch.bool, device=tokens.device).triu(1)
            made = self.transformer(
                self._embed(source), self._embed(target), tgt_mask=later
            )  # fmt: skip
            return self.logits(made)

    example = torch.randint(1, 20, (1, 2, 6))
    assert shape(TransformerTiny(20), example) == shape(Unpadded(20), example)
