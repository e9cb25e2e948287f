"""Measure how well standard errors and intervals describe the choice of samples.

Draws samples again and again from a large population, measures each draw, and compares the stated
standard errors with the deviations between draws, and the intervals with the value on average over
draws. Prints a Markdown table, which is in docs/statistics.md.

    python benchmarks/errors.py [DRAWS] [FAMILY ...]
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import nlbench
from nlbench.measure import Result
from nlbench.measure.replicates import (
    GROUPS,
    combine,
    difference_error,
    standard_error,
    student_quantile,
)
from nlbench.subjects.load import load_subject
from nlbench.subjects.spec import SubjectSpec
from nlbench.subjects.subject import Subject

SIZES = (256, 512)
MEASURES = (
    "affinity",
    "r2",
    "cka",
    "norm",
    "entropy",
    "sparsity",
    "effective-rank",
    "activation-state",
    "influence",
    "linearity",
    "affine-residual",
    "nlc",
    "geometric-complexity",
    "local-complexity",
    "accuracy",
    "substitution",
    "absdev",
)
LEVEL = 0.95
MAX_SHIFT = 2


@dataclass
class Family:
    """A pair of networks and a population of samples.

    Parameters
    ----------
    draw : callable
        Returns inputs and labels for a number of samples and a generator.
    measures : sequence of str
        Measures that can be applied.
    """

    networks: tuple[nn.Module, nn.Module]
    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    measures: Sequence[str]
    settings: dict[str, object] = field(default_factory=dict)


def mlp(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 4)
    ).eval()


def draw_normal(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw skewed, correlated inputs, labelled by the quadrant of two of them."""
    normal = torch.randn(n, 16, generator=generator)
    inputs = normal + 0.5 * normal.roll(1, 1).square()
    return inputs, 2 * (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()


class DigitImages:
    """Images of digits, shifted by up to two pixels and with changed contrast."""

    def __init__(self) -> None:
        subject = load_vgg8("trained")
        self._images, self._labels = subject.inputs, subject.labels

    def draw(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw changed images and their labels."""
        chosen = torch.randint(len(self._images), (n,), generator=generator)
        images = self._images[chosen].clone()
        shifts = torch.randint(-MAX_SHIFT, MAX_SHIFT + 1, (n, 2), generator=generator).tolist()
        contrast = 0.8 + 0.4 * torch.rand(n, generator=generator)
        for index, (down, right) in enumerate(shifts):
            images[index] = images[index].roll((down, right), (-2, -1)) * contrast[index]
        return images, self._labels[chosen]


class Block(nn.Module):
    """A transformer block on characters, with a classifier."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(16, 24)
        self.layer = nn.TransformerEncoderLayer(24, 2, 48, batch_first=True, activation="gelu")
        self.head = nn.Linear(24, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        """Classify sequences (n, t)."""
        return self.head(self.layer(self.embedding(tokens)).mean(1))


def draw_text(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw sequences of characters that tend to repeat, so that tokens depend on each other."""
    first = torch.randint(16, (n, 1), generator=generator)
    steps = torch.randint(3, (n, 11), generator=generator)
    tokens = (first + torch.cat([torch.zeros_like(first), steps.cumsum(1)], 1)) % 16
    return tokens, tokens[:, 0] // 4


def families() -> dict[str, Callable[[], Family]]:
    def digits() -> Family:
        return Family(
            (load_vgg8("trained").model, load_vgg8("init").model),
            DigitImages().draw,
            [name for name in MEASURES if name not in ("absdev", "affine-residual", "nlc")],
        )

    def text() -> Family:
        names = ("affinity", "r2", "cka", "norm", "entropy", "influence", "linearity")
        settings = {"sites.rows": "tokens"}
        return Family((Block(0).eval(), Block(1).eval()), draw_text, names, settings)

    return {
        "MLP": lambda: Family(
            (mlp(0), mlp(1)), draw_normal, MEASURES, {"lines.paths": "pairs", "lines.number": 16}
        ),
        "vgg8 on digits": digits,
        "text block": text,
    }


def load_vgg8(weights: str) -> Subject:
    spec = SubjectSpec("vgg8", weights, "digits", 0, None, "test", ())
    return load_subject(spec, torch.device("cpu"))


@dataclass
class Tally:
    """Values and replicates of one number in all draws."""

    values: list[float] = field(default_factory=list)
    replicates: list[tuple[float, ...]] = field(default_factory=list)

    def add(self, value: float, replicates: tuple[float, ...]) -> None:
        """Add one draw."""
        self.values.append(value)
        self.replicates.append(replicates)

    def coverage(self) -> tuple[float, float]:
        """Return the stated over the true deviation, and the fraction of intervals that hold.

        The intervals should contain the mean over the other draws.
        """
        center = statistics.fmean(self.values)
        deviation = statistics.stdev(self.values)
        known = [standard_error(replicates) or 0.0 for replicates in self.replicates]
        draws = len(known)
        hits = 0
        for value, error, replicates in zip(self.values, known, self.replicates, strict=True):
            others = (draws * center - value) / (draws - 1)
            half = error * student_quantile(0.5 + LEVEL / 2, len(replicates) - 1)
            # The mean of the others has an error of its own.
            half *= math.sqrt(1 + 1 / (draws - 1))
            hits += abs(value - others) <= half + 1e-12
        ratio = math.sqrt(statistics.fmean(e**2 for e in known)) / deviation if deviation else 1.0
        return ratio, hits / draws


def measure(family: Family, draws: int, size: int) -> dict[str, dict[str, Tally]]:
    """Measure all draws and return the tallies of each measure."""
    names = ("network", "layer", "difference")
    tallies = {measure: {name: Tally() for name in names} for measure in family.measures}
    for draw in range(draws):
        inputs, labels = family.draw(size, torch.Generator().manual_seed(1000 + draw))
        first, second = (
            nlbench.evaluate(
                network, inputs, family.measures, settings=family.settings, labels=labels
            )
            for network in family.networks
        )
        for name in family.measures:
            add_results(tallies[name], first[name], second[name])
    return tallies


def add_results(tallies: dict[str, Tally], first: Result, second: Result) -> None:
    if first.replicates:
        tallies["network"].add(first.summary["value"], first.replicates)
    layers = [value for value in first.values if value.replicates]
    if layers:
        tallies["layer"].add(layers[0].statistics["value"], layers[0].replicates)
    paired = combine(lambda a, b: a - b, first.replicates, second.replicates)
    if paired and difference_error(first.replicates, second.replicates, paired=True):
        tallies["difference"].add(first.summary["value"] - second.summary["value"], paired)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    draws = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    chosen = sys.argv[2:] or list(families())
    print(f"{draws} draws, {GROUPS} groups, {100 * LEVEL:.0f} % intervals\n")
    print(
        "| network | measure | samples | draws | deviation, stated / true "
        "| value | layer | difference |"
    )
    print("| --- | --- | --: | --: | --: | --: | --: | --: |")
    for title in chosen:
        family = families()[title]()
        for size in SIZES:
            for name, tallies in measure(family, draws, size).items():
                cells = {key: t.coverage() for key, t in tallies.items() if len(t.values) > 1}
                ratio = f"{cells['network'][0]:.2f}" if "network" in cells else "–"
                columns = [
                    f"{cells[key][1]:.2f}" if key in cells else "–"
                    for key in ("network", "layer", "difference")
                ]
                print(
                    f"| {title} | {name} | {size} | {ratio} | {' | '.join(columns)} |", flush=True
                )


if __name__ == "__main__":
    main()
