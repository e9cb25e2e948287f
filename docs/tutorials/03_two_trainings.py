"""
Comparing two trainings
=======================

One network is trained twice: on correct labels, and with 40 % of them wrong.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import nlbench

images, labels = load_digits(return_X_y=True)
inputs, labels = torch.tensor(images[:600] / 16).float(), torch.tensor(labels[:600])


def train(targets, epochs=120):
    torch.manual_seed(0)
    layers = nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    network = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(targets)).split(100):
            optimizer.zero_grad()
            cross_entropy(network(inputs[batch]), targets[batch]).backward()
            optimizer.step()
    return network


torch.manual_seed(1)
wrong = (labels + torch.randint(1, 10, labels.shape)) % 10
noisy = torch.where(torch.rand(len(labels)) < 0.4, wrong, labels)
settings = {"lines.paths": "pairs", "lines.number": 16, "absdev.normalize": "range"}
measures = ["affinity", "r2", "absdev", "density"]
clean_run, noisy_run = (
    nlbench.evaluate(train(targets), inputs[:256], measures, settings=settings, name="mlp")
    for targets in (labels, noisy)
)

# %%
# Differences have errors and intervals, paired by sample and by path.

comparison = nlbench.compare(clean_run, noisy_run)
comparison.frame()

# %%
# The network that has learnt the wrong labels departs further from straight lines between samples,
# and crosses more regions. The values on each path:

noisy_run.plot("absdev")
