"""
Your own network in ten lines
=============================

Any ``torch.nn.Module`` and a tensor or a loader of inputs are enough. The network is left
unchanged: its mode, weights, hooks and random state.
"""

import torch
from torch import nn

import nlbench

torch.manual_seed(0)
network = nn.Sequential(
    nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5)
)
inputs = torch.randn(256, 16)
run = nlbench.evaluate(network, inputs, measures=["affinity", "r2", "nlc"], name="mine")
run.leaderboard()

# %%
# A score of the network is a mean over its activations. Each activation has its own:

run.signature("mine", "affinity").to_frame()

# %%
run.plot("affinity")

# %%
# ``run.scores`` is a tidy table, one number per row. ``statistic`` is ``value``, or what the
# measure adds to it; ``place`` is empty for the network.

run.scores.query("place == '' and statistic == 'value'")[["measure", "value", "n", "status"]]

# %%
# Several models make several rows. A mapping names them:

wider = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 5))
nlbench.evaluate({"deep": network, "wide": wider}, inputs, ["affinity", "nlc"]).leaderboard()
