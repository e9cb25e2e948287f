"""Compare the time of the affinity score of one layer with that of its direct definition.

Prints a table and writes it as JSON next to this file. Times are processor seconds for one thread
(the default) and wall-clock seconds for several. They are medians of alternating runs. The direct
computation uses scikit-learn's Ledoit-Wolf estimator, SciPy's matrix roots and POT's exact
transport. Both depend on the kernels that OpenBLAS chose for the processor, which are recorded.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import ot
import torch
from scipy.linalg import inv, sqrtm
from sklearn.covariance import LedoitWolf
from threadpoolctl import threadpool_info, threadpool_limits

from nlbench.measures.affinity import affinity_score

# Samples, features, repeats.
SIZES = ((512, 512, 25), (2048, 512, 15), (512, 2048, 3))
TOLERANCE = 1e-6
PAUSE_SECONDS = 0.3
RIDGE = 1e-6


def direct_score(x: np.ndarray, y: np.ndarray) -> float:
    n, d = x.shape
    covariances = [LedoitWolf().fit(data).covariance_ for data in (x, y)]
    source, target = (s + RIDGE * np.trace(s) / d * np.eye(d) for s in covariances)
    root = np.real(sqrtm(target))
    matrix = root @ inv(np.real(sqrtm(root @ source @ root))) @ root
    mapped = (x - x.mean(0)) @ matrix.T + y.mean(0)
    weights = np.full(n, 1 / n)
    cost = ot.emd2(weights, weights, ot.dist(mapped, y), numItermax=10**7)
    return 1 - math.sqrt(cost / (2 * np.trace(target)))


def layer(n: int, d: int) -> np.ndarray:
    r = np.random.default_rng(n + d)
    return r.standard_normal((n, d)) @ r.standard_normal((d, d)) / math.sqrt(d)


def timed(compute: Callable[[], float], clock: Callable[[], float]) -> tuple[float, float]:
    # Idle threads keep their core busy for a while.
    time.sleep(PAUSE_SECONDS)
    start = clock()
    value = compute()
    return value, clock() - start


def measure(n: int, d: int, repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    x = layer(n, d)
    y = np.maximum(x, 0)
    inputs, outputs = torch.tensor(x), torch.tensor(y)
    ours: list[float] = []
    direct: list[float] = []
    for _ in range(repeats):
        score, seconds = timed(lambda: affinity_score(inputs, outputs).item(), clock)
        ours.append(seconds)
        expected, seconds = timed(lambda: direct_score(x, y), clock)
        direct.append(seconds)
        if abs(score - expected) > TOLERANCE:
            raise SystemExit(f"n = {n}, d = {d}: {score} differs from {expected}")
    seconds_ours, seconds_direct = statistics.median(ours), statistics.median(direct)
    return {
        "n": n,
        "d": d,
        "repeats": repeats,
        "score": score,
        "difference": abs(score - expected),
        "seconds": round(seconds_ours, 4),
        "seconds_direct": round(seconds_direct, 4),
        "ratio": round(seconds_direct / seconds_ours, 1),
    }


def kernels() -> list[str]:
    libraries = [library for library in threadpool_info() if "architecture" in library]
    return sorted({f"OpenBLAS for {library['architecture']}" for library in libraries})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    threads = parser.parse_args().threads
    clock = time.process_time if threads == 1 else time.perf_counter
    torch.set_num_threads(threads)
    affinity_score(torch.randn(64, 64), torch.randn(64, 64))
    with threadpool_limits(threads):
        rows = [measure(*size, clock) for size in SIZES]
    print(f"{'n':>6} {'d':>6} {'score':>9} {'difference':>11} {'direct/ours':>12}")
    for row in rows:
        print(
            f"{row['n']:>6} {row['d']:>6} {row['score']:>9.6f} {row['difference']:>11.1e} "
            f"{row['ratio']:>11.1f}x"
        )
    print(f"{', '.join(kernels())}; threads: {threads}")
    result = {"threads": threads, "kernels": kernels(), "layers": rows}
    path = Path(__file__).with_suffix(".json")
    if threads > 1:
        path = path.with_stem(f"{path.stem}_{threads}_threads")
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
