"""Measure every measure on a planted ladder and write ``docs/planted_ladder.csv``.

The networks are initialised ``ladders/cnn`` with leaky ReLUs, from slope 1 (affine) to 0 (ReLU).
``python docs/planted_ladder.py NAME...`` measures only these and keeps the other rows. All take
about a minute.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pandas as pd

import nlbench
from nlbench import registry

FILE = Path(__file__).with_suffix(".csv")
SLOPES = (1.0, 0.9, 0.75, 0.5, 0.25, 0.1, 0.0)


def main() -> None:
    entries = registry.entries("measures").items()
    ours = [
        name for name, entry in entries if entry.claims[0].value.startswith("nlbench.measures.")
    ]
    names = tuple(sys.argv[1:] or ours)
    has_lines = any(registry.load("measures", name).probe == "lines" for name in names)
    request = nlbench.Request(
        names,
        tuple(f"ladders/cnn-slope{slope:g}" for slope in SLOPES),
        data=("digits",),
        weights="init",
        seeds=(0, 1, 2),
        samples=128,
        settings={"lines.paths": "pairs", "lines.number": 2} if has_lines else {},
    )
    with tempfile.TemporaryDirectory() as folder:
        run = nlbench.run(request, folder)
    table = run.scores.query("place == '' and statistic == 'value' and status == 'ok'").copy()
    table["slope"] = table["model"].str.extract(r"slope([\d.]+)", expand=False).astype(float)
    about = run.manifest["measures"]
    table["version"] = [about[name]["version"] for name in table["measure"]]
    table["value"] = [f"{value:.6g}" for value in table["value"]]
    columns = ["measure", "version", "slope", "seed", "value"]
    table = table[columns]
    if FILE.is_file():
        kept = pd.read_csv(FILE, dtype=str)
        table = pd.concat([kept[~kept["measure"].isin(request.measures)], table.astype(str)])
    table.sort_values(columns[:4]).to_csv(FILE, index=False, lineterminator="\n")


if __name__ == "__main__":
    main()
