"""Rugosity: how much a network's Jacobian changes between neighbouring points."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from nlbench.citation import Source
from nlbench.errors import Undefined
from nlbench.measure import MoreMeans
from nlbench.options import Option
from nlbench.probes.function import FunctionBatch

from .geometric_complexity import GeometricComplexity, squared_jacobian_norms
from .papers import bibtex
from .statistics.rounding import SAMPLES, output_rounding
from .statistics.sample_measure import SampleMeasure
from .statistics.sample_seeds import random_signs, sample_seeds

MAX_ROUNDING = 0.1
"""Maximum rounding of a Jacobian, relative to its change."""

NARROW = 1e-4
"""Relative rounding of outputs from which they count as narrower than float32."""


def jacobian_changes(
    function: Callable[[Tensor], Tensor],
    inputs: Tensor,
    steps: Tensor,
    *,
    directions: int = 16,
    limit: int | None = None,
) -> Tensor:
    """Compute ‖J(x + δ) - J(x)‖, the Frobenius norm of the change of a function's Jacobian.

    It is exact for at most `directions` outputs. For more, its square is estimated without bias;
    see `squared_jacobian_norms`.

    Parameters
    ----------
    function : callable
        Maps inputs (n, ...) to outputs (n, k), sample by sample, differentiable almost everywhere.
    inputs, steps : tensor of shape (n, ...)
        Samples x and steps δ to their neighbours.
    directions : int
        Maximum number of backward passes per sample.
    limit : int, optional
        Number of samples that fit into memory at once; see `FunctionBatch`.

    Returns
    -------
    tensor of shape (n,), float64
        At least 0, in units of the output over those of the input.

    Raises
    ------
    nlbench.NotFinite
        If an output or a derivative is not finite.
    nlbench.Undefined
        If the output doesn't depend on the input through differentiable operations.

    References
    ----------
    D. LeJeune, R. Balestriero, H. Javadi and R. Baraniuk, "Implicit Rugosity Regularization via
    Data Augmentation", 2019.

    Examples
    --------
    >>> x, step = torch.ones(1, 3), torch.tensor([[0.5, 0.0, 0.0]])
    >>> jacobian_changes(lambda x: x.square().sum(1, keepdim=True), x, step)
    tensor([1.], dtype=torch.float64)
    """

    def difference(pairs: Tensor) -> Tensor:
        """Return f(x + δ) - f(x), whose Jacobian in x is the change. Steps are constants."""
        x = pairs[:, 0]
        return function(x + pairs[:, 1].detach()) - function(x)

    pairs = torch.stack([inputs, steps], dim=1)
    limit = None if limit is None else max(1, limit // 2)
    return squared_jacobian_norms(difference, pairs, directions=directions, limit=limit).sqrt()


class Rugosity(SampleMeasure):
    r"""Mean change of the network's Jacobian between each sample and a neighbour.

    An affine network has the value 0. The neighbour is in a random direction.

    Definition
    ----------
    .. math::

        E_x \|J(x + \delta) - J(x)\|_F, \quad \|\delta\| = \varepsilon

    where J is the Jacobian of the outputs.

    Units
    -----
    Units of the output over those of the input.

    Undefined
    ---------
    Inputs that are not floating-point; an output that doesn't depend on the input; a network whose
    backward is not its derivative; one in bfloat16 or float16, or with such parts, whose Jacobian
    changes hardly more than its rounding.

    Cost
    ----
    min(outputs, ``directions``) backward passes through two copies of the batch.

    Limits
    ------
    It grows with ``distance`` and with the outputs, so only networks with the same inputs and
    outputs are comparable. With more than ``directions`` outputs each norm is the root of an
    unbiased estimate of its square, a few percent too small.
    """

    name: ClassVar[str] = "rugosity"
    bounds: ClassVar[tuple[float, float]] = (0.0, math.inf)
    more_means: ClassVar[MoreMeans] = "more nonlinear"
    scale: ClassVar[str] = "grows with the outputs"
    options: ClassVar[Mapping[str, Option]] = {
        "distance": Option(
            0.1,
            "ε, Euclidean distance of the neighbours, in units of the inputs",
            minimum=1e-6,
            maximum=1e6,
        ),
        "directions": GeometricComplexity.options["directions"],
    }
    invariant_to: ClassVar[tuple[str, ...]] = ("batches", "order")
    source: ClassVar[Source] = Source(
        "D. LeJeune, R. Balestriero, H. Javadi, R. G. Baraniuk, "
        '"Implicit Rugosity Regularization via Data Augmentation", 2019',
        "change of the slopes between neighbours, in random directions instead of augmentations",
        bibtex("lejeune2019rugosity"),
    )

    def terms(self, observation: FunctionBatch) -> tuple[Tensor, ...]:
        """Compare the Jacobians at one batch with those at its neighbours."""
        observation.check_derivative("reverse")
        inputs = observation.inputs
        signs = random_signs(inputs, sample_seeds(inputs, self._occurrences))
        steps = signs * (float(self.settings["distance"]) / math.sqrt(inputs[0].numel()))
        changes = jacobian_changes(
            observation.function,
            inputs,
            steps,
            directions=int(self.settings["directions"]),
            limit=observation.limit,
        )
        self._check_rounding(observation, changes)
        return (changes,)

    def _check_rounding(self, observation: FunctionBatch, changes: Tensor) -> None:
        """Raise if the Jacobians of a network in a narrow type change by their rounding."""
        rounding, norm = output_rounding(observation)
        if rounding <= NARROW * norm:
            return
        squares = squared_jacobian_norms(
            observation.function,
            observation.inputs[:SAMPLES],
            directions=int(self.settings["directions"]),
            limit=observation.limit,
        )
        change = changes.mean().item()
        noise = rounding / norm * squares.sqrt().mean().item()
        if noise > MAX_ROUNDING * change:
            share = f"{noise / change:.0%} of" if change else "more than"
            raise Undefined(
                f"rounding is {share} the change of the derivatives; "
                "increase rugosity.distance, or convert the network to a wider type"
            )
