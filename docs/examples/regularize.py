"""Train a small network with the affinity score as a regulariser, in both directions.

A network of two hidden layers learns the handwritten digits that come with scikit-learn.
To the cross-entropy is added nothing, -ρ (toward linear) or +ρ / 2 (toward nonlinear),
where ρ is the mean affinity of the two ReLUs on the batch. Writes ``regularize.png`` and
``regularize.json`` beside this file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from nlbench.measures.affinity import affinity_score

WEIGHTS = {"none": 0.0, "toward linear": -1.0, "toward nonlinear": 0.5}
TEST, BATCH, WIDTH, LEARNING_RATE = 500, 128, 64, 2e-3


class Network(nn.Module):
    """Two hidden layers of ReLUs, which also give their affinity on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (n, 10), and the mean affinity of both activations."""
        before = self.first(images)
        hidden = before.relu()
        between = self.second(hidden)
        deep = between.relu()
        scores = torch.stack([affinity_score(before, hidden), affinity_score(between, deep)])
        return self.last(deep), scores.mean()


def train(weight: float, seed: int, epochs: int) -> list[dict[str, float]]:
    """Test accuracy and affinity before training and after each epoch."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(images))
    inputs = torch.tensor(images[order] / 16, dtype=torch.float32)
    targets = torch.tensor(labels[order])
    torch.manual_seed(seed)
    network = Network()
    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    history = [tested(network, inputs[:TEST], targets[:TEST])]
    for _ in range(epochs):
        # The last batch of a few samples is left out: it would have a score of its own kind.
        for batch in (torch.randperm(len(inputs) - TEST) + TEST).split(BATCH)[:-1]:
            logits, affinity = network(inputs[batch])
            loss = cross_entropy(logits, targets[batch]) + weight * affinity
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        history.append(tested(network, inputs[:TEST], targets[:TEST]))
    return history


@torch.no_grad()
def tested(network: Network, inputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Accuracy and affinity on samples that are not trained on."""
    logits, affinity = network(inputs)
    accuracy = (logits.argmax(1) == targets).double().mean()
    return {"affinity": affinity.item(), "accuracy": accuracy.item()}


def draw(histories: dict[str, list[list[dict[str, float]]]], path: Path) -> None:
    """Mean over seeds as a line, from the smallest to the largest as a band."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, what in zip(figure.subplots(1, 2), ("affinity", "accuracy"), strict=True):
        for name, runs in histories.items():
            values = np.array([[epoch[what] for epoch in run] for run in runs])
            epochs = np.arange(values.shape[1])
            axes.plot(epochs, values.mean(0), label=name)
            axes.fill_between(epochs, values.min(0), values.max(0), alpha=0.2)
        axes.set_xlabel("epoch")
        axes.set_ylabel(f"test {what}")
    figure.axes[0].legend(title="regularised")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train, write the numbers and the figure, print the end of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    given = parser.parse_args()
    histories = {
        name: [train(weight, seed, given.epochs) for seed in range(given.seeds)]
        for name, weight in WEIGHTS.items()
    }
    for name, runs in histories.items():
        ends = {what: [run[-1][what] for run in runs] for what in ("affinity", "accuracy")}
        print(name.ljust(18), *(f"{k} {np.mean(v):.3f} ± {np.std(v):.3f}" for k, v in ends.items()))
    draw(histories, given.out / "regularize.png")
    (given.out / "regularize.json").write_text(json.dumps(histories, indent=1) + "\n")


if __name__ == "__main__":
    main()
