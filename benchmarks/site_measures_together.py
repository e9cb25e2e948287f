"""Compare the cost of six site measures together with the sum of their costs alone.

The network consists of 17 ReLUs of ResNet18's widths on batches of 128 rows, so that the forward
pass costs almost nothing. Prints processor seconds on one core for the six together and for each
alone, without the cost of the pass, and the ratio of the first to the sum of the others.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

import nlbench

MEASURES = ["affinity", "r2", "cka", "norm", "sparsity", "entropy"]
WIDTHS = [64] * 5 + [128] * 4 + [256] * 4 + [512] * 4


class Activations(nn.Module):
    """One ReLU for each width, on as many columns of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.acts = nn.ModuleList(nn.ReLU() for _ in WIDTHS)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return all outputs."""
        return [act(x[:, :width]) for act, width in zip(self.acts, WIDTHS, strict=True)]


@nlbench.site_measure()
def nothing(x: Tensor, y: Tensor) -> float:
    """Return 0, to measure the cost of the pass."""
    return 0.0


def seconds(inputs: Tensor, measures: list[object]) -> float:
    begin = time.process_time()
    run = nlbench.evaluate(Activations(), inputs, measures, settings={"sites.batch": 128})
    elapsed = time.process_time() - begin
    failures = [record.result.reason for record in run.records if record.result.status != "ok"]
    if failures:
        raise SystemExit("; ".join(failures))
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    inputs = torch.randn(
        arguments.batches * 128, max(WIDTHS), generator=torch.Generator().manual_seed(0)
    )
    sets: dict[str, list[object]] = {"nothing": [nothing], "together": list(MEASURES)}
    sets |= {name: [name] for name in MEASURES}
    seconds(inputs[:128], [nothing])
    fastest = {
        name: min(seconds(inputs, measures) for _ in range(arguments.repeats))
        for name, measures in sets.items()
    }
    bare = fastest.pop("nothing")
    costs = {name: elapsed - bare for name, elapsed in fastest.items()}
    together = costs.pop("together")
    for name, cost in costs.items():
        print(f"{name:>10} {cost:8.3f} s")
    print(f"{'together':>10} {together:8.3f} s, {together / sum(costs.values()):.2f} of their sum")


if __name__ == "__main__":
    main()
