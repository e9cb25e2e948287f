"""Functions of one number to be learnt, whose nonlinearity is known in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nlbench.errors import RequestError
from nlbench.measure import Source
from nlbench.options import Option
from nlbench.subjects.data import Dataset, dataset

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Curve", "affine_share", "curves", "target_values"]


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


def affine_share(target: str, k: int) -> float:
    """Share of a target's variance over [-1, 1] that an affine function explains.

    Examples
    --------
    >>> affine_share("kinks", 0), affine_share("kinks", 3), round(affine_share("sine", 1), 3)
    (1.0, 0.0, 0.608)
    """
    if target == "sine":
        return 6 / (math.pi * k) ** 2
    # An odd number of kinks is symmetric, an even one leaves what one piece of k + 1 explains.
    return 0.0 if k % 2 else 1 / (k + 1) ** 4


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
