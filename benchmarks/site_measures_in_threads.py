"""What all six site measures cost on pairs as wide as ResNet50's, by the number of threads.

A network of ReLUs alone, 49 of ResNet50's widths, on 128 rows a batch: the forward pass costs next
to nothing, so that what is measured are the measures, as a GPU would feed them. Prints wall-clock
and processor seconds a batch: what a run of several takes beyond a run of one, the fits that r2
makes of all samples at the end among it.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

import nlbench
from nlbench.execution import numerics

MEASURES = ["affinity", "r2", "cka", "norm", "sparsity", "entropy"]
STAGES = [(64, 3), (128, 4), (256, 6), (512, 3)]
WIDTHS = [64, *(width for w, blocks in STAGES for width in [w, w, 4 * w] * blocks)]


class Activations(nn.Module):
    """One ReLU a width, on as many columns of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.acts = nn.ModuleList(nn.ReLU() for _ in WIDTHS)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Give all outputs."""
        return [act(x[:, :width]) for act, width in zip(self.acts, WIDTHS, strict=True)]


def seconds(batches: int, size: int) -> tuple[float, float]:
    inputs = torch.randn(batches * size, max(WIDTHS), generator=torch.Generator().manual_seed(0))
    wall, processor = time.perf_counter(), time.process_time()
    settings = {"sites.batch": size}
    run = nlbench.evaluate(Activations(), inputs, MEASURES, settings=settings)
    wrong = [f"{r.measure['name']}: {r.result.reason}" for r in run.records if not r.is_done]
    if wrong:
        raise SystemExit("; ".join(wrong))
    return time.perf_counter() - wall, time.process_time() - processor


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--threads", default="1,2")
    given.add_argument("--batch", type=int, default=128)
    given.add_argument("--batches", type=int, default=3)
    asked = given.parse_args()
    print(f"{'threads':>8} {'wall a batch':>13} {'processor':>10}")
    for threads in map(int, asked.threads.split(",")):
        numerics.MOST_THREADS = threads
        torch.set_num_threads(threads)
        few, many = (seconds(n, asked.batch) for n in (1, asked.batches + 1))
        wall, processor = ((b - a) / asked.batches for a, b in zip(few, many, strict=True))
        print(f"{threads:>8} {wall:>13.2f} {processor:>10.2f}")


if __name__ == "__main__":
    main()
