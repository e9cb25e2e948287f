"""Set `scipy.integrate.quad_vec` beside the quadrature of a network's distance to its chord.

Both integrate the same functions to the same tolerance: closed forms, and small smooth networks on
a segment. What a value costs is a forward pass, of many inputs at once where they are asked for
together; so it is counted how many values and how many calls each takes. The error is the largest
over logits, relative to a midpoint rule of 200,000 values. `quad_vec` is given the distance of all
logits and keeps its tolerance in their maximum norm: a tolerance for each logit, and the parts
above and below the chord, would be more work.

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


def on_segment(network: nn.Module, start: torch.Tensor, end: torch.Tensor) -> Function:
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
        yield f"{act.__name__}, 16-64-64-10", on_segment(nn.Sequential(*layers), *ends)
    torch.manual_seed(0)
    convolutions = nn.Conv2d(1, 16, 3), nn.GELU(), nn.Conv2d(16, 32, 3, stride=2), nn.GELU()
    cnn = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(128, 10))
    yield "GELU, convolutions", on_segment(cnn, *2 * torch.randn(2, 1, 1, 8, 8).double())


def compare(function: Function, tolerance: float) -> Iterator[tuple[str, int, int, float]]:
    chord = function(np.array([0.0, 1.0]))
    counts = [0, 0]

    def counted(t: Array) -> Array:
        counts[0] += len(t)
        counts[1] += 1
        return function(t)

    def distance(t: Array) -> Array:
        return np.abs(counted(t) - (chord[0] + t[:, None] * (chord[1] - chord[0])))

    places = (np.arange(200_000) + 0.5) / 200_000
    exact = np.mean([distance(part).mean(0) for part in np.array_split(places, 100)], 0)
    counts[:] = 0, 0
    own = smooth_estimate(counted, tolerance=tolerance)
    found = (own.above + own.below).numpy()
    yield "own", *counts, float(np.max(np.abs(found / exact - 1)))
    for rule in ("gk15", "gk21"):
        counts[:] = 0, 0
        found, _ = quad_vec(
            lambda t: distance(np.array([t]))[0], 0, 1, epsabs=0, epsrel=tolerance, norm="max",
            limit=4096, quadrature=rule,
        )  # fmt: skip
        yield f"quad_vec {rule}", *counts, float(np.max(np.abs(found / exact - 1)))


def main() -> None:
    torch.set_num_threads(1)
    for name, function in functions():
        for tolerance in (1e-3, 1e-6):
            for how, values, calls, error in compare(function, tolerance):
                print(
                    f"{name:<20} {tolerance:g}  {how:<14} {values:6} values  {calls:6} calls  "
                    f"error {error:.1e}"
                )


if __name__ == "__main__":
    main()
