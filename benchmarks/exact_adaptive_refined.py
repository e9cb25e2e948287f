"""Compare the time and boundaries of exact, adaptive and refined tracing.

Published code finds regions adaptively with two passes per region. It is not run here; our adaptive
method does the same (Gamba et al., "Are All Linear Regions Created Equal?", AISTATS 2022,
appendix C). Each method traces the first tenth of each of the eight segments of a closed path (a
300th for ResNet20) on one thread. Processor time is reported, which other load disturbs less than
wall time.

Prints a table and writes ``exact_adaptive_refined.json`` next to this file after each network.

    python benchmarks/exact_adaptive_refined.py [--share X]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from nlbench.probes.lines import observe_paths
from nlbench.probes.lines.paths import closed_paths
from nlbench.subjects.load import load_dataset, load_subject
from nlbench.subjects.spec import SubjectSpec

NETWORKS = {
    "vgg8": ("digits", 0.1),
    "resnet18-w4": ("digits", 0.1),
    "resnet20": ("digits", 0.1 / 30),
}
"""Dataset, and share of each segment for which the adaptive method takes about a minute."""
METHODS = ("exact", "adaptive", "refined")


def compare(name: str, data_name: str, share: float) -> list[dict[str, Any]]:
    subject = load_subject(SubjectSpec(name, "auto", data_name, samples=1), torch.device("cpu"))
    data = load_dataset(data_name)
    path = data.normalize(closed_paths(data.sample(1, split="test", seed=0).images)[0])
    ends = torch.stack([path[:-1], torch.lerp(path[:-1], path[1:], share)], 1)
    rows: list[dict[str, Any]] = []
    for method in METHODS:
        # A short segment first, to warm up.
        short = torch.stack([ends[:1, 0], torch.lerp(ends[:1, 0], ends[:1, 1], 1e-3)], 1)
        list(observe_paths(subject.model, short, method=method, tolerance=1e-3))
        begin = time.process_time()
        traces = [
            segment.trace
            for segment in observe_paths(subject.model, ends, method=method, tolerance=1e-3)
        ]
        seconds = time.process_time() - begin
        missed = sum(trace.notes.get("shorter_than_sensitivity", 0.0) for trace in traces)
        rows.append(
            {
                "network": f"{name}, {subject.facts.weights}",
                "share": share,
                "method": method,
                "boundaries": sum(trace.crossings or 0 for trace in traces),
                "error": sum(getattr(trace, "error", 0.0) for trace in traces),
                "passed_over": missed,
                "processor_seconds": seconds,
                "against_exact": seconds / rows[0]["processor_seconds"] if rows else 1.0,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, help="share of each segment, for all networks")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, (data_name, share) in NETWORKS.items():
        for row in compare(name, data_name, arguments.share or share):
            rows.append(row)
            values = (f"{v:.4g}" if isinstance(v, float) else v for v in row.values())
            print(*(f"{value:>22}" for value in values), flush=True)
        content = {"segments": 8, "rows": rows}
        target = Path(__file__).with_suffix(".json")
        target.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
