"""Geometric complexity: the mean squared Frobenius norm of the network's Jacobian."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from nlbench.citation import Source
from nlbench.errors import NotFinite
from nlbench.introspection.memory import halve_on_oom, microbatch_sizes
from nlbench.measure import MoreMeans
from nlbench.options import Option
from nlbench.probes.function import FunctionBatch

from .papers import bibtex
from .statistics.sample_measure import SampleMeasure
from .statistics.sample_seeds import sample_seeds


def squared_jacobian_norms(
    function: Callable[[Tensor], Tensor],
    inputs: Tensor,
    *,
    directions: int = 16,
    limit: int | None = None,
    occurrences: Counter[bytes] | None = None,
) -> Tensor:
    """Compute the squared Frobenius norm ‖J(x)‖² of a function's Jacobian at each sample.

    It is Σ_j ‖J(x)ᵀ u_j‖² over the k unit vectors u_j, with one backward pass each. If there are
    more than `directions` outputs, it is estimated without bias from `directions` random
    orthonormal vectors, scaled by k / directions. Each sample has vectors of its own, so the
    spread over samples contains the error of the estimate.

    Parameters
    ----------
    function : callable
        Maps inputs (n, ...) to outputs (n, k), sample by sample, differentiable almost everywhere.
    inputs : tensor of shape (n, ...)
        Floating-point.
    directions : int
        Maximum number of backward passes per sample.
    limit : int, optional
        Number of samples that fit into memory at once; see `FunctionBatch`.
    occurrences : Counter, optional
        How often each sample occurred in earlier batches, updated by this function. The vectors
        depend on a sample and its number of earlier occurrences, not on its batch or position.

    Returns
    -------
    tensor of shape (n,), float64
        At least 0, in squared units of the output over those of the input.

    Raises
    ------
    nlbench.NotFinite
        If an output or a derivative is not finite.
    nlbench.Undefined
        If the output doesn't depend on the input through differentiable operations.

    References
    ----------
    B. Dherin, M. Munn, M. Rosca and D. Barrett, "Why neural networks find simple solutions: the
    many regularizers of geometric complexity", NeurIPS 2022.

    Examples
    --------
    >>> weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> squared_jacobian_norms(lambda x: x @ weight + 5, torch.randn(2, 2))
    tensor([30., 30.], dtype=torch.float64)
    """
    seeds = sample_seeds(inputs, Counter() if occurrences is None else occurrences)

    def attempt(size: int) -> Tensor:
        sizes = microbatch_sizes(len(inputs), size)
        parts = zip(torch.split(inputs, sizes), torch.split(seeds, sizes), strict=True)
        return torch.cat([_norms(function, part, of_part, directions) for part, of_part in parts])

    norms, _ = halve_on_oom(attempt, min(limit or len(inputs), len(inputs)), inputs.device)
    if not torch.isfinite(norms).all():
        raise NotFinite("an output or a derivative of the network is not finite")
    return norms


def _norms(
    function: Callable[[Tensor], Tensor], inputs: Tensor, seeds: Tensor, directions: int
) -> Tensor:
    from nlbench.probes.function import input_gradient

    with torch.enable_grad():
        x = inputs.detach().clone().requires_grad_()
        outputs = function(x)
        k = outputs.shape[1]
        count = min(directions, k)
        # NaN if an output is not finite, since its derivative may be zero.
        total = 0 * outputs.detach().cpu().double().sum(1)
        for index, direction in enumerate(_directions(k, count, seeds), 1):
            product = input_gradient(outputs, x, direction.to(outputs), retain_graph=index < count)
            total += product.flatten(1).cpu().double().square().sum(1)
    return total * (k / count)


def _directions(k: int, count: int, seeds: Tensor) -> Iterator[Tensor]:
    """Yield `count` directions (n, k), orthonormal for each sample: unit vectors, or random ones.

    Random directions are different rows of the cosine transform, with random signs in each column.
    The mean of u uᵀ over both is the identity divided by k.
    """
    if count == k:
        for direction in torch.eye(k, dtype=torch.float64):
            yield direction.expand(len(seeds), k)
        return
    rows = torch.empty(len(seeds), count, dtype=torch.float64)
    signs = torch.empty(len(seeds), k, dtype=torch.int8)
    for sample, seed in enumerate(seeds.tolist()):
        generator = torch.Generator().manual_seed(seed)
        rows[sample] = torch.randperm(k, generator=generator)[:count].double()
        signs[sample] = 2 * torch.randint(2, (k,), generator=generator, dtype=torch.int8) - 1
    angles = (torch.arange(k, dtype=torch.float64) + 0.5) * (math.pi / k)
    for row in rows.T:
        scale = torch.where(row == 0, math.sqrt(1 / k), math.sqrt(2 / k))
        yield signs * (scale[:, None] * torch.cos(row[:, None] * angles))


class GeometricComplexity(SampleMeasure):
    r"""Mean squared Frobenius norm of the network's Jacobian over the samples.

    The standard error contains that of random directions. For an affine network the value is the
    squared norm of its matrix, so the measure has no direction.

    Definition
    ----------
    .. math::

        E_x \|J(x)\|_F^2

    where J is the Jacobian of the outputs.

    Units
    -----
    Squared units of the output over those of the input.

    Undefined
    ---------
    Inputs that are not floating-point; an output that doesn't depend on the input; a network whose
    backward is not its derivative.

    Cost
    ----
    min(outputs, ``directions``) backward passes per batch.

    Limits
    ------
    It is ‖W‖²_F for an affine network, so it measures steepness. It depends on the outputs' units.
    """

    name: ClassVar[str] = "geometric-complexity"
    # 2: each sample has random directions of its own.
    version: ClassVar[str] = "2"
    bounds: ClassVar[tuple[float, float]] = (0.0, math.inf)
    more_means: ClassVar[MoreMeans] = "neither"
    scale: ClassVar[str] = "grows with the outputs"
    options: ClassVar[Mapping[str, Option]] = {
        "directions": Option(
            16,
            "maximum number of backward passes per sample; exact for up to as many outputs",
            minimum=1,
            maximum=1e6,
        )
    }
    invariant_to: ClassVar[tuple[str, ...]] = ("batches", "order")
    source: ClassVar[Source] = Source(
        'B. Dherin, M. Munn, M. Rosca, D. Barrett, "Why neural networks find simple solutions: '
        'the many regularizers of geometric complexity", NeurIPS 2022',
        "definition of the geometric complexity, on the outputs",
        bibtex("dherin2022geometric"),
    )

    def terms(self, observation: FunctionBatch) -> tuple[Tensor, ...]:
        """Compute the norms of one batch."""
        observation.check_derivative("reverse")
        norms = squared_jacobian_norms(
            observation.function,
            observation.inputs,
            directions=int(self.settings["directions"]),
            limit=observation.limit,
            occurrences=self._occurrences,
        )
        return (norms,)
