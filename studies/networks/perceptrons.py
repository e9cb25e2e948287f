"""Random perceptrons from the neural-redshift experiment, for the dataset ``grid``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nlbench.citation import Source
from nlbench.errors import RequestError
from nlbench.subjects.model import model

if TYPE_CHECKING:
    from torch import nn

REDSHIFT = Source(
    citation=(
        "D. Teney, A. M. Nicolicioiu, V. Hartmann, E. Abbasnejad. Neural Redshift: Random Networks "
        "are not Random Functions. CVPR, 2024. As revisited by Q. Bouniot et al., whose slides "
        "state the scores."
    ),
    equation="section 4 and figure 4 of the affinity-score paper",
)

HIDDEN_UNITS = 40
WEIGHT_SHIFT = 0.05
WEIGHT_SCALE = 6.0


def redshift_network(
    inputs: int = 2,
    outputs: int = 1,
    *,
    activation: str = "relu",
    scale: float = 1.0,
    lowered: float = 0.0,
    depth: int = 3,
) -> nn.Sequential:
    """Build a random multilayer perceptron with 40 units per hidden layer.

    Weights are drawn from ``scale`` · U(-s - lowered, s - lowered), with Glorot's bound
    s = sqrt(6 / (fan-in + fan-out)), and biases from U(-1, 1). The experiment has three hidden
    layers.

    Parameters
    ----------
    activation : {"relu", "tanh", "gelu"}
    scale : float
        Factor by which the weights are multiplied; the paper uses 1 and 6.
    lowered : float
        Amount by which both bounds are lowered; the paper uses 0 and 0.05.
    depth : int
        Number of hidden layers.

    Examples
    --------
    >>> import torch
    >>> redshift_network()(torch.zeros(5, 2)).shape
    torch.Size([5, 1])
    """
    from torch import nn

    modules: Mapping[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}
    layers: list[nn.Module] = []
    widths = (inputs, *[HIDDEN_UNITS] * depth, outputs)
    for fan_in, fan_out in itertools.pairwise(widths):
        linear = nn.Linear(fan_in, fan_out)
        bound = math.sqrt(6 / (fan_in + fan_out))
        nn.init.uniform_(linear.weight, scale * (-bound - lowered), scale * (bound - lowered))
        nn.init.uniform_(linear.bias, -1, 1)
        layers += [linear, modules[activation]()]
    return nn.Sequential(*layers[:-1])


def perceptron(
    activation: str, weights: str, *, recipe: str = "vanilla", **settings: Any
) -> Callable[..., nn.Sequential]:
    """Return a builder of `redshift_network` with a description of its weights."""

    def build(num_classes: int = 1, input_shape: tuple[int, ...] = (2,)) -> nn.Sequential:
        return redshift_network(
            vector_length(input_shape), num_classes, activation=activation.lower(), **settings
        )

    build.__doc__ = f"Random perceptron of the neural-redshift experiment: {activation}, {weights}."
    return model(source=REDSHIFT, recipe=recipe)(build)


def vector_length(shape: tuple[int, ...]) -> int:
    """Return the length of the input vectors. Raise a RequestError if inputs aren't vectors."""
    if len(shape) != 1:
        raise RequestError(f"expected vectors, such as the points of the dataset grid, got {shape}")
    return shape[0]


redshift_mlp = perceptron("ReLU", "Glorot weights")
"""Random perceptron of the neural-redshift experiment: ReLU, Glorot weights."""

redshift_mlp_tanh = perceptron("tanh", "Glorot weights")
"""Random perceptron of the neural-redshift experiment: tanh, Glorot weights."""

redshift_mlp_x6 = perceptron("ReLU", "weights times 6", scale=WEIGHT_SCALE)
"""Random perceptron of the neural-redshift experiment: ReLU, weights times 6."""

redshift_mlp_tanh_x6 = perceptron("tanh", "weights times 6", scale=WEIGHT_SCALE)
"""Random perceptron of the neural-redshift experiment: tanh, weights times 6."""

redshift_mlp_shifted = perceptron("ReLU", "weights lowered by 0.05", lowered=WEIGHT_SHIFT)
"""Random perceptron of the neural-redshift experiment: ReLU, weights lowered by 0.05."""

redshift_mlp_shifted_tanh = perceptron("tanh", "weights lowered by 0.05", lowered=WEIGHT_SHIFT)
"""Random perceptron of the neural-redshift experiment: tanh, weights lowered by 0.05."""

redshift_mlp_shifted_x6 = perceptron(
    "ReLU", "weights lowered, times 6", scale=WEIGHT_SCALE, lowered=WEIGHT_SHIFT
)
"""Random perceptron of the neural-redshift experiment: ReLU, weights lowered, times 6."""

redshift_mlp_shifted_tanh_x6 = perceptron(
    "tanh", "weights lowered, times 6", scale=WEIGHT_SCALE, lowered=WEIGHT_SHIFT
)
"""Random perceptron of the neural-redshift experiment: tanh, weights lowered, times 6."""
