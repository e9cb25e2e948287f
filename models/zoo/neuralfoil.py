"""NeuralFoil's perceptrons, which predict an airfoil's aerodynamics, and inputs for them."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from nlbench.citation import Source
from nlbench.options import Option
from nlbench.subjects.data import Dataset, dataset
from nlbench.subjects.samples import InMemoryItems

from .catalogue import MEMBERS, Member, PackagedFile

INPUTS = 25
OUTPUTS = 198

DISTRIBUTION = PackagedFile(
    MEMBERS["neuralfoil-xxxlarge"].file.package,
    "nn_weights_and_biases/scaled_input_distribution.npz",
    "63a33149c902ad01ecf537dd2d127d9e7ffbf86527893f4dc76f25f7087a3573",
)


def build(member: Member) -> nn.Sequential:
    """Build the perceptron in a member's file, freshly initialised.

    NeuralFoil evaluates this network twice, on an airfoil and on its mirror image.
    """
    state = read(member.file.path)
    widths = [INPUTS, *(len(tensor) for name, tensor in state.items() if name.endswith("bias"))]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


def read(path: Path) -> dict[str, Tensor]:
    """Read the state dict."""
    with np.load(path) as arrays:
        return {
            name.removeprefix("net."): torch.from_numpy(arrays[name].astype(np.float32))
            for name in arrays
        }


@cache
def _distribution(path: Path) -> tuple[np.ndarray, np.ndarray]:
    with np.load(path) as arrays:
        return arrays["mean_inputs_scaled"], arrays["cov_inputs_scaled"]


@dataset(
    options={
        "count": Option(512, "airfoils per split", minimum=1, maximum=1_000_000),
        "seed": Option(0, "seed for the draws", minimum=0, maximum=2**32 - 1),
    }
)
def airfoils(count: int = 512, seed: int = 0) -> Dataset:
    """Airfoils in flow: samples from a normal distribution fitted to NeuralFoil's training inputs.

    The 25 inputs are shape parameters, angle of attack, Reynolds number and properties of the
    transition to turbulence, scaled as in training. Mean and covariance come from the package.
    There are no labels.
    """
    mean, covariance = _distribution(DISTRIBUTION.verified())
    # Not by Cholesky, since the covariance is singular up to rounding.
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(np.maximum(values, 0))
    draws = np.random.RandomState(seed).standard_normal((2 * count, INPUTS))
    rows = torch.from_numpy((mean + draws @ root.T).astype(np.float32))
    return Dataset(
        "airfoils",
        InMemoryItems(rows[count:]),
        InMemoryItems(rows[:count]),
        shape=(INPUTS,),
        classes=OUTPUTS,
        preprocessing=(
            f"normal distribution with the mean and covariance of NeuralFoil's scaled training "
            f"inputs, numpy RandomState({seed}); the first {count} draws for test"
        ),
        source=Source(MEMBERS["neuralfoil-xxxlarge"].source.citation),
        labelled=False,
    )
