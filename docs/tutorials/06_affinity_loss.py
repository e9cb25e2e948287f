"""
Training with affinity in the loss
==================================

``affinity_score`` is differentiable. Here a network is trained three times: as usual, with −ρ
added to the loss, which keeps activations near affine maps, and with +ρ/4, which drives them
away.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from nlbench.measures.affinity import affinity_score

images, labels = load_digits(return_X_y=True)
inputs, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)


def train(weight, steps=40):
    torch.manual_seed(0)
    first, last = nn.Linear(64, 32), nn.Linear(32, 10)
    optimizer = torch.optim.Adam([*first.parameters(), *last.parameters()], lr=5e-3)
    scores, correct = [], []
    for step in range(steps):
        batch = torch.arange(128) + 128 * (step % 10)
        hidden = first(inputs[batch])
        score = affinity_score(hidden, hidden.relu())
        logits = last(hidden.relu())
        loss = cross_entropy(logits, labels[batch]) + weight * score
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scores.append(score.item())
        correct.append((logits.argmax(1) == labels[batch]).double().mean().item())
    return scores, correct


figure, axes = plt.subplots(1, 2, sharex=True, figsize=(8, 3), layout="constrained")
for label, weight in (("cross-entropy", 0), ("− ρ", -1), ("+ ρ / 4", 0.25)):
    scores, correct = train(weight)
    axes[0].plot(scores, label=label)
    axes[1].plot(correct, label=label)
axes[0].set(xlabel="step", ylabel="affinity ρ of the ReLU")
axes[1].set(xlabel="step", ylabel="accuracy on the batch")
axes[0].legend()
figure

# %%
# Compare scores of batches of one size: a small last batch has another bias. :doc:`/regularizer`
# has the figures of longer training runs, and what happens when ReLUs die.
