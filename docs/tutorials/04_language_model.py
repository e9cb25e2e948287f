"""
The blocks of a language model
==============================

A small language model of bytes is trained on the sources of Python's standard library, for a few
seconds. How much of what its blocks do to the tokens is affine?
"""

import json
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import nlbench

LENGTH, WIDTH = 64, 64


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 256, 0.0, "gelu", batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        x = self.tokens(tokens) + self.positions.weight
        return self.head(self.blocks(x, mask=mask, is_causal=True))


text = b"".join(path.read_bytes() for path in sorted(Path(json.__file__).parent.glob("*.py")))
data = torch.tensor(list(text))[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
torch.manual_seed(0)
model = LanguageModel()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(40):
    batch = data[torch.randint(len(data), (32,))]
    loss = cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"{loss.item():.2f} nats a byte")

# %%
# ``sites.of=blocks`` finds the blocks by their structure; values are computed over tokens, and
# folds are whole sequences. ``linearity`` of a block is near 1 wherever its branch adds little to
# the stream. So look at ``branch_value``: the fraction of what the block adds that an affine map
# of its input predicts.

settings = {"sites.of": "blocks"}
run = nlbench.evaluate(model, data[:256], ["linearity", "influence"], settings=settings)
rows = run.scores.query("place != '' and statistic in ('value', 'branch_value', 'top_share')")
rows.pivot(index="place", columns=["measure", "statistic"], values="value").round(3)

# %%
# A score is a ratio of squares: where few tokens hold most of them (``top_share``), these
# determine it.

run.plot("linearity")
