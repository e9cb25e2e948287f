"""Measure the reference networks and write ``reports/reference_networks.json``.

torchvision's networks are initialised under seed 0 and measured on synthetic images; vgg8 is
measured initialised and as it ships, and the trained networks of installed packages (``make zoo``)
on their own data. Takes about 15 minutes; ``python docs/reference_networks.py 'zoo/*'`` measures
only these networks, and keeps the recorded values of the others.
"""

from __future__ import annotations

import fnmatch
import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import nlbench
from nlbench.reports.population import FILE, STATISTICS
from nlbench.reports.tables import MeasureInfo

DIGITS = 5
SITES = ("affinity", "cka", "r2", "pathlength")
NETWORKS = (
    "alexnet resnet18 resnet34 resnet50 resnet101 resnext50_32x4d wide_resnet50_2 vgg11 "
    "vgg11_bn vgg16 vgg16_bn densenet121 densenet169 googlenet squeezenet1_0 "
    "squeezenet1_1 mobilenet_v2 mobilenet_v3_small mobilenet_v3_large shufflenet_v2_x0_5 "
    "shufflenet_v2_x1_0 mnasnet0_5 mnasnet1_0 efficientnet_b0 efficientnet_b1 "
    "efficientnet_v2_s regnet_x_400mf regnet_y_400mf regnet_x_800mf convnext_tiny "
    "convnext_small swin_t swin_v2_t vit_b_16 vit_b_32 inception_v3"
)
SMALL = (
    "alexnet resnet18 resnet34 vgg11 vgg11_bn squeezenet1_1 mobilenet_v2 "
    "shufflenet_v2_x1_0 mnasnet1_0 regnet_x_400mf densenet121 convnext_tiny "
    "efficientnet_b0 mobilenet_v3_small"
)
ZOO = (
    "smollm2-135m minilm-l6 efficientnet-lite0 mtcnn-pnet mtcnn-rnet mtcnn-onet crepe-tiny "
    "neuralfoil-large rxnmapper silero-vad"
)


def build_population(runs: Iterable[nlbench.Run]) -> dict[str, Any]:
    """Build the content of ``reference_networks.json`` from runs.

    Only measures with a direction are included, each with one version and one set of options.

    Raises
    ------
    ValueError
        If two runs used different versions or options.
    """
    population: dict[str, Any] = {}
    for run in runs:
        table = run.scores
        rows = table[(table["place"] == "") & (table["status"] == "ok")]
        for measure, info in run.manifest["measures"].items():
            if not MeasureInfo.from_dict(info).sense:
                continue
            settings = {key: info.get(key) for key in ("version", "options")}
            entry = population.setdefault(measure, {**settings, "values": {}})
            if any(entry[key] != settings[key] for key in settings):
                raise ValueError(f"{measure} has a different version or options in {run.name}")
            statistic = STATISTICS.get(measure, "value")
            selected = rows[(rows["measure"] == measure) & (rows["statistic"] == statistic)]
            columns = (selected[name] for name in ("model", "weights", "value"))
            for model, weights, value in zip(*columns, strict=True):
                entry["values"][f"{model} {weights}"] = float(f"{value:.{DIGITS}g}")
    return population


def requests() -> list[nlbench.Request]:
    """Return what is measured, in double precision."""
    common = {"data": ("synthetic",), "weights": "init", "precision": "float64"}
    return [
        nlbench.Request(SITES, named(NETWORKS), samples=128, **common),
        nlbench.Request(
            ("nlc", "absdev"),
            named(SMALL),
            samples=16,
            settings={"synthetic.size": 64, "lines.number": 2, "lines.anchors": 4},
            **common,
        ),
        nlbench.Request((*SITES, "nlc", "absdev"), ("vgg8",), weights="init", precision="float64"),
        nlbench.Request((*SITES, "nlc", "absdev"), ("vgg8",), precision="float64"),
        nlbench.Request(
            ("affinity", "cka", "r2"),
            tuple(f"zoo/{name}" for name in ZOO.split()),
            data=("auto",),
            samples=128,
        ),
    ]


def named(networks: str) -> tuple[str, ...]:
    return tuple(f"torchvision/{name}" for name in networks.split())


def main(pattern: str = "*") -> None:
    chosen = [
        replace(request, models=models)
        for request in requests()
        if (models := tuple(fnmatch.filter(request.models, pattern)))
    ]
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            nlbench.run(request, Path(folder, str(number))) for number, request in enumerate(chosen)
        ]
        population = build_population(runs)
    if pattern != "*":
        recorded = json.loads(FILE.read_text())
        for measure, entry in population.items():
            recorded[measure]["values"] |= entry["values"]
        population = recorded
    FILE.write_text(json.dumps(population, indent=1) + "\n")
    for measure, entry in population.items():
        print(f"{measure}: {len(entry['values'])} networks", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
