"""Train a small network with the affinity score as a regulariser, in both directions.

A network of two hidden layers learns the handwritten digits that come with scikit-learn.
The loss is the cross-entropy alone, or with -ρ (toward linear) or +ρ / 2 (toward nonlinear) added,
where ρ is the mean affinity of the two ReLUs on the batch. Writes ``regularize.png`` and
``regularize.json`` to this file's folder.
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
TEST_SAMPLES, BATCH_SIZE, WIDTH, LEARNING_RATE = 500, 128, 64, 2e-3


class Network(nn.Module):
    """Two hidden layers of ReLUs, whose mean affinity on the batch is returned as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Compute logits (n, 10), and the mean affinity of both activations."""
        before = self.first(images)
        hidden = before.relu()
        between = self.second(hidden)
        deep = between.relu()
        scores = torch.stack([affinity_score(before, hidden), affinity_score(between, deep)])
        return self.last(deep), scores.mean()


def train(weight: float, seed: int, epochs: int) -> list[dict[str, float]]:
    """Train a network; return test accuracy and affinity before training and after each epoch."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(images))
    inputs = torch.tensor(images[order] / 16, dtype=torch.float32)
    targets = torch.tensor(labels[order])
    torch.manual_seed(seed)
    network = Network()
    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    test = inputs[:TEST_SAMPLES], targets[:TEST_SAMPLES]
    history = [evaluate(network, *test)]
    for _ in range(epochs):
        # Without the small last batch, whose score would have another bias.
        order = TEST_SAMPLES + torch.randperm(len(inputs) - TEST_SAMPLES)
        for batch in order.split(BATCH_SIZE)[:-1]:
            logits, affinity = network(inputs[batch])
            loss = cross_entropy(logits, targets[batch]) + weight * affinity
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        history.append(evaluate(network, *test))
    return history


@torch.no_grad()
def evaluate(network: Network, inputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Compute accuracy and affinity on test samples."""
    logits, affinity = network(inputs)
    accuracy = (logits.argmax(1) == targets).double().mean()
    return {"affinity": affinity.item(), "accuracy": accuracy.item()}


def draw(histories: dict[str, list[list[dict[str, float]]]], path: Path) -> None:
    """Plot the mean over seeds as a line, and the range over seeds as a band."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, metric in zip(figure.subplots(1, 2), ("affinity", "accuracy"), strict=True):
        for name, runs in histories.items():
            values = np.array([[epoch[metric] for epoch in run] for run in runs])
            epochs = np.arange(values.shape[1])
            axes.plot(epochs, values.mean(0), label=name)
            axes.fill_between(epochs, values.min(0), values.max(0), alpha=0.2)
        axes.set_xlabel("epoch")
        axes.set_ylabel(f"test {metric}")
    figure.axes[0].legend(title="regularised")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train, write the numbers and the figure, and print the final values."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    histories = {
        name: [train(weight, seed, arguments.epochs) for seed in range(arguments.seeds)]
        for name, weight in WEIGHTS.items()
    }
    for name, runs in histories.items():
        last = {key: [run[-1][key] for run in runs] for key in ("affinity", "accuracy")}
        print(name.ljust(18), *(f"{k} {np.mean(v):.3f} ± {np.std(v):.3f}" for k, v in last.items()))
    draw(histories, arguments.out / "regularize.png")
    (arguments.out / "regularize.json").write_text(json.dumps(histories, indent=1) + "\n")


if __name__ == "__main__":
    main()
