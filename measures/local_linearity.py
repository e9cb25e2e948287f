"""Local linearity: how far a network departs from its tangent in a ball around each sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from nlbench.citation import Source
from nlbench.errors import NotFinite, Undefined
from nlbench.introspection.memory import microbatch_sizes
from nlbench.measure import MoreMeans
from nlbench.options import Option
from nlbench.probes.function import FunctionBatch

from .papers import bibtex
from .statistics.rounding import output_rounding
from .statistics.sample_measure import SampleMeasure
from .statistics.sample_seeds import random_signs, sample_seeds

MAX_ROUNDING = 0.01
"""Maximum rounding of an output, relative to the output's change in the ball."""


def tangent_residuals(
    function: Callable[[Tensor], Tensor], inputs: Tensor, steps: Tensor, *, limit: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the departure of a function from its tangent, and its change, at x + δ and x - δ.

    Parameters
    ----------
    function : callable
        Maps inputs (n, ...) to outputs (n, k), sample by sample, differentiable almost everywhere.
    inputs, steps : tensor of shape (n, ...)
        Samples x and steps δ.
    limit : int, optional
        Number of samples that fit into memory at once; see `FunctionBatch`.

    Returns
    -------
    residuals, changes : tensor of shape (n,), float64
        Means over both signs of ‖f(x ± δ) - f(x) ∓ J(x) δ‖, in units of the output, and of
        ‖f(x ± δ) - f(x)‖².

    Raises
    ------
    nlbench.NotFinite
        If an output or a derivative is not finite.
    nlbench.Undefined
        If an operation of the network has no derivative.

    References
    ----------
    C. Qin et al., "Adversarial Robustness through Local Linearization", NeurIPS 2019, equation 5.

    Examples
    --------
    >>> x, step = torch.ones(1, 3), torch.full((1, 3), 0.5)
    >>> tangent_residuals(lambda x: x.square().sum(1, keepdim=True), x, step)[0]
    tensor([0.7500], dtype=torch.float64)
    """
    # Imported here, since listing measures doesn't load the probe.
    from nlbench.probes.function import directional_derivative

    outputs, slopes = directional_derivative(function, inputs, steps, limit=limit)
    outputs = outputs.cpu().double()
    slopes = slopes.cpu().double()
    residuals = torch.zeros(len(inputs), dtype=torch.float64)
    changes = torch.zeros(len(inputs), dtype=torch.float64)
    for sign in (1, -1):
        with torch.no_grad():
            moved = function(inputs + sign * steps).cpu().double()
        change = moved - outputs
        residuals += (change - sign * slopes).norm(dim=1) / 2
        changes += change.square().sum(1) / 2
    if not (torch.isfinite(residuals) & torch.isfinite(changes)).all():
        raise NotFinite("an output or a derivative of the network is not finite")
    return residuals, changes


def gradient_signs(
    function: Callable[[Tensor], Tensor], inputs: Tensor, *, limit: int | None = None
) -> Tensor:
    """Return the signs (n, ...) of the gradient of each sample's largest output.

    Raises
    ------
    nlbench.Undefined
        If the output doesn't depend on the input through differentiable operations.

    Examples
    --------
    >>> gradient_signs(lambda x: x @ torch.tensor([[2.0], [-3.0]]), torch.ones(1, 2))
    tensor([[ 1., -1.]])
    """
    from nlbench.probes.function import input_gradient

    sizes = microbatch_sizes(len(inputs), limit or len(inputs))
    signs = []
    for part in torch.split(inputs, sizes):
        with torch.enable_grad():
            x = part.detach().clone().requires_grad_()
            gradient = input_gradient(function(x).amax(1).sum(), x)
        signs.append(gradient.sign())
    return torch.cat(signs)


def _check_rounding(observation: FunctionBatch, changes: Tensor) -> None:
    """Raise if the rounding of outputs is not small beside their changes."""
    rounding, _ = output_rounding(observation)
    spread = changes.mean().sqrt().item()
    if spread and rounding > MAX_ROUNDING * spread:
        raise Undefined(
            f"rounding is {rounding / spread:.0%} of the output's change in the ball; "
            "increase local-linearity.radius, or convert the network to a wider type"
        )


class LocalLinearity(SampleMeasure):
    r"""Departure of a network from its tangent at the corners of a small cube around each sample.

    ``residual`` is the mean departure in the units of the output, ``spread`` the root mean square
    change of the output, and ``value`` their ratio, so an affine network has the value 0.

    Definition
    ----------
    .. math::

        \frac{E \|f(x + \delta) - f(x) - J(x) \delta\|}
             {\sqrt{E \|f(x + \delta) - f(x)\|^2}}

    over the samples x and both signs of a step δ, whose components are ±ε.

    Units
    -----
    None. ``residual`` and ``spread`` have the unit of the output.

    Undefined
    ---------
    Inputs that are not floating-point; an output that doesn't change in the ball, or hardly more
    than its rounding; a network whose derivative is not its own.

    Cost
    ----
    One directional derivative and two forward passes per batch, one backward pass more for
    ``directions=gradient``.

    Limits
    ------
    It depends on ``radius``, in the units of the inputs that the network receives: normalised
    images have a standard deviation of about 1. Rounding makes it about 1e-6 for affine networks.
    """

    name: ClassVar[str] = "local-linearity"
    version: ClassVar[str] = "2"
    bounds: ClassVar[tuple[float, float]] = (0.0, math.inf)
    more_means: ClassVar[MoreMeans] = "more nonlinear"
    options: ClassVar[Mapping[str, Option]] = {
        "radius": Option(0.1, "ε, in units of the inputs", minimum=1e-6, maximum=1e6),
        "directions": Option(
            "random",
            "signs of the step: random, or of the gradient of the largest output",
            choices=("random", "gradient"),
        ),
    }
    invariant_to: ClassVar[tuple[str, ...]] = ("batches", "order")
    source: ClassVar[Source] = Source(
        "C. Qin, J. Martens, S. Gowal, D. Krishnan, K. Dvijotham, A. Fawzi, S. De, R. Stanforth, "
        'P. Kohli, "Adversarial Robustness through Local Linearization", NeurIPS 2019',
        "equation 5, local linearity at random corners instead of the worst one, of the outputs",
        bibtex("qin2019adversarial"),
    )

    def terms(self, observation: FunctionBatch) -> tuple[Tensor, ...]:
        """Compare the network with its tangent around one batch."""
        observation.check_derivative("forward")
        inputs = observation.inputs
        if self.settings["directions"] == "gradient":
            observation.check_derivative("reverse")
            signs = gradient_signs(observation.function, inputs, limit=observation.limit)
        else:
            signs = random_signs(inputs, sample_seeds(inputs, self._occurrences))
        steps = float(self.settings["radius"]) * signs
        terms = tangent_residuals(observation.function, inputs, steps, limit=observation.limit)
        _check_rounding(observation, terms[1])
        return terms

    def statistics(self, *terms: Tensor) -> dict[str, float]:
        """Return the ratio of the mean departure to the root mean square change."""
        residuals, changes = terms
        residual = residuals.mean()
        spread = changes.mean().sqrt()
        if spread == 0:
            raise Undefined("the output does not change in the ball")
        return {
            "value": (residual / spread).item(),
            "residual": residual.item(),
            "spread": spread.item(),
        }
