"""Every form of a padding mask that reaches a block selects the same positions."""

import math

import pytest
import torch
from torch import nn

from nlbench.probes.sites.places_and_rows import RowPolicy
from nlbench.probes.sites.rows import PositionSelector


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, attention_mask=None):
        return self.linear(x)


FORMS = {
    "bool": lambda tokens: tokens,
    "int": lambda tokens: tokens.long(),
    "float": lambda tokens: tokens.float(),
    "infinite": lambda tokens: torch.zeros(tokens.shape).masked_fill(~tokens, -math.inf),
    "large": lambda tokens: torch.zeros(tokens.shape).masked_fill(~tokens, -1e4),
}


@pytest.mark.parametrize("axes", [2, 4])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_mask_selects_the_tokens(form, side, axes):
    tokens = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]).bool()
    tokens = tokens.flip(1) if side == "left" else tokens
    mask = FORMS[form](tokens)
    block, selector, selected = Block(), PositionSelector(RowPolicy()), []
    selector.begin(0, 3)
    block.linear.register_forward_hook(
        lambda module, args, output: selected.append(selector.select(output, 2))
    )
    with selector.hooked(block):
        block(torch.zeros(3, 4, 3), attention_mask=mask if axes == 2 else mask[:, None, None])
    assert torch.equal(selected[0].valid, tokens)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_mask_without_padding_leaves_nothing_out(value):
    selector = PositionSelector(RowPolicy())
    selector.begin(0, 3)
    assert selector._mask({"attention_mask": 1}, (None, torch.full((3, 4), value)), {}) is None
