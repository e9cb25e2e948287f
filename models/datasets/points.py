"""Points of a known distribution: ``interval/LOW:HIGH`` and ``normal/MEAN:STD``."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nlbench.errors import RequestError
from nlbench.measure import Source
from nlbench.options import Option, resolve_options
from nlbench.registry import Family
from nlbench.subjects.data import Dataset, dataset

if TYPE_CHECKING:
    from torch import Generator, Tensor

__all__ = ["Interval", "Normal"]


OPTIONS = {
    "count": Option(1000, "points", minimum=2, maximum=10**7),
    "spacing": Option(
        "even",
        "even: at equal steps of probability, for one number a point; random: drawn",
        choices=("even", "random"),
    ),
    "shape": Option("1", "of one point, whose numbers are independent, as 1, 16 or 3x8x8"),
    "seed": Option(0, "of the data, whatever the run's seed is", minimum=0, maximum=2**31 - 1),
}


class _Points(Family):
    """Points whose numbers are independent and of one distribution."""

    family = ""
    form = ""

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
        try:
            first, second = map(float, name.split(":"))
        except ValueError:
            first = second = math.nan
        if not (math.isfinite(first) and math.isfinite(second) and self.is_one(first, second)):
            raise RequestError(
                f"dataset '{self.family}/{name}': expected {self.family}/{self.form}, "
                f"{self.condition}"
            )

        def build(**options: Any) -> Dataset:
            given = resolve_options(OPTIONS, options, owner=f"{self.family}/{name}")
            return self._points(name, first, second, **given)

        build.__doc__ = f"Make points {self.describe(name)}."
        return dataset(options=OPTIONS)(build)

    def _points(
        self,
        name: str,
        first: float,
        second: float,
        *,
        count: Any,
        spacing: Any,
        shape: Any,
        seed: Any,
    ) -> Dataset:
        import torch

        from .items import Held
        from .synthetic import lengths_of

        lengths = lengths_of(f"{self.family}/{name}", shape, count)
        if spacing == "even" and math.prod(lengths) != 1:
            raise RequestError(
                f"{self.family}/{name}: points of shape {shape} are drawn at random; "
                f"set {self.family}.spacing=random"
            )
        if spacing == "even":
            rows = self.even(first, second, count)
        else:
            generator = torch.Generator().manual_seed(seed)
            rows = self.drawn(first, second, count * math.prod(lengths), generator)
        items = Held(rows.float().reshape(count, *lengths))
        how = "evenly spaced" if spacing == "even" else f"drawn independently, seed {seed},"
        return Dataset(
            name=f"{self.family}/{name}",
            train=items,
            test=items,
            shape=lengths,
            classes=math.prod(lengths),
            mean=(),
            std=(),
            preprocessing=f"{count} points of shape {shape}, {how} {self.describe(name)}",
            source=Source(""),
            labelled=False,
        )

    def describe(self, name: str) -> str:
        """One line."""
        return self.words(*name.split(":")[:2]) if name.count(":") == 1 else ""

    condition = ""

    @abstractmethod
    def is_one(self, first: float, second: float) -> bool:
        """Whether the two numbers say a distribution."""

    @abstractmethod
    def words(self, first: str, second: str) -> str:
        """Say what the distribution is."""

    @abstractmethod
    def even(self, first: float, second: float, count: int) -> Tensor:
        """Give so many points at equal steps of probability, float64."""

    @abstractmethod
    def drawn(self, first: float, second: float, count: int, generator: Generator) -> Tensor:
        """Draw so many, float64."""


class Interval(_Points):
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

    def is_one(self, first: float, second: float) -> bool:
        """Whether the interval isn't empty."""
        return first < second

    def words(self, first: str, second: str) -> str:
        """Name the interval."""
        return f"on [{first}, {second}]"

    def even(self, first: float, second: float, count: int) -> Tensor:
        """Give both ends and the points between."""
        import torch

        return torch.linspace(first, second, count, dtype=torch.float64)

    def drawn(self, first: float, second: float, count: int, generator: Generator) -> Tensor:
        """Draw from the uniform distribution."""
        import torch

        return (
            torch.rand(count, generator=generator, dtype=torch.float64) * (second - first) + first
        )


class Normal(_Points):
    """Points of the normal distribution; even ones are its quantiles at (i + ½)/count.

    Examples
    --------
    >>> Normal().load("5:2")(count=501).sample(None).inputs.mean().item()
    5.0
    """

    description = "normal/MEAN:STD, points of that normal distribution"
    family, form, condition = "normal", "MEAN:STD", "numbers with STD > 0"

    def is_one(self, first: float, second: float) -> bool:
        """Whether the standard deviation is positive."""
        return second > 0

    def words(self, first: str, second: str) -> str:
        """Name the distribution."""
        return f"from N({first}, {second}²)"

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
