r"""Ask how much of a network can be made linear, and what that costs.

Linearises a network on the digits for several ω and seeds, after training and from the start,
and says whether accuracy stays within 2 points of the trained network's while 30 % of the units
become linear, whether path length falls with every step of ω, and which mode is more accurate at
the same path length. The runs lie in FOLDER, with their reports; what is finished there is not
done again. Prints a table and writes ``linearising_keeps_accuracy.json`` beside this file.

    python benchmarks/linearising_keeps_accuracy.py [--model vgg8] [--seeds 0,1,2] [--out FOLDER]
    python benchmarks/linearising_keeps_accuracy.py --model resnet18-w8 \
        --omegas 0.001,0.003,0.005,0.007 --start-omegas ""
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path

import torch

from nlbench.models.training.linearise import LinearisingRequest, linearise
from nlbench.models.training.train import suited_recipe
from nlbench.store.run_folder import Run

FEWEST_LINEAR, MOST_LOST = 0.3, 0.02


def summary(run: Run) -> list[dict[str, object]]:
    """Mean and spread over seeds for each mode and ω."""
    rows = run.scores[(run.scores["place"] == "") & (run.scores["statistic"] == "value")]
    values = {
        (w, m): v for w, m, v in rows[["weights", "measure", "value"]].itertuples(index=False)
    }
    groups: dict[tuple[str, float], list[str]] = {}
    for subject in run.manifest["subjects"]:
        made = subject["weights_metadata"]
        key = (made["recipe"], float(made["omega"])) if "omega" in made else ("reference", -1.0)
        groups.setdefault(key, []).append(subject["weights"])
    table = []
    for (mode, omega), weights in sorted(groups.items()):
        row: dict[str, object] = {"mode": mode, "omega": None if omega < 0 else omega}
        for measure in ("accuracy", "linear-units", "pathlength"):
            found = [values[w, measure] for w in weights]
            row[measure] = statistics.fmean(found)
            row[f"{measure}_std"] = statistics.pstdev(found)
        table.append(row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="vgg8")
    parser.add_argument("--omegas", default="0,0.0003,0.001,0.003,0.01")
    parser.add_argument("--start-omegas", default="0.0003,0.001,0.003")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--base-recipe", default="auto")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    seeds = tuple(map(int, arguments.seeds.split(",")))
    folder = arguments.out / f"linearised-{arguments.model}"
    seconds = {}
    for mode, omegas in (
        ("post-training", arguments.omegas),
        ("from-start", arguments.start_omegas),
    ):
        if not omegas:
            continue
        start = time.perf_counter()
        request = LinearisingRequest(
            arguments.model,
            "digits",
            mode,
            suited_recipe(arguments.model, arguments.base_recipe),
            omegas=tuple(map(float, omegas.split(","))),
            seeds=seeds,
            changes={"epochs": arguments.epochs * (1 if mode == "post-training" else 3)},
        )
        run = linearise(request, folder)
        seconds[mode] = round(time.perf_counter() - start, 1)
    run.report(folder / "report.html")
    table = summary(run)
    for row in table:
        print(
            f"{row['mode']:14} ω {row['omega']!s:8} accuracy {row['accuracy']:.4f} ± "
            f"{row['accuracy_std']:.4f}  linear {row['linear-units']:.3f}  path length "
            f"{row['pathlength']:.3f} ± {row['pathlength_std']:.3f}"
        )
    reference = next(row for row in table if row["mode"] == "reference")
    post = [row for row in table if row["mode"] == "post-training"]
    kept = [
        row["omega"]
        for row in post
        if row["linear-units"] >= FEWEST_LINEAR
        and reference["accuracy"] - row["accuracy"] <= MOST_LOST
    ]
    lengths = [row["pathlength"] for row in post]
    falls = all(later < earlier for earlier, later in itertools.pairwise(lengths))
    print(f"within 2 points with at least 30 % of units linear: ω {kept or 'nowhere'}")
    print(f"path length falls with every step of ω: {falls}; seconds: {seconds}")
    output = Path(__file__).with_suffix(".json")
    found = json.loads(output.read_text()) if output.exists() else {}
    found[arguments.model] = {
        "settings": {
            **{name: value for name, value in vars(arguments).items() if name != "out"},
            "threads": torch.get_num_threads(),
        },
        "table": table,
        "kept": kept,
        "falls": falls,
        "seconds": seconds,
    }
    output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
