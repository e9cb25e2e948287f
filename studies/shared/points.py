"""Datasets of points: sines to fit, spirals, a grid, and families of distributions."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from nlbench.citation import Source
from nlbench.errors import RequestError
from nlbench.models.datasets.synthetic import SEED, parse_shape
from nlbench.options import Option
from nlbench.registry import Family
from nlbench.studies.networks.perceptrons import REDSHIFT
from nlbench.subjects.data import Dataset, dataset

if TYPE_CHECKING:
    from torch import Generator, Tensor

CURVE_POINTS = 512
SPIRAL_POINTS = {"train": 512, "test": 1024}
ARMS = 3
SPREAD = 0.25
"""Standard deviation of angles in radians."""


@dataset(options={"k": Option(1, "periods of the sine", minimum=1, maximum=64)})
def curves(k: int = 1) -> Dataset:
    """Points in [-1, 1] with a sine to learn, sin(π k x).

    There are 512 evenly spaced points for training, and 512 between them for testing, for every k.
    There are no labels; networks are trained with the mean squared error.

    Examples
    --------
    >>> curves(3).sample(8).inputs.shape
    torch.Size([8, 1])
    """
    import torch

    from nlbench.models.datasets.regression import RegressionDataset
    from nlbench.subjects.samples import InMemoryItems

    edges = torch.linspace(-1, 1, CURVE_POINTS + 1)[:, None]
    return RegressionDataset(
        name="curves",
        train=InMemoryItems(edges[:-1] + 1 / CURVE_POINTS),
        test=InMemoryItems(edges[:-1] + 0.5 / CURVE_POINTS),
        shape=(1,),
        classes=1,
        mean=(),
        std=(),
        preprocessing=f"{CURVE_POINTS} evenly spaced points of [-1, 1], as they are",
        source=Source("", "ours, for the benchmark of measures (docs/benchmark.md)"),
        labelled=False,
        target=lambda x: (math.pi * k * x[:, 0]).sin(),
    )


@dataset()
def spirals() -> Dataset:
    """Points on three spiral arms in the plane, one per class.

    The radius r is uniform on [0.1, 1], and the angle is normally distributed around
    2π (arm / 3 + r). The points are multiplied by 1.7 for a variance near 1. There are 512 for
    training and 1,024 for testing, drawn with two fixed seeds.

    Examples
    --------
    >>> spirals().sample(8).inputs.shape, spirals().classes
    (torch.Size([8, 2]), 3)
    """
    import torch

    from nlbench.subjects.samples import InMemoryItems

    def draw(count: int, seed: int) -> InMemoryItems:
        generator = torch.Generator().manual_seed(seed)
        labels = torch.arange(count) % ARMS
        radius = 0.1 + 0.9 * torch.rand(count, generator=generator)
        angle = 2 * math.pi * (labels / ARMS + radius)
        angle += SPREAD * torch.randn(count, generator=generator)
        points = 1.7 * radius[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
        return InMemoryItems(points, labels.tolist())

    return Dataset(
        name="spirals",
        train=draw(SPIRAL_POINTS["train"], 0),
        test=draw(SPIRAL_POINTS["test"], 1),
        shape=(2,),
        classes=ARMS,
        mean=(),
        std=(),
        preprocessing=f"{ARMS} spirals of 1 turns, angles spread by {SPREAD:g}",
        source=Source("", "ours, for the study of prediction"),
    )


DISTRIBUTION_OPTIONS = {
    "count": Option(1000, "number of points", minimum=2, maximum=10**7),
    "spacing": Option(
        "even",
        "even: equally spaced in probability, for scalar points; random: drawn",
        choices=("even", "random"),
    ),
    "shape": Option("1", "shape of one point of independent values: 1, 16 or 3x8x8"),
    "seed": SEED,
}


class _Distribution(Family):
    """Points of independent values from one distribution with two parameters.

    Attributes
    ----------
    family, form, condition, words : str
        Name of the family, and the form, condition and description of its two parameters.
    """

    family: str
    form: str
    condition: str
    words: str

    def names(self) -> Sequence[str]:
        """Return no names, since any two numbers may name a member."""
        return ()

    def load(self, name: str) -> Callable[..., Dataset]:
        """Return the function that builds the dataset."""
        full = f"{self.family}/{name}"
        try:
            first, second = map(float, name.split(":"))
        except ValueError:
            first = second = math.nan
        if not (math.isfinite(first) and math.isfinite(second) and self.is_valid(first, second)):
            raise RequestError(
                f"dataset '{full}': expected {self.family}/{self.form}, {self.condition}"
            )

        def build(
            count: int = 1000, spacing: str = "even", shape: str = "1", seed: int = 0
        ) -> Dataset:
            lengths = parse_shape(full, shape, count)
            size = math.prod(lengths)
            if spacing not in ("even", "random"):
                raise RequestError(f"{full}: spacing: expected even or random, got '{spacing}'")
            if spacing == "even" and size != 1:
                raise RequestError(
                    f"{full}: points of shape {shape} are drawn at random; "
                    f"set {self.family}.spacing=random"
                )
            if spacing == "even":
                rows = self.even(first, second, count)
                how = "evenly spaced"
            else:
                rows = _drawn(type(self), first, second, count * size, seed)
                how = f"drawn independently, seed {seed},"
            return _unlabelled_dataset(
                full,
                rows.float().reshape(count, *lengths),
                size,
                f"{count} points of shape {shape}, {how} {self.describe(name)}",
                Source(""),
            )

        build.__doc__ = f"Make points {self.describe(name)}."
        return dataset(options=DISTRIBUTION_OPTIONS)(build)

    def describe(self, name: str) -> str:
        """Return a one-line description of a member."""
        return self.words.format(*name.split(":")) if name.count(":") == 1 else ""

    @abstractmethod
    def quantiles(self, first: float, second: float, probability: Tensor) -> Tensor:
        """Return quantiles in float64."""

    def even(self, first: float, second: float, count: int) -> Tensor:
        """Return points that are equally spaced in probability: quantiles at (i + ½)/count."""
        import torch

        steps = (torch.arange(count, dtype=torch.float64) + 0.5) / count
        return self.quantiles(first, second, steps)

    def draw(self, first: float, second: float, count: int, generator: Generator) -> Tensor:
        """Draw random values in float64."""
        import torch

        share = torch.rand(count, generator=generator, dtype=torch.float64)
        return self.quantiles(first, second, share)

    def is_valid(self, first: float, second: float) -> bool:
        """Return True if the two numbers specify a distribution."""
        return second > 0


# The networks on a ladder draw their samples from the same points.
@lru_cache(maxsize=1)
def _drawn(
    family: type[_Distribution], first: float, second: float, count: int, seed: int
) -> Tensor:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return family().draw(first, second, count, generator).float()


class Interval(_Distribution):
    """Points in the interval from LOW to HIGH.

    Evenly spaced points include both ends. Both splits contain all points, in a random order that
    depends on the run's seed. ``--samples 0`` selects all of them.

    Examples
    --------
    >>> Interval().load("-1:1")(count=3).sample(None).inputs.sort(0).values.tolist()
    [[-1.0], [0.0], [1.0]]
    """

    description = "interval/LOW:HIGH, uniform points of that interval"
    family = "interval"
    form = "LOW:HIGH"
    condition = "numbers with LOW < HIGH"
    words = "on [{}, {}]"

    def is_valid(self, first: float, second: float) -> bool:
        """Return True if the interval is not empty."""
        return first < second

    def even(self, first: float, second: float, count: int) -> Tensor:
        """Return both ends and evenly spaced points between them."""
        import torch

        return torch.linspace(first, second, count, dtype=torch.float64)

    def quantiles(self, first: float, second: float, probability: Tensor) -> Tensor:
        """Return quantiles of the uniform distribution."""
        return probability * (second - first) + first


class Normal(_Distribution):
    """Points from a normal distribution. Even points are its quantiles at (i + ½)/count.

    Examples
    --------
    >>> Normal().load("5:2")(count=501).sample(None).inputs.mean().item()
    5.0
    """

    description = "normal/MEAN:STD, points of that normal distribution"
    family = "normal"
    form = "MEAN:STD"
    condition = "numbers with STD > 0"
    words = "from N({}, {}²)"

    def quantiles(self, first: float, second: float, probability: Tensor) -> Tensor:
        """Return quantiles of the normal distribution."""
        import torch

        standard: Tensor = torch.special.ndtri(probability)
        return standard * second + first

    def draw(self, first: float, second: float, count: int, generator: Generator) -> Tensor:
        """Draw from the normal distribution."""
        import torch

        return torch.randn(count, generator=generator, dtype=torch.float64) * second + first


class Exponential(_Distribution):
    """Points from a shifted exponential distribution, for skewed inputs.

    Examples
    --------
    >>> points = Exponential().load("0:2")(count=501).sample(None).inputs
    >>> round(points.mean().item(), 2)
    2.0
    """

    description = "exponential/LOW:STD, points of the exponential distribution above LOW"
    family = "exponential"
    form = "LOW:STD"
    condition = "numbers with STD > 0"
    words = "from {} on, exponentially with mean excess {}"

    def quantiles(self, first: float, second: float, probability: Tensor) -> Tensor:
        """Return quantiles of the exponential distribution."""
        return first - second * (1 - probability).log()


def _unlabelled_dataset(
    name: str, rows: Tensor, classes: int, preprocessing: str, source: Source
) -> Dataset:
    """Build an unlabelled dataset whose splits both contain all points."""
    from nlbench.subjects.samples import InMemoryItems

    items = InMemoryItems(rows)
    return Dataset(
        name=name,
        train=items,
        test=items,
        shape=tuple(rows.shape[1:]),
        classes=classes,
        mean=(),
        std=(),
        preprocessing=preprocessing,
        source=source,
        labelled=False,
    )


@dataset(options={"side": Option(32, "points along each axis", minimum=2, maximum=4096)})
def grid(side: int = 32) -> Dataset:
    """Evenly spaced points in the square [-1, 1]², the input to the neural-redshift networks.

    Both splits contain the whole grid, row by row, without labels or normalisation.
    ``--samples 0`` selects all points.

    Examples
    --------
    >>> grid(3).sample(None).inputs.sum(0).tolist()
    [0.0, 0.0]
    """
    import torch

    line = torch.linspace(-1, 1, side)
    return _unlabelled_dataset(
        "grid",
        torch.cartesian_prod(line, line),
        1,
        f"{side}x{side} evenly spaced points of the square [-1, 1]^2, as they are",
        REDSHIFT,
    )
