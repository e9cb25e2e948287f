"""Data made up on the spot: noise, pictures, functions to learn, points of known distributions."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nlbench.errors import RequestError
from nlbench.measure import Source
from nlbench.options import Option
from nlbench.registry import Family
from nlbench.studies.networks.redshift import REDSHIFT
from nlbench.subjects.data import Dataset, dataset

if TYPE_CHECKING:
    from torch import Generator, Tensor

__all__ = [
    "Curve",
    "Interval",
    "Normal",
    "curves",
    "grid",
    "random_tensors",
    "synthetic",
    "target_values",
]


MOST_ITEMS = 10**8
MOST_NUMBERS = 2**28
"""Of one tensor, or of the patterns of all classes: 1 GiB."""

SEED = Option(0, "of the data, whatever the run's seed is", minimum=0, maximum=2**31 - 1)


@dataset(
    options={
        "shape": Option("3x32x32", "of one tensor, as 3x224x224 or 16"),
        "classes": Option(10, "number of classes", minimum=1, maximum=1_000_000),
        "size": Option(2048, "tensors in each split", minimum=1, maximum=MOST_ITEMS),
        "seed": SEED,
    }
)
def random_tensors(
    shape: str = "3x32x32", classes: int = 10, size: int = 2048, seed: int = 0
) -> Dataset:
    """Random tensors of any shape: independent uniform numbers, labels that mean nothing.

    Normalised to mean 0 and variance 1. Each tensor is drawn from a seed of its own when
    it is asked for, so a larger `size` keeps the first ones and needs no memory.

    Parameters
    ----------
    shape : str
        Lengths of the axes of one tensor, with ``x`` between.
    classes, size, seed : int
        `size` is that of each split.

    Raises
    ------
    nlbench.RequestError
        If the shape can't be read, or a tensor has more than 2²⁸ numbers.

    Examples
    --------
    >>> random_tensors("1x8x8").sample(4).inputs.shape
    torch.Size([4, 1, 8, 8])
    """
    import torch

    from .items import Drawn

    lengths = lengths_of("random", shape)

    def draw(index: int, generator: Generator) -> tuple[Tensor, int]:
        tensor = torch.rand(lengths, generator=generator)
        return tensor, int(torch.randint(classes, (), generator=generator))

    return Dataset(
        name="random",
        train=Drawn(draw, size, seed, 0),
        test=Drawn(draw, size, seed, 1),
        shape=lengths,
        classes=classes,
        mean=(0.5,) * lengths[0],
        std=(math.sqrt(1 / 12),) * lengths[0],
        preprocessing=(
            f"uniform noise in [0, 1], {size} tensors of shape {shape} a split, seed {seed}; "
            "normalised to mean 0 and variance 1"
        ),
        source=Source(""),
        labelled=False,
    )


def lengths_of(owner: str, text: str, count: int = 1) -> tuple[int, ...]:
    """Read the lengths of a tensor's axes, of which so many are held at once.

    Raises
    ------
    nlbench.RequestError
        If they can't be read, or all have more than 2²⁸ numbers.

    Examples
    --------
    >>> lengths_of("random", "3x32x32")
    (3, 32, 32)
    """
    parts = text.lower().replace("×", "x").split("x")
    if not all(part.isascii() and part.isdecimal() and 0 < int(part) < 2**20 for part in parts):
        raise RequestError(f"{owner}.shape: expected lengths such as 3x32x32 or 16, got '{text}'")
    lengths = tuple(int(part) for part in parts)
    numbers = count * math.prod(lengths)
    if numbers > MOST_NUMBERS:
        which = text if count == 1 else f"{count:,} of {text}"
        has = "has" if count == 1 else "have"
        raise RequestError(
            f"{owner}.shape: {which} {has} {numbers:,} numbers, expected at most {MOST_NUMBERS:,}"
        )
    return lengths


@dataset(
    options={
        "size": Option(4096, "training images", minimum=1, maximum=MOST_ITEMS),
        "test_size": Option(1024, "test images", minimum=1, maximum=MOST_ITEMS),
        "classes": Option(10, "number of classes", minimum=2, maximum=10_000),
        "channels": Option(3, "channels of an image", minimum=1, maximum=64),
        "image_size": Option(32, "pixels a side", minimum=8, maximum=1024),
        "difficulty": Option(0.7, "0: no clutter, 1: nothing to learn", minimum=0, maximum=1),
        "seed": SEED,
    }
)
def synthetic(
    size: int = 4096,
    test_size: int = 1024,
    classes: int = 10,
    channels: int = 3,
    image_size: int = 32,
    difficulty: float = 0.7,
    seed: int = 0,
) -> Dataset:
    """Made-up pictures to learn, of adjustable number, classes, resolution and difficulty.

    Each class has a smooth random pattern P (5×5 normal noise, enlarged by bicubic
    interpolation, mean 0 and variance 1). An image of difficulty d is
    sqrt(1 - d) P', its class's pattern moved by up to an eighth of the image (around the
    edges), plus sqrt(0.8 d) of another such pattern that is drawn for this image alone,
    plus sqrt(0.2 d) of normal noise a pixel; divided by 6, put around 0.5 and clamped to
    [0, 1]. So d is the share of the variance that tells nothing of the class.

    Images are drawn from seeds of their own when they are asked for: a larger `size`
    keeps the first ones and needs no memory. Classes take turns.

    Parameters
    ----------
    size, test_size : int
        Number of images.
    classes, channels, image_size : int
    difficulty : float
        In [0, 1].
    seed : int

    Raises
    ------
    nlbench.RequestError
        If the patterns of all classes have more than 2²⁸ numbers.

    Examples
    --------
    >>> data = synthetic(classes=4, image_size=16)
    >>> data.sample(8).inputs.shape, data.classes
    (torch.Size([8, 3, 16, 16]), 4)
    """
    import torch

    from .items import Drawn, stream

    shape = (channels, image_size, image_size)
    if classes * math.prod(shape) > MOST_NUMBERS:
        raise RequestError(
            f"synthetic: {classes:,} classes of {channels}x{image_size}x{image_size} have "
            f"{classes * math.prod(shape):,} numbers, expected at most {MOST_NUMBERS:,}"
        )
    patterns = _fields(classes, shape, stream(seed, 2))
    reach = image_size // 8
    d = difficulty

    def draw(index: int, generator: Generator) -> tuple[Tensor, int]:
        label = index % classes
        down, right = torch.randint(-reach, reach + 1, (2,), generator=generator).tolist()
        figure = patterns[label].roll((down, right), dims=(1, 2))
        clutter = _fields(1, shape, generator)[0]
        grain = torch.randn(shape, generator=generator)
        mixed = (
            math.sqrt(1 - d) * figure + math.sqrt(0.8 * d) * clutter + math.sqrt(0.2 * d) * grain
        )
        return (0.5 + mixed / 6).clamp(0, 1), label

    return Dataset(
        name="synthetic",
        train=Drawn(draw, size, seed, 0),
        test=Drawn(draw, test_size, seed, 1),
        shape=shape,
        classes=classes,
        mean=(0.5,) * channels,
        std=(1 / 6,) * channels,
        preprocessing=(
            f"{classes} smooth patterns, moved, with clutter: difficulty {difficulty:g}, {size} "
            f"training and {test_size} test images of {image_size}x{image_size}, seed {seed}; "
            "normalised by 0.5 and 1/6"
        ),
        source=Source(""),
    )


def _fields(count: int, shape: Sequence[int], generator: Generator) -> Tensor:
    """Smooth random pictures of mean 0 and variance 1: coarse noise, enlarged."""
    import torch
    from torch.nn import functional

    channels, side, _ = shape
    coarse = torch.randn(count, channels, 5, 5, generator=generator)
    fine = functional.interpolate(coarse, size=(side, side), mode="bicubic", align_corners=True)
    axes = (1, 2, 3)
    return (fine - fine.mean(axes, keepdim=True)) / fine.std(axes, keepdim=True)


POINTS = 512
TARGETS = ("sine", "kinks")


def target_values(x: Tensor, target: str, k: int) -> Tensor:
    """Values of a target at points of [-1, 1].

    Parameters
    ----------
    x : tensor of shape (n,)
    target : {"sine", "kinks"}
        sin(π k x); or the zigzag between -1 and 1 that begins with -1 at x = -1 and has `k`
        kinks, evenly spaced, so that 0 is the straight line x.
    k : int

    Returns
    -------
    tensor of shape (n,)

    Examples
    --------
    >>> import torch
    >>> target_values(torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0]), "kinks", 1).tolist()
    [-1.0, 0.0, 1.0, 0.0, -1.0]
    """
    if target == "sine":
        return (math.pi * k * x).sin()
    # The distance from the nearest even knot, of knots 2 / (k + 1) apart.
    knots = (x + 1) * (k + 1) / 2
    return 1 - 2 * ((knots % 2) - 1).abs()


@dataclass(frozen=True)
class Curve(Dataset):
    """Points of [-1, 1] with a function of them to be learnt."""

    target: str = "sine"
    k: int = 1

    def points(self, split: str) -> tuple[Tensor, Tensor]:
        """Inputs of shape (n, 1) and values of shape (n,) of the training or the test split."""
        x: Tensor = getattr(self, split).rows
        return x, target_values(x[:, 0], self.target, self.k)


@dataset(
    options={
        "target": Option("sine", "sine: sin(π k x); kinks: a zigzag", choices=TARGETS),
        "k": Option(1, "periods of the sine; kinks of the zigzag", minimum=0, maximum=64),
    }
)
def curves(target: str = "sine", k: int = 1) -> Dataset:
    """Points of [-1, 1] with a function of them to be learnt: a sine, or a zigzag.

    512 evenly spaced points to train on, 512 others between them to test on. The inputs are
    the same whatever the target; there are no labels, and a network is trained by the mean
    squared error.

    Parameters
    ----------
    target : {"sine", "kinks"}
        See `target_values`.
    k : int

    Raises
    ------
    nlbench.RequestError
        If it is a sine of no period, which is constant.

    Examples
    --------
    >>> curves("kinks", 3).sample(8).inputs.shape
    torch.Size([8, 1])
    """
    import torch

    from .items import Held

    if target == "sine" and k == 0:
        raise RequestError("curves.k: a sine of no period is constant, expected at least 1")
    edges = torch.linspace(-1, 1, POINTS + 1)[:, None]
    return Curve(
        name="curves",
        train=Held(edges[:-1] + 1 / POINTS),
        test=Held(edges[:-1] + 0.5 / POINTS),
        shape=(1,),
        classes=1,
        mean=(),
        std=(),
        preprocessing=f"{POINTS} evenly spaced points of [-1, 1], as they are",
        source=Source("", "ours, for the benchmark of measures (docs/benchmark.md)"),
        labelled=False,
        target=target,
        k=k,
    )


DISTRIBUTED = {
    "count": Option(1000, "points", minimum=2, maximum=10**7),
    "spacing": Option(
        "even",
        "even: at equal steps of probability, for one number a point; random: drawn",
        choices=("even", "random"),
    ),
    "shape": Option("1", "of one point, whose numbers are independent, as 1, 16 or 3x8x8"),
    "seed": SEED,
}


class _Distribution(Family):
    """Points whose numbers are independent and of one distribution.

    Attributes
    ----------
    family, form, condition : str
        Its name, how a member's name says its two numbers, and what these have to be.
    words : str
        What the distribution of two numbers is.
    """

    family: str
    form: str
    condition: str
    words: str

    def names(self) -> Sequence[str]:
        """None: the members are as many as there are numbers."""
        return ()

    def load(self, name: str) -> Callable[..., Dataset]:
        """Give the function that makes the points.

        Raises
        ------
        nlbench.RequestError
            If the name doesn't say a distribution.
        """
        full = f"{self.family}/{name}"
        try:
            first, second = map(float, name.split(":"))
        except ValueError:
            first = second = math.nan
        if not (math.isfinite(first) and math.isfinite(second) and self.is_one(first, second)):
            raise RequestError(
                f"dataset '{full}': expected {self.family}/{self.form}, {self.condition}"
            )

        def build(
            count: int = 1000, spacing: str = "even", shape: str = "1", seed: int = 0
        ) -> Dataset:
            import torch

            lengths = lengths_of(full, shape, count)
            size = math.prod(lengths)
            if spacing not in ("even", "random"):
                raise RequestError(f"{full}: spacing: expected even or random, got '{spacing}'")
            if spacing == "even" and size != 1:
                raise RequestError(
                    f"{full}: points of shape {shape} are drawn at random; "
                    f"set {self.family}.spacing=random"
                )
            if spacing == "even":
                rows, how = self.even(first, second, count), "evenly spaced"
            else:
                generator = torch.Generator().manual_seed(seed)
                rows = self.drawn(first, second, count * size, generator)
                how = f"drawn independently, seed {seed},"
            return _all_points(
                full,
                rows.float().reshape(count, *lengths),
                size,
                f"{count} points of shape {shape}, {how} {self.describe(name)}",
                Source(""),
            )

        build.__doc__ = f"Make points {self.describe(name)}."
        return dataset(options=DISTRIBUTED)(build)

    def describe(self, name: str) -> str:
        """One line."""
        return self.words.format(*name.split(":")) if name.count(":") == 1 else ""

    @abstractmethod
    def is_one(self, first: float, second: float) -> bool:
        """Whether the two numbers say a distribution."""

    @abstractmethod
    def even(self, first: float, second: float, count: int) -> Tensor:
        """Give so many points at equal steps of probability, float64."""

    @abstractmethod
    def drawn(self, first: float, second: float, count: int, generator: Generator) -> Tensor:
        """Draw so many, float64."""


class Interval(_Distribution):
    """Points of the interval from LOW to HIGH; even ones include both ends.

    Both splits are all of them, in a random order that the run's seed decides.
    ``--samples 0`` takes all.

    Examples
    --------
    >>> Interval().load("-1:1")(count=3).sample(None).inputs.sort(0).values.tolist()
    [[-1.0], [0.0], [1.0]]
    """

    description = "interval/LOW:HIGH, uniform points of that interval"
    family, form, condition = "interval", "LOW:HIGH", "numbers with LOW < HIGH"
    words = "on [{}, {}]"

    def is_one(self, first: float, second: float) -> bool:
        """Whether the interval isn't empty."""
        return first < second

    def even(self, first: float, second: float, count: int) -> Tensor:
        """Give both ends and the points between."""
        import torch

        return torch.linspace(first, second, count, dtype=torch.float64)

    def drawn(self, first: float, second: float, count: int, generator: Generator) -> Tensor:
        """Draw from the uniform distribution."""
        import torch

        share = torch.rand(count, generator=generator, dtype=torch.float64)
        return share * (second - first) + first


class Normal(_Distribution):
    """Points of the normal distribution; even ones are its quantiles at (i + ½)/count.

    Examples
    --------
    >>> Normal().load("5:2")(count=501).sample(None).inputs.mean().item()
    5.0
    """

    description = "normal/MEAN:STD, points of that normal distribution"
    family, form, condition = "normal", "MEAN:STD", "numbers with STD > 0"
    words = "from N({}, {}²)"

    def is_one(self, first: float, second: float) -> bool:
        """Whether the standard deviation is positive."""
        return second > 0

    def even(self, first: float, second: float, count: int) -> Tensor:
        """Give the quantiles."""
        import torch

        steps = (torch.arange(count, dtype=torch.float64) + 0.5) / count
        quantiles: Tensor = torch.special.ndtri(steps)
        return quantiles * second + first

    def drawn(self, first: float, second: float, count: int, generator: Generator) -> Tensor:
        """Draw from the normal distribution."""
        import torch

        return torch.randn(count, generator=generator, dtype=torch.float64) * second + first


def _all_points(
    name: str, rows: Tensor, classes: int, preprocessing: str, source: Source
) -> Dataset:
    """Points without labels, all of them in both splits."""
    from .items import Held

    items = Held(rows)
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
    """Evenly spaced points of the square [-1, 1]², the input of the neural-redshift networks.

    Both splits are the whole grid, row by row; the points have no labels and aren't
    normalised. ``--samples 0`` takes all of them.

    Parameters
    ----------
    side : int
        Points along each axis.

    Examples
    --------
    >>> grid(3).sample(None).inputs.sum(0).tolist()
    [0.0, 0.0]
    """
    import torch

    line = torch.linspace(-1, 1, side)
    return _all_points(
        "grid",
        torch.cartesian_prod(line, line),
        1,
        f"{side}x{side} evenly spaced points of the square [-1, 1]^2, as they are",
        REDSHIFT,
    )
