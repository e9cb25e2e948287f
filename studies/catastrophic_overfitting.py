"""Measures of nonlinearity while adversarial training with single steps collapses."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nlbench.citation import Source
from nlbench.measure import Measure, Result

from .framework import Context, Findings, Runs, Study, Verdict
from .framework.figures import COLOURS, page_figure
from .framework.network_measure import network_measure
from .framework.verdicts import all_hold, in_most_networks, mean_above, range_text

if TYPE_CHECKING:
    from torch import Tensor, nn

COLLAPSING = 0.4
SAFE = 0.1
"""Perturbations that networks are trained with, of pixels in [0, 1]. They grow linearly."""
ATTACK = 0.1
"""Perturbation of the attack that robust accuracy refers to."""
ATTACK_STEPS = 10
EPOCHS = 20
GROWING_EPOCHS = 10
HIDDEN_UNITS = 128
BATCH_SIZE = 64
LEARNING_RATE = 3e-3
SAMPLES = 256
MEASURES = {"local-linearity": "value", "nlc": "value", "absdev": "over_range", "affinity": "value"}
"""Measures, and their statistics that are compared. Affinity is turned into 1 - affinity."""
NAMES = {
    "local-linearity": "The departure from the tangent",
    "nlc": "The nonlinearity coefficient",
    "absdev": "The deviation over the range of the outputs",
    "affinity": "1 − affinity",
}
PUBLISHED = "highly non-linear locally, which is the main reason why FGSM training fails"
SETTINGS: dict[str, float | str] = {
    "local-linearity.radius": ATTACK,
    "lines.paths": "pairs",
    "lines.number": 16,
    "lines.tolerance": 0.01,
}


class CatastrophicOverfitting(Study):
    """Local linearity and other measures where training with FGSM collapses."""

    question = "Do measures of nonlinearity jump where adversarial training with FGSM collapses?"
    source = Source(
        "M. Andriushchenko, N. Flammarion. Understanding and Improving Fast Adversarial Training. "
        "NeurIPS, 2020; the claim as worded in the abstract"
    )
    needs = "digits; trains 16 small networks"
    minutes = 4.0
    quick_minutes = 0.3
    takes = ("seeds",)

    def measure(self, context: Context) -> Runs:
        """Train networks with FGSM, and measure them every few epochs."""
        train = load_images("train")
        test = load_images("test")
        models: dict[str, nn.Module] = {}
        trainings: dict[int, dict[str, float]] = {}
        for seed in context.seeds_or(8):
            for epsilon in (COLLAPSING, SAFE):
                for epoch, model in train_with_fgsm(*train, epsilon, seed):
                    models[f"epsilon {epsilon:g}, seed {seed}, epoch {epoch}"] = model
                    trainings[id(model)] = {"epsilon": epsilon, "seed": seed, "epoch": epoch}
        images, labels = (side[:SAMPLES] for side in test)
        measures: list[str | type[Measure]] = [
            *MEASURES,
            robustness_measure(images, labels, trainings),
        ]
        run = context.evaluate(
            models, images, measures, "run", settings=SETTINGS, name="perceptron"
        )
        return {"run": run}

    def analyse(self, runs: Runs) -> Findings:
        """Compare the measures before and after the collapse."""
        table = checkpoint_table(runs)
        changes = change_table(table)
        return Findings(
            _verdicts(table, changes),
            {"Changes at the collapse": changes, "Checkpoints": table},
            {"Over training, seed 0": _figure(table)},
            [
                f"Perceptrons with two layers of {HIDDEN_UNITS} ReLUs on digits of 8 × 8 pixels, "
                f"trained with FGSM; ε grows for {GROWING_EPOCHS} of {EPOCHS} epochs to "
                f"{COLLAPSING:g}, or to {SAFE:g} for comparison, with the same initial weights. "
                f"Robust accuracy: under {ATTACK_STEPS} steps of PGD with ε = {ATTACK:g}.",
                "The collapse is between the epoch with the largest robust accuracy and the first "
                "one after it with less than half of it.",
            ],
        )


def load_images(split: str) -> tuple[Tensor, Tensor]:
    """Load digits as images (n, 1, 8, 8) in [0, 1], with their labels."""
    import torch

    from nlbench.subjects.data import read_items
    from nlbench.subjects.load import load_dataset

    dataset: Any = load_dataset("digits")
    items = dataset.split(split)
    inputs, labels = zip(*read_items(items, range(len(items))), strict=True)
    images = torch.nn.functional.avg_pool2d(torch.stack(inputs)[:, :1], 4)
    return images, torch.tensor(labels)


def attack(model: nn.Module, images: Tensor, labels: Tensor, epsilon: float, steps: int) -> Tensor:
    """Return images in [0, 1] within ±ε of others, after signed steps that raise the loss.

    One step of ε is FGSM; more steps, each of 2.5 ε / steps, are PGD from the images themselves.
    """
    import torch

    step = epsilon if steps == 1 else 2.5 * epsilon / steps
    attacked = images
    for _ in range(steps):
        points = attacked.detach().requires_grad_()
        with torch.enable_grad():
            loss = torch.nn.functional.cross_entropy(model(points), labels, reduction="sum")
            (gradient,) = torch.autograd.grad(loss, points)
        attacked = (attacked + step * gradient.sign()).clamp(0, 1)
        attacked = attacked.clamp(images - epsilon, images + epsilon)
    return attacked.detach()


def train_with_fgsm(
    images: Tensor, labels: Tensor, epsilon: float, seed: int
) -> Iterator[tuple[int, nn.Module]]:
    """Train a perceptron on FGSM's images, and yield a copy of it every few epochs."""
    import torch
    from torch import nn

    generator = torch.Generator().manual_seed(seed)
    widths = images[0].numel(), HIDDEN_UNITS, HIDDEN_UNITS, 10
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(widths):
        layer = nn.Linear(inputs, outputs)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)
        layers += [layer, nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    for epoch in range(1, EPOCHS + 1):
        size = epsilon * min(1.0, epoch / GROWING_EPOCHS)
        order = torch.randperm(len(images), generator=generator)
        for rows in torch.split(order, BATCH_SIZE):
            attacked = attack(model, images[rows], labels[rows], size, 1)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(attacked), labels[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if epoch % 2 == 0:
            yield epoch, copy.deepcopy(model)


def robustness_measure(
    images: Tensor, labels: Tensor, trainings: Mapping[int, Mapping[str, float]]
) -> type[Measure]:
    """Return a measure of robust accuracy, which also records a network's training.

    Parameters
    ----------
    trainings : mapping of int to mapping
        ε, seed and epoch of each network, keyed by its ``id``.
    """

    def robust_accuracy(batch: Any) -> Result:
        """Accuracy under PGD.

        ``clean`` without attack, ``fgsm`` under that of the training.
        """
        training = trainings[id(batch.model)]
        attacks = {
            "value": (ATTACK, ATTACK_STEPS),
            "clean": (0.0, 1),
            "fgsm": (training["epsilon"], 1),
        }
        summary = dict(training)
        for name, (epsilon, steps) in attacks.items():
            attacked = attack(batch.model, images, labels, epsilon, steps)
            is_correct = batch.model(attacked).argmax(1) == labels
            summary[name] = float(is_correct.double().mean())
        return Result(summary, n=len(images))

    return network_measure("robust-accuracy", robust_accuracy)


def checkpoint_table(runs: Runs) -> pd.DataFrame:
    """Return one row per network and epoch: the training, the accuracies and the measures."""
    rows: dict[str, dict[str, float]] = {}
    for record in runs["run"].records:
        row = rows.setdefault(record.subject.weights, {})
        summary = record.result.summary
        if record.measure.name == "robust-accuracy":
            row |= {"robust" if name == "value" else name: summary[name] for name in summary}
        else:
            value = summary.get(MEASURES[record.measure.name], np.nan)
            row[record.measure.name] = 1 - value if record.measure.name == "affinity" else value
    columns = ["epsilon", "seed", "epoch", "clean", "fgsm", "robust", *MEASURES]
    return pd.DataFrame(list(rows.values()))[columns].sort_values(columns[:3], ignore_index=True)


def find_collapse(robust: Sequence[float]) -> tuple[int, int] | None:
    """Return the positions of the best robust accuracy and of the first one below half of it.

    Examples
    --------
    >>> find_collapse([0.2, 0.5, 0.4, 0.1, 0.3]), find_collapse([0.2, 0.5, 0.4])
    ((1, 3), None)
    """
    best = int(np.argmax(robust))
    below = [index for index in range(best, len(robust)) if robust[index] < robust[best] / 2]
    return (best, below[0]) if below else None


def change_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return, by seed, the logarithmic change of each measure per epoch.

    ``at collapse`` and ``before`` are those of the collapsing network, ``safe`` is that of the
    other one over the same epochs as ``at collapse``. Seeds of which the other one collapses, too,
    are left out.
    """
    rows = []
    for seed, networks in table.groupby("seed"):
        collapsing, safe = (networks[networks.epsilon == e] for e in (COLLAPSING, SAFE))
        collapse = find_collapse(list(collapsing.robust))
        if collapse is None or not collapse[0] or find_collapse(list(safe.robust)):
            continue
        epochs = collapsing.epoch.to_numpy()
        best, after = collapse
        for name in MEASURES:
            logs, safe_logs = (np.log(side[name].to_numpy()) for side in (collapsing, safe))
            length = epochs[after] - epochs[best]
            rows.append(
                {
                    "seed": seed,
                    "measure": name,
                    "from epoch": epochs[best],
                    "to epoch": epochs[after],
                    "at collapse": (logs[after] - logs[best]) / length,
                    "before": (logs[best] - logs[0]) / (epochs[best] - epochs[0]),
                    "safe": (safe_logs[after] - safe_logs[best]) / length,
                }
            )
    columns = ["seed", "measure", "from epoch", "to epoch", "at collapse", "before", "safe"]
    return pd.DataFrame(rows, columns=columns)


def _verdicts(table: pd.DataFrame, changes: pd.DataFrame) -> list[Verdict]:
    collapsing = table[table.epsilon == COLLAPSING]
    seeds = collapsing.seed.nunique()
    collapsed = changes.seed.nunique()
    last = collapsing[collapsing.epoch == collapsing.epoch.max()]
    best = collapsing.groupby("seed").robust.max()
    verdicts = [
        Verdict(
            f"Training with FGSM at ε = {COLLAPSING:g} collapses",
            "catastrophic overfitting",
            f"{collapsed} of {seeds} seeds; robust accuracy at most {range_text(best)}, at the "
            f"end {range_text(last.robust)}, under FGSM itself {range_text(last.fgsm)}",
            in_most_networks([True] * collapsed + [False] * (seeds - collapsed)),
            "robust accuracy falls below half of its maximum; sign test over seeds",
        )
    ]
    claims = {
        "safe": (
            "rises with the collapse",
            "than in the network that doesn't collapse, whose ε is smaller",
        ),
        "before": ("jumps at the collapse", "than in the epochs before"),
    }
    for name, subject in NAMES.items():
        rows = changes[changes.measure == name]
        for column, (claim, others) in claims.items():
            at_collapse = rows["at collapse"]
            larger = (at_collapse > rows[column]) & (at_collapse > 0)
            verdicts.append(
                Verdict(
                    f"{subject} {claim}",
                    PUBLISHED if name == "local-linearity" and column == "safe" else "",
                    f"{_percent(rows['at collapse'])} an epoch vs. {_percent(rows[column])}; "
                    f"{larger.sum()} of {len(rows)} seeds",
                    all_hold([mean_above(at_collapse), mean_above(at_collapse - rows[column])]),
                    f"it rises, and faster {others}; 95% t intervals over seeds that collapse",
                )
            )
    return verdicts


def _percent(changes: pd.Series) -> str:
    return f"{100 * np.expm1(changes.mean()):+.0f}%" if len(changes) else "none"


def _figure(table: pd.DataFrame) -> Figure:
    first = table[table.seed == table.seed.min()]
    figure, panels = page_figure(2.8, columns=2)
    for epsilon, style in ((COLLAPSING, "-"), (SAFE, "--")):
        rows = first[first.epsilon == epsilon]
        for column, colour in zip(("clean", "fgsm", "robust"), COLOURS, strict=False):
            label = f"{column}, ε = {epsilon:g}"
            panels[0].plot(rows.epoch, rows[column], style, color=colour, label=label)
        for name, colour in zip(MEASURES, COLOURS, strict=False):
            values = rows[name] / rows[name].iloc[0]
            label = f"{name}, ε = {epsilon:g}"
            panels[1].plot(rows.epoch, values, style, color=colour, label=label)
    panels[0].set_ylabel("test accuracy")
    panels[1].set(ylabel="relative to the first epoch measured", yscale="log")
    for axes in panels:
        axes.set_xlabel("epoch")
        axes.legend(fontsize=6)
    return figure
