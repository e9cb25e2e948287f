"""Ask whether networks trained on noisy labels are more nonlinear, path by path.

Traces the same closed paths through VGG8 trained on the digits as they are and on digits of
which 40 % have another class's label, and counts the paths on which the second network has the
larger absolute deviation, and the paths on which it has the larger density of linear regions:
for the two networks of a seed, and for a clean network of one seed beside a noisy one of another.
Each seed trains a pair of its own (a minute or two each on one core); seed 0 has its pair
shipped. Prints a table and writes ``noisy_labels_deviate_more.json`` beside this file.

    python benchmarks/noisy_labels_deviate_more.py [--paths N] [--seeds 0,1,2]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nlbench.measures.absdev import absolute_deviation
from nlbench.models.datasets.digits import digits
from nlbench.models.networks.vgg import vgg8
from nlbench.models.training.recipes import noisy_labels, vanilla
from nlbench.probes.lines.lines import trace_segments
from nlbench.probes.lines.paths import closed_paths
from nlbench.subjects.model import model_info
from nlbench.subjects.weights import load_weights

CHECKPOINTS = Path(next(iter(model_info(vgg8).trained.values()))).parent


def pair(seed: int) -> tuple[nn.Module, nn.Module]:
    """Networks trained on clean and on noisy labels."""
    files = [CHECKPOINTS / f"vgg8-digits{ending}.safetensors" for ending in ("", "-noise40")]
    if seed == 0 and all(file.is_file() for file in files):
        networks = []
        for file in files:
            network = vgg8()
            load_weights(network, file)
            networks.append(network.eval())
        return networks[0], networks[1]
    data = digits()
    clean = vanilla.train(vgg8, data, seed=seed)
    noisy = noisy_labels.train(vgg8, data, seed=seed)
    if not noisy.is_reached:
        raise SystemExit(f"seed {seed}: the noisy labels were not all fitted")
    return clean.model, noisy.model


def along(network: nn.Module, path: Tensor) -> tuple[float, int]:
    """Absolute deviation (norm over the logits) and crossings of one path."""
    deviation, crossings = torch.zeros(0), 0
    for trace in trace_segments(network, path[:-1], path[1:]):
        found = absolute_deviation(trace)
        deviation = found if not len(deviation) else deviation + found
        crossings += trace.regions - 1
    return float(deviation.norm()), crossings


def higher(rows: Sequence[dict[str, Any]], measure: str, *, same_seed: bool) -> float:
    """Share of paths on which the network with noisy labels has the higher value."""
    compared = [
        noisy > clean
        for one in rows
        for other in rows
        if (one is other) == same_seed
        for clean, noisy in zip(one[measure]["clean"], other[measure]["noisy"], strict=True)
    ]
    return sum(compared) / len(compared)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--paths", type=int, default=20)
    parser.add_argument("--anchors", type=int, default=4)
    parser.add_argument("--radius", type=float, default=4.0)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--split", default="train")
    arguments = parser.parse_args()

    data = digits()
    images = data.sample(arguments.paths, split=arguments.split, seed=0).images
    paths = data.normalize(closed_paths(images, arguments.anchors, arguments.radius)).double()
    rows: list[dict[str, Any]] = []
    for seed in map(int, arguments.seeds.split(",")):
        start = time.perf_counter()
        clean, noisy = pair(seed)
        found = [[along(network, path) for path in paths] for network in (clean, noisy)]
        deviations, densities = (
            torch.tensor([[values[i] for values in one] for one in found]) for i in (0, 1)
        )
        rows.append(
            {
                "seed": seed,
                "deviation": {"clean": deviations[0].tolist(), "noisy": deviations[1].tolist()},
                "density": {"clean": densities[0].tolist(), "noisy": densities[1].tolist()},
                "seconds": round(time.perf_counter() - start, 1),
            }
        )
        shares = {m: higher(rows[-1:], m, same_seed=True) for m in ("deviation", "density")}
        rows[-1] |= {f"{measure}_higher": share for measure, share in shares.items()}
        print(
            f"seed {seed}: higher with noisy labels on {shares['deviation']:.0%} of {len(paths)} "
            f"paths by absolute deviation, {shares['density']:.0%} by density; "
            f"{rows[-1]['seconds']} s"
        )
    settings = {
        **vars(arguments),
        "model": "vgg8",
        "data": "digits",
        "label_noise": 0.4,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    table: dict[str, Any] = {"settings": settings, "seeds": rows}
    if len(rows) > 1:
        table["across_seeds"] = {
            measure: higher(rows, measure, same_seed=False) for measure in ("deviation", "density")
        }
        said = ", ".join(f"{share:.0%} by {name}" for name, share in table["across_seeds"].items())
        print(f"a clean network of one seed beside a noisy one of another: {said}")
    output = Path(__file__).with_suffix(".json")
    output.write_text(json.dumps(table, indent=1) + "\n")
    print(f"written to {output}")


if __name__ == "__main__":
    main()
