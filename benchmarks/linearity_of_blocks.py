"""Compare the time of the streamed linearity of a block with that of the published formula.

The published code centres the tokens, divides them by their Frobenius norm and solves by a
singular value decomposition of all of them. Times are processor seconds of one thread, medians of
alternating runs. Prints a table and writes it as JSON next to this file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from nlbench.measures.linearity import linearity_score, linearity_statistics

TOLERANCE = 1e-8


def published(x: Tensor, y: Tensor) -> float:
    x, y = x - x.mean(0), y - y.mean(0)
    x, y = x / torch.linalg.norm(x), y / torch.linalg.norm(y)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    return float(1 - (x @ (v.T @ ((u.T @ y) / s[:, None])) - y).square().sum())


def tokens(n: int, d: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(0, -2, d)
    x = torch.randn(n, d, generator=generator) * scale @ torch.randn(d, d, generator=generator)
    return x, x + 0.5 * x.tanh() + 0.1 * torch.randn(n, d, generator=generator)


def seconds(compute: Callable[[], object]) -> float:
    start = time.process_time()
    compute()
    return time.process_time() - start


def measure(n: int, d: int, repeats: int) -> dict[str, float]:
    x, y = tokens(n, d)
    wide = x.double(), y.double()
    exact, single = published(*wide), published(x, y)
    score = linearity_score(x, y).item()
    if abs(score - exact) > TOLERANCE:
        raise SystemExit(f"n = {n}, d = {d}: {score} differs from {exact}")
    runs: dict[str, Callable[[], object]] = {
        "streamed": lambda: linearity_score(*wide),
        "all_statistics": lambda: linearity_statistics(*wide),
        "published_float64": lambda: published(*wide),
        "published_float32": lambda: published(x, y),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(seconds(run))
    medians = {name: statistics.median(values) for name, values in times.items()}
    pairs = zip(times["published_float64"], times["streamed"], strict=True)
    return {
        "n": n,
        "d": d,
        "repeats": repeats,
        "error": abs(score - exact),
        "published_float32_error": abs(single - exact),
        **{name: round(value, 3) for name, value in medians.items()},
        "ratio_by_pairs": round(statistics.median(a / b for a, b in pairs), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(n, d, arguments.repeats) for n, d in ((4096, 256), (16384, 1024))]
    for row in rows:
        print("  ".join(f"{name} {value:g}" for name, value in row.items()))
    path = Path(__file__).with_suffix(".json")
    path.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
