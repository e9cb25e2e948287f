"""Nonlinearity coefficient: how much a network bends over the spread of its inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from nlbench.citation import Source
from nlbench.errors import NotFinite, Undefined
from nlbench.measure import Measure, MoreMeans, Result
from nlbench.options import Option
from nlbench.probes.function import directional_derivative

if TYPE_CHECKING:
    from nlbench.probes.function import FunctionBatch

__all__ = ["NonlinearityCoefficient", "nonlinearity_coefficient"]

# In units of the last place of the outputs: where their standard deviation is less, rounding
# makes more than a thousandth of the spread's square.
_FLOOR = 8

# A sample and the two whose difference is the direction.
FEWEST = 3


def nonlinearity_coefficient(
    function: Callable[[Tensor], Tensor], inputs: Tensor, *, directions: int = 4
) -> Tensor:
    """Nonlinearity coefficient sqrt(E tr(J Cov_x Jᵀ) / tr Cov_f) of a function.

    With x' and x'' two other samples, v = (x' - x'') / √2 has covariance Cov_x, so the
    numerator is the mean of ‖J(x) v‖², by derivatives along v; the denominator is the mean
    of ‖f(x') - f(x'')‖² / 2 over the same pairs. An affine function has 1 whatever the
    pairs: pair by pair the two are equal. Every sample serves once as x, x' and x'' for
    each direction.

    Parameters
    ----------
    function : callable
        From inputs (n, ...) to outputs (n, k), each sample by itself. Almost everywhere
        differentiable is enough.
    inputs : tensor of shape (n, ...)
        Floating, in any order: they are shuffled, always in the same way.
    directions : int
        How many a sample, at most (n - 1) / 2; they then make up all pairs, if n is odd.

    Returns
    -------
    tensor, scalar, float64
        At least 0, and 1 for an affine function.

    Raises
    ------
    nlbench.Undefined
        For fewer than three samples, a constant input or output, an output whose
        derivative is zero everywhere though it varies, or an operation that can't be
        differentiated.
    nlbench.NotFinite
        If an output or a derivative is not finite.

    References
    ----------
    G. Philipp, "The Nonlinearity Coefficient - A Practical Guide to Neural Architecture
    Design", arXiv:2105.12210, 2021, section 1.

    Examples
    --------
    >>> x = torch.linspace(-1, 1, 101, dtype=torch.float64)[:, None]
    >>> round(nonlinearity_coefficient(lambda x: 3 * x - 2, x).item(), 9)
    1.0
    >>> bool(nonlinearity_coefficient(lambda x: torch.sin(9 * x), x) > 5)
    True
    """
    return _coefficient(*_terms(function, inputs, directions))


def _offsets(n: int, directions: int) -> Iterator[tuple[int, int]]:
    """How far, around the circle of n samples, the two of a pair are from their x.

    The differences are 1, 2, …, so that no pair occurs twice; neither of a pair is x itself.
    """
    for difference in range(1, min(directions, (n - 1) // 2) + 1):
        yield difference, 2 * difference


def _terms(
    function: Callable[[Tensor], Tensor], inputs: Tensor, directions: int, most: int | None = None
) -> tuple[Tensor, Tensor, Tensor, torch.dtype]:
    """‖J(x) v‖² and ‖f(x') - f(x'')‖² / 2, averaged over the directions, and the latter's floor.

    Each is (n,). Of what is spread less than the floor a good part is the rounding of the type
    that the outputs were computed in, which is given as well.
    """
    n = len(inputs)
    if n < FEWEST:
        raise Undefined(f"n = {n}: at least {FEWEST} samples a batch are needed")
    if not inputs.is_floating_point():
        raise Undefined(f"the inputs are {inputs.dtype}: there is no derivative along them")
    # Neighbours of samples that come in order would be too much alike.
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    inputs = inputs[order.to(inputs.device)]
    bends, spreads = [], []
    for first, second in _offsets(n, directions):
        direction = (inputs.roll(-first, 0) - inputs.roll(-second, 0)) / math.sqrt(2)
        outputs, derivatives = directional_derivative(function, inputs, direction, limit=most)
        dtype = outputs.dtype
        outputs, derivatives = _flat(outputs), _flat(derivatives)
        step = outputs.roll(-first, 0) - outputs.roll(-second, 0)
        bends.append(derivatives.square().sum(1))
        spreads.append(step.square().sum(1) / 2)
    floors = (_FLOOR * torch.finfo(dtype).eps * outputs).square().sum(1)
    return torch.stack(bends).mean(0), torch.stack(spreads).mean(0), floors, dtype


def _flat(values: Tensor) -> Tensor:
    """Float64 of shape (n, k); raises NotFinite."""
    if values.device.type == "mps":
        values = values.cpu()
    values = values.reshape(len(values), -1).double()
    if not torch.isfinite(values).all():
        raise NotFinite("an output or a derivative of the network is not finite")
    return values


def _coefficient(bends: Tensor, spreads: Tensor, floors: Tensor, dtype: torch.dtype) -> Tensor:
    bend, spread = bends.sum(), spreads.sum()
    if not (torch.isfinite(bend) and torch.isfinite(spread)):
        raise NotFinite("the squares of outputs or derivatives are beyond float64")
    if bend > 0 and spread < floors.sum():
        own = str(dtype).removeprefix("torch.")
        wider = "" if dtype == torch.float64 else ": try --precision float64"
        raise Undefined(f"constant output: its spread is below {own}'s rounding{wider}")
    if spread == 0:
        raise Undefined("constant output")
    if bend == 0:
        raise Undefined(
            "the derivative is zero at every sample though the output varies: the network "
            "rounds, compares or detaches on the way"
        )
    return (bend / spread).sqrt()


def _standard_error(bends: Tensor, spreads: Tensor) -> float:
    """By linearisation of the square root of a ratio of two means over samples (n,)."""
    ratio = bends.sum() / spreads.sum()
    residuals = (bends - ratio * spreads) / spreads.mean()
    error = residuals.std() / math.sqrt(len(bends)) / (2 * ratio.sqrt())
    return float(error)


class NonlinearityCoefficient(Measure):
    """Nonlinearity coefficient of the network as a function: 1 where it is affine.

    The ratio is that of sums over all samples of the run; pairs are made within a batch.
    ``error`` is its standard error, by linearisation, as if pairs were independent.
    """

    name: ClassVar[str] = "nlc"
    probe: ClassVar[str] = "function"
    bounds: ClassVar[tuple[float, float]] = (0.0, math.inf)
    more_means: ClassVar[MoreMeans] = "more nonlinear"
    version: ClassVar[str] = "1"
    options: ClassVar[Mapping[str, Option]] = {
        "directions": Option(
            4, "derivatives a sample, each along the difference of two", minimum=1, maximum=1e6
        )
    }
    source: ClassVar[Source] = Source(
        "G. Philipp, The Nonlinearity Coefficient - A Practical Guide to Neural Architecture "
        "Design, arXiv:2105.12210, 2021",
        "definition of the NLC",
        """@article{philipp2021nonlinearity,
    author  = {Philipp, George},
    title   = {The Nonlinearity Coefficient -- A Practical Guide to Neural Architecture Design},
    journal = {arXiv preprint arXiv:2105.12210},
    year    = {2021}
}""",
    )

    def reset(self) -> None:
        """Forget all batches."""
        self._batches: list[tuple[Tensor, ...]] = []
        self._left_out = 0

    def update(self, observation: FunctionBatch) -> None:
        """Differentiate along the batch's pairs; two numbers a sample are kept."""
        if len(observation.inputs) < FEWEST:
            self._left_out += len(observation.inputs)
            return
        directions = int(self.settings["directions"])
        *terms, self._dtype = _terms(
            observation.function, observation.inputs, directions, observation.limit
        )
        self._batches.append(tuple(term.cpu() for term in terms))

    def compute(self) -> Result:
        """One number for the network, with its standard error."""
        if not self._batches:
            raise Undefined(f"no batch of at least {FEWEST} samples")
        bends, spreads, floors = map(torch.cat, zip(*self._batches, strict=True))
        summary = {
            "value": _coefficient(bends, spreads, floors, self._dtype).item(),
            "error": _standard_error(bends, spreads),
        }
        notes = {"samples left out": self._left_out} if self._left_out else {}
        return Result(summary, n=len(bends), notes=notes)
