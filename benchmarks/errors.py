"""Measure how well standard errors and intervals describe the choice of samples, and their cost.

Draws samples again and again from a large population, measures each draw, and compares the stated
standard errors with the deviations between draws, and the intervals with the value on average over
draws. Counts how often a network compared with itself, on other samples, is said to have changed.
Prints Markdown tables, which are in docs/statistics.md. By default with few draws; those of the
tables are stated there.

    python benchmarks/errors.py [DRAWS] [NETWORK ...]
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torchvision
from torch import Tensor, nn

import nlbench
from nlbench.measure import Result
from nlbench.measure.replicates import GROUPS, combine, standard_error, student_quantile
from nlbench.subjects.load import load_subject
from nlbench.subjects.spec import SubjectSpec
from nlbench.subjects.subject import Subject

SIZES = (256, 512)
OF_INPUTS = (
    "affine-residual",
    "nlc",
    "geometric-complexity",
    "local-complexity",
    "local-linearity",
    "rugosity",
    "absdev",
    "pieces",
    "boundary-pieces",
    "length-distortion",
)
"""Measures of real-valued inputs."""
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
    "elementwise-residual",
    "accuracy",
    "substitution",
    *OF_INPUTS,
)
OF_IMAGES = ("nlc", "geometric-complexity", "local-complexity", "absdev")
"""Those of them that are measured on images, in little time."""
LEVEL = 0.95
DRAWS = 20
MAX_SHIFT = 2
NULL_MEASURES = ("r2", "cka", "norm", "entropy", "influence")
SITE_MEASURES = ("affinity", "r2", "cka", "norm", "entropy", "sparsity")
REPETITIONS = 2
IMAGES = 256


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
            [name for name in MEASURES if name not in OF_INPUTS or name in OF_IMAGES],
            {"lines.number": 16},
        )

    def text() -> Family:
        names = [n for n in MEASURES if n not in OF_INPUTS]
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

    @property
    def errors(self) -> list[float]:
        """The stated standard errors."""
        return [standard_error(replicates) or 0.0 for replicates in self.replicates]

    def ratio(self) -> float:
        """Return the stated deviation, the median over draws, over the true one."""
        deviation = statistics.stdev(self.values)
        return statistics.median(self.errors) / deviation if deviation else 1.0

    def hits(self) -> list[bool]:
        """Return for each draw whether its interval contains the mean over the other draws."""
        center = statistics.fmean(self.values)
        draws = len(self.values)
        hits = []
        for value, error, replicates in zip(self.values, self.errors, self.replicates, strict=True):
            others = (draws * center - value) / (draws - 1)
            half = error * student_quantile(0.5 + LEVEL / 2, len(replicates) - 1)
            # The mean of the others has an error of its own.
            half *= math.sqrt(1 + 1 / (draws - 1))
            hits.append(abs(value - others) <= half + 1e-12)
        return hits


@dataclass
class MeasureTally:
    """Values of the first network, of its layers, and of its difference to the second."""

    network: Tally = field(default_factory=Tally)
    layers: dict[str, Tally] = field(default_factory=dict)
    difference: Tally = field(default_factory=Tally)

    def add(self, first: Result, second: Result) -> None:
        """Add the results for one draw."""
        if first.replicates:
            self.network.add(first.summary["value"], first.replicates)
        for value in first.values:
            if value.replicates:
                tally = self.layers.setdefault(value.place, Tally())
                tally.add(value.statistics["value"], value.replicates)
        paired = combine(lambda a, b: a - b, first.replicates, second.replicates)
        if paired:
            self.difference.add(first.summary["value"] - second.summary["value"], paired)

    def row(self) -> list[str]:
        """Return the number of draws, the ratio, and the coverage of the three intervals."""
        draws = len(self.network.values)
        ratio = f"{self.network.ratio():.2f}" if draws > 1 else "–"
        parts = [[self.network], list(self.layers.values()), [self.difference]]
        return [str(draws), ratio, *(_coverage(tallies) for tallies in parts)]


def _coverage(tallies: Sequence[Tally]) -> str:
    """Return the fraction of intervals that hold, over all draws and layers."""
    hits = [hit for tally in tallies if len(tally.values) > 1 for hit in tally.hits()]
    return f"{statistics.fmean(hits):.2f}" if hits else "–"


def evaluate(
    family: Family, network: nn.Module, size: int, seed: int, measures: Sequence[str]
) -> nlbench.Run:
    """Measure a network on one draw of samples."""
    inputs, labels = family.draw(size, torch.Generator().manual_seed(seed))
    probes = {nlbench.registry.load("measures", name).probe for name in measures}
    settings = {k: v for k, v in family.settings.items() if k.partition(".")[0] in probes}
    return nlbench.evaluate(network, inputs, measures, settings=settings, labels=labels)


def tally(family: Family, draws: int, size: int) -> dict[str, MeasureTally]:
    """Measure all draws of samples."""
    tallies = {name: MeasureTally() for name in family.measures}
    for draw in range(draws):
        first, second = (
            evaluate(family, network, size, 1000 + draw, family.measures)
            for network in family.networks
        )
        for name in family.measures:
            tallies[name].add(first[name], second[name])
    return tallies


def count_false_changes(family: Family, comparisons: int, size: int) -> int:
    """Return how many comparisons of a network with itself, on other samples, find a change."""
    count = 0
    for index in range(comparisons):
        seeds = (5000 + 2 * index, 5001 + 2 * index)
        first, second = (
            evaluate(family, family.networks[0], size, seed, NULL_MEASURES) for seed in seeds
        )
        count += any(d.is_significant for d in nlbench.compare(first, second).rows())
    return count


def processor_seconds(errors: str) -> float:
    """Return the time of six site measures of a ResNet18 on images of 224 pixels."""
    torch.manual_seed(0)
    network = torchvision.models.resnet18(weights=None).eval()
    images = torch.randn(IMAGES, 3, 224, 224)
    seconds = []
    for _ in range(REPETITIONS):
        begin = time.process_time()
        if errors:
            nlbench.evaluate(network, images, SITE_MEASURES, errors=errors)
        else:
            with torch.no_grad():
                network(images)
        seconds.append(time.process_time() - begin)
    return min(seconds)


def main() -> None:
    """Print the costs and the tables."""
    torch.set_num_threads(1)
    bare = processor_seconds("")
    for errors in ("none", "groups"):
        ratio = processor_seconds(errors) / bare
        print(f"six site measures of ResNet18, errors={errors}: {ratio:.2f} forward passes")
    draws = int(sys.argv[1]) if len(sys.argv) > 1 else DRAWS
    chosen = sys.argv[2:] or list(families())
    print(f"{GROUPS} groups, {100 * LEVEL:.0f} % intervals\n")
    print(
        "| network | measure | samples | draws | deviation, stated / true "
        "| value | layers | difference |"
    )
    print("| --- | --- | --: | --: | --: | --: | --: | --: |")
    for title in chosen:
        family = families()[title]()
        for size in SIZES:
            for name, measured in tally(family, draws, size).items():
                columns = [title, name, str(size), *measured.row()]
                print(f"| {' | '.join(columns)} |", flush=True)
    print("\n| network | samples | comparisons | something changed |")
    print("| --- | --: | --: | --: |")
    for title in chosen:
        count = count_false_changes(families()[title](), draws, SIZES[0])
        print(f"| {title} | {SIZES[0]} | {draws} | {count} |", flush=True)
