"""What six site measures cost together, and each alone: how much of it they share.

A network of ReLUs alone, 17 of ResNet18's widths, on batches of 128 rows: the forward pass costs
next to nothing. Prints processor seconds on one core, of the six together, of each alone, and the
ratio of the first to the sum of the others, each with the cost of the pass itself taken off.
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
    """One ReLU a width, on as many columns of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.acts = nn.ModuleList(nn.ReLU() for _ in WIDTHS)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Give all outputs."""
        return [act(x[:, :width]) for act, width in zip(self.acts, WIDTHS, strict=True)]


@nlbench.site_measure()
def nothing(x: Tensor, y: Tensor) -> float:
    """Cost of the pass."""
    return 0.0


def seconds(inputs: Tensor, measures: list[object]) -> float:
    begin = time.process_time()
    run = nlbench.evaluate(Activations(), inputs, measures, settings={"sites.batch": 128})
    taken = time.process_time() - begin
    wrong = [record.result.reason for record in run.records if record.result.status != "ok"]
    if wrong:
        raise SystemExit("; ".join(wrong))
    return taken


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--batches", type=int, default=5)
    given.add_argument("--repeats", type=int, default=3)
    asked = given.parse_args()
    torch.set_num_threads(1)
    inputs = torch.randn(
        asked.batches * 128, max(WIDTHS), generator=torch.Generator().manual_seed(0)
    )
    sets: dict[str, list[object]] = {"nothing": [nothing], "together": list(MEASURES)}
    sets |= {name: [name] for name in MEASURES}
    seconds(inputs[:128], [nothing])
    least = {
        name: min(seconds(inputs, measures) for _ in range(asked.repeats))
        for name, measures in sets.items()
    }
    bare = least.pop("nothing")
    own = {name: taken - bare for name, taken in least.items()}
    together = own.pop("together")
    for name, taken in own.items():
        print(f"{name:>10} {taken:8.3f} s")
    print(f"{'together':>10} {together:8.3f} s, {together / sum(own.values()):.2f} of their sum")


if __name__ == "__main__":
    main()
