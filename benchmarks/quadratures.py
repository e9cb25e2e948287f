"""Compare nlbench's quadrature with `scipy.integrate.quad_vec`.

Both integrate the distance of a function to its chord to the same tolerance, for closed forms and
for small smooth networks on a segment. A value costs a forward pass, and a call evaluates a batch,
so both values and calls are counted. The error is the maximum over logits, relative to a midpoint
rule of 200,000 values. `quad_vec` keeps its tolerance in the maximum norm over logits; a tolerance
for each logit, and the parts above and below the chord, would cost more.

Prints a table.

    python benchmarks/quadratures.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.integrate import quad_vec
from torch import nn

from nlbench.probes.lines.quadrature import smooth_estimate

Array = NDArray[np.float64]
Function = Callable[[Array], Array]


def restricted(network: nn.Module, start: torch.Tensor, end: torch.Tensor) -> Function:
    """Return a network as a function on a segment."""
    network = network.double()

    def function(t: Array) -> Array:
        shares = torch.as_tensor(t).reshape(-1, *[1] * (start.ndim - 1))
        with torch.inference_mode():
            return np.asarray(network(torch.lerp(start, end, shares)).numpy())

    return function


def functions() -> Iterator[tuple[str, Function]]:
    for waves in (3, 20):
        yield f"sine, {waves} waves", lambda t, w=waves: np.sin(2 * math.pi * w * t)[:, None]
    for act in (nn.Tanh, nn.GELU):
        torch.manual_seed(0)
        layers = nn.Linear(16, 64), act(), nn.Linear(64, 64), act(), nn.Linear(64, 10)
        ends = 3 * torch.randn(2, 1, 16, dtype=torch.float64)
        yield f"{act.__name__}, 16-64-64-10", restricted(nn.Sequential(*layers), *ends)
    torch.manual_seed(0)
    convolutions = nn.Conv2d(1, 16, 3), nn.GELU(), nn.Conv2d(16, 32, 3, stride=2), nn.GELU()
    cnn = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(128, 10))
    yield "GELU, convolutions", restricted(cnn, *2 * torch.randn(2, 1, 1, 8, 8).double())


def compare(function: Function, tolerance: float) -> Iterator[tuple[str, int, int, float]]:
    chord = function(np.array([0.0, 1.0]))
    counts = [0, 0]

    def counted(t: Array) -> Array:
        counts[0] += len(t)
        counts[1] += 1
        return function(t)

    def distance(t: Array) -> Array:
        return np.abs(counted(t) - (chord[0] + t[:, None] * (chord[1] - chord[0])))

    points = (np.arange(200_000) + 0.5) / 200_000
    exact = np.mean([distance(part).mean(0) for part in np.array_split(points, 100)], 0)
    counts[:] = 0, 0
    estimate = smooth_estimate(counted, tolerance=tolerance)
    integral = (estimate.above + estimate.below).numpy()
    yield "nlbench", *counts, float(np.max(np.abs(integral / exact - 1)))
    for rule in ("gk15", "gk21"):
        counts[:] = 0, 0
        integral, _ = quad_vec(
            lambda t: distance(np.array([t]))[0], 0, 1, epsabs=0, epsrel=tolerance, norm="max",
            limit=4096, quadrature=rule,
        )  # fmt: skip
        yield f"quad_vec {rule}", *counts, float(np.max(np.abs(integral / exact - 1)))


def main() -> None:
    torch.set_num_threads(1)
    for name, function in functions():
        for tolerance in (1e-3, 1e-6):
            for method, values, calls, error in compare(function, tolerance):
                print(
                    f"{name:<20} {tolerance:g}  {method:<14} {values:6} values  {calls:6} calls  "
                    f"error {error:.1e}"
                )


if __name__ == "__main__":
    main()
