"""How far a network is from its first-order Taylor polynomial in the weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from nlbench.errors import RequestError, Undefined, nearest
from nlbench.introspection.attention import disable_fused_attention, without_fast_path
from nlbench.introspection.model_copy import double_copy, precise_device
from nlbench.introspection.model_output import validated_outputs
from nlbench.introspection.model_state import evaluation_mode
from nlbench.measure.replicates import GROUPS, group_index, standard_error
from nlbench.probes.function.derivatives import check_derivative, directional_derivative
from nlbench.representations import debiased_cka, label_subject, load_recorded

if TYPE_CHECKING:
    import pandas as pd

    from nlbench.store.run import Run
    from nlbench.subjects.facts import SubjectFacts

MAX_SAMPLES = 256
"""Maximum number of samples."""

DIRECTIONS = 64
"""Default number of random directions that sketch a tangent kernel."""

SINCE = ("previous", "first")
"""The checkpoint that each one is compared with: the one before, or the first."""


@dataclass(frozen=True)
class WeightLinearity:
    """How nonlinear a network is in its weights between two checkpoints.

    Parameters
    ----------
    value : float
        ‖f(θ₁) − f(θ₀) − J(θ₀)(θ₁ − θ₀)‖² / ‖f(θ₁) − f(θ₀)‖² over all samples and outputs. 0 if the
        outputs are linear in the weights; it may exceed 1.
    error : float
        Standard error for the choice of samples; NaN for fewer than eight.
    kernel_distance : float
        1 − CKA(K₀, K₁) of the empirical tangent kernels J Jᵀ, with the traces over the outputs.
    kernel_error : float
        Standard error for the choice of samples and of random directions.
    n : int
        Number of samples.

    References
    ----------
    J. Lee et al., "Wide Neural Networks of Any Depth Evolve as Linear Models Under Gradient
    Descent", NeurIPS 2019, equation 5; S. Fort et al., "Deep Learning Versus Kernel Learning",
    NeurIPS 2020, kernel distance in section 3.
    """

    value: float
    error: float
    kernel_distance: float
    kernel_error: float
    n: int


def weight_linearity(
    start: nn.Module | Mapping[str, Tensor],
    end: nn.Module,
    inputs: Tensor,
    *,
    directions: int = DIRECTIONS,
    seed: int = 0,
) -> WeightLinearity:
    """Compare a network with its linearisation in the weights at an earlier checkpoint.

    Computed in float64 and in evaluation mode. Both networks have the buffers of `end`, such as
    running statistics of batch normalisation, so that only the weights differ.

    Parameters
    ----------
    start, end : torch.nn.Module
        The network at two checkpoints, with parameters of the same names and shapes. Both stay
        unchanged. Of `start`, the parameters by name are enough.
    inputs : tensor of shape (n, ...)
        Samples, of which the first 256 are used.
    directions : int
        Number of random directions in the space of weights, at least 8, that the kernels are
        sketched with.
    seed : int
        Seed of the directions.

    Returns
    -------
    WeightLinearity

    Raises
    ------
    nlbench.RequestError
        If the networks' parameters differ in name or shape, or there are no samples.
    nlbench.Undefined
        If the outputs don't change, or have no derivative with respect to the weights.

    Examples
    --------
    A layer is linear in its weights.

    >>> start, end = nn.Linear(3, 2), nn.Linear(3, 2)
    >>> result = weight_linearity(start, end, torch.randn(16, 3))
    >>> round(result.value, 9), round(result.kernel_distance, 9)
    (0.0, 0.0)
    """
    if directions < GROUPS:
        raise RequestError(f"directions must be at least {GROUPS}, got {directions}")
    if not len(inputs):
        raise RequestError("there are no samples")
    network = _LinearisedNetwork(end, inputs[:MAX_SAMPLES])
    before = network.read_parameters(start)
    after = network.read_parameters(end)
    step = {name: after[name] - value for name, value in before.items()}
    network.check_derivative(before, step)
    first, tangent = network.derivative(before, step)
    change = network.outputs(after) - first
    residuals = (change - tangent).square().sum(1)
    squares = change.square().sum(1)
    rounding = torch.finfo(torch.float64).eps * first.abs().amax()
    if not bool(squares.sum() > len(first) * rounding**2):
        raise Undefined("the outputs are the same at both checkpoints")
    group = group_index(torch.arange(len(first)))
    totals = torch.stack([residuals, squares], 1)
    left_out = [totals[group != index].sum(0) for index in range(GROUPS)]
    ratios = [float(total[0] / total[1]) for total in left_out if total[1] > 0]
    kernels = [network.kernel(weights, directions, seed) for weights in (before, after)]
    distance, distances = _distance(*kernels)
    return WeightLinearity(
        float(residuals.sum() / squares.sum()),
        _error(ratios, len(first)),
        distance,
        _error(distances, len(first)),
        len(first),
    )


def _error(replicates: list[float], n: int) -> float:
    error = standard_error(replicates) if min(len(replicates), n) >= GROUPS else None
    return math.nan if error is None else error


def _distance(first: Tensor, second: Tensor) -> tuple[float, list[float]]:
    """Return 1 − CKA of kernels that are sums over groups of directions, (groups, n, n).

    The replicates leave out a group of samples and one of directions.
    """
    n = first.shape[1]
    groups = group_index(np.arange(n))
    distance = _kernel_distance(first.sum(0), second.sum(0))
    replicates = []
    for index in range(len(first)):
        kept = np.flatnonzero(groups != index)
        others = [kernel.sum(0) - kernel[index] for kernel in (first, second)]
        replicates.append(_kernel_distance(*(kernel[kept][:, kept] for kernel in others)))
    return distance, replicates


def _kernel_distance(first: Tensor, second: Tensor) -> float:
    grams = [(kernel / kernel.trace())[None].cpu() for kernel in (first, second)]
    return 1 - float(debiased_cka(grams)[0, 0])


class _LinearisedNetwork:
    """A network in float64 as a function of its parameters, on fixed samples."""

    def __init__(self, model: nn.Module, inputs: Tensor) -> None:
        self._model = double_copy(model)
        inputs = inputs.to(precise_device(self._model, inputs))
        self._inputs = inputs.double() if inputs.is_floating_point() else inputs
        self._shapes = {name: value.shape for name, value in self._model.named_parameters()}

    def read_parameters(self, model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a checkpoint's parameters in float64."""
        own = dict(model.named_parameters() if isinstance(model, nn.Module) else model)
        different = [
            name
            for name in {**self._shapes, **own}
            if name not in own or own[name].shape != self._shapes.get(name)
        ]
        if different:
            raise RequestError(f"the parameter '{different[0]}' isn't in both networks alike")
        return {name: value.detach().double() for name, value in own.items()}

    def outputs(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the outputs (n, k)."""
        with evaluation_mode(self._model), without_fast_path(), disable_fused_attention():
            output = functional_call(self._model, dict(parameters), (self._inputs.clone(),))
            return validated_outputs(output, len(self._inputs)).flatten(1).double()

    def derivative(
        self, parameters: Mapping[str, Tensor], direction: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs and their derivative along a direction, both (n, k)."""

        def along(t: Tensor) -> Tensor:
            moved = {name: value + t * direction[name] for name, value in parameters.items()}
            return self.outputs(moved)

        zero = torch.zeros(1, dtype=torch.float64, device=self._inputs.device)
        return directional_derivative(along, zero, torch.ones_like(zero))

    def check_derivative(
        self, parameters: Mapping[str, Tensor], direction: Mapping[str, Tensor]
    ) -> None:
        """Raise if PyTorch's derivative isn't that of the outputs, on average over samples."""

        def along(points: Tensor) -> Tensor:
            rows = []
            for t in points.flatten():
                moved = {name: value + t * direction[name] for name, value in parameters.items()}
                rows.append(self.outputs(moved).sum(0))
            return torch.stack(rows)

        start = torch.zeros(1, 1, dtype=torch.float64, device=self._inputs.device)
        check_derivative(along, start, mode="forward")

    def kernel(self, parameters: Mapping[str, Tensor], directions: int, seed: int) -> Tensor:
        """Return a sketch of the tangent kernel, one term per group of directions, (8, n, n).

        The derivatives along random directions u are features: the mean of (J u)(J u)ᵀ is J Jᵀ.
        """
        generator = torch.Generator().manual_seed(seed)
        n = len(self._inputs)
        kernel = torch.zeros(GROUPS, n, n, dtype=torch.float64, device=self._inputs.device)
        for index in range(directions):
            direction = {
                name: torch.randn(value.shape, generator=generator, dtype=value.dtype).to(value)
                for name, value in parameters.items()
            }
            features = self.derivative(parameters, direction)[1]
            kernel[group_index(index)] += features @ features.T
        return kernel


def weight_linearity_of_run(
    run: Run, *, since: str = "previous", directions: int = DIRECTIONS, device: str = "auto"
) -> pd.DataFrame:
    """Compare each network of a run with its previous or first checkpoint, in the order of the run.

    The networks are loaded again, which runs their code, and must have the recorded weights and
    samples. Columns are ``model, data, seed, start, end``, the fields of `WeightLinearity`, and
    ``reason`` where they are undefined.
    """
    import pandas as pd

    check_since(since)
    subjects = {label_subject(record.subject): record.subject for record in run.records}
    series: dict[tuple[Any, ...], list[SubjectFacts]] = {}
    for facts in subjects.values():
        series.setdefault((facts.model, facts.data, facts.seed), []).append(facts)

    def compare(start: SubjectFacts, end: SubjectFacts) -> WeightLinearity:
        if run.models is not None:
            return run.models.weight_linearity(start, end, directions)
        first, second = (load_recorded(run, facts, device) for facts in (start, end))
        return weight_linearity(first.model, second.model, second.inputs, directions=directions)

    rows = []
    for members in series.values():
        for before, end in itertools.pairwise(members):
            start = members[0] if since == "first" else before
            rows.append(comparison_row(start.weights, end, partial(compare, start, end)))
    if not rows:
        raise RequestError(f"{run.name} has no network with two checkpoints")
    return pd.DataFrame(rows)


def check_since(since: str) -> None:
    """Raise unless `since` names an earlier checkpoint."""
    if since not in SINCE:
        raise RequestError(f"since: unknown '{since}'{nearest(since, SINCE)}")


def comparison_row(
    start: str, end: SubjectFacts, compute: Callable[[], WeightLinearity]
) -> dict[str, Any]:
    """Return a row of the table: two checkpoints and their comparison, or why it is undefined."""
    row = {"model": end.model, "data": end.data, "seed": end.seed}
    row |= {"start": start, "end": end.weights}
    try:
        return {**row, **vars(compute()), "reason": ""}
    except Undefined as error:
        undefined = WeightLinearity(math.nan, math.nan, math.nan, math.nan, 0)
        return {**row, **vars(undefined), "reason": str(error)}
