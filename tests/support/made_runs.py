"""Runs of any number of made-up networks."""

from dataclasses import replace

import numpy as np
from made_records import make_record

from nlbench.measure import Result, Value
from nlbench.store.manifest import Manifest
from nlbench.store.run import Run

FAMILIES = ("vgg", "resnet", "convnext", "vit", "mobilenet", "densenet", "efficientnet", "swin")
KINDS = {"convnext": "gelu", "vit": "gelu", "swin": "gelu", "mobilenet": "hardswish",
         "efficientnet": "silu"}  # fmt: skip
MEASURES = {
    "affinity": ("sites", "less nonlinear", (0.0, 1.0)),
    "r2": ("sites", "less nonlinear", (None, 1.0)),
    "cka": ("sites", "less nonlinear", (0.0, 1.0)),
    "norm": ("sites", "neither", (0.0, None)),
    "sparsity": ("sites", "neither", (-1.0, 1.0)),
    "entropy": ("sites", "neither", (None, None)),
    "absdev": ("lines", "more nonlinear", (0.0, None)),
    "density": ("lines", "more nonlinear", (0.0, None)),
    "curvature": ("lines", "more nonlinear", (0.0, None)),
    "pathlength": ("graph", "more nonlinear", (0.0, None)),
    "units": ("graph", "more nonlinear", (0.0, None)),
    "nlc": ("function", "more nonlinear", (0.0, None)),
}


def measure_facts(name):
    probe, more_means, bounds = MEASURES[name]
    return {
        "name": name,
        "description": f"Made-up values of {name}.",
        "probe": probe,
        "bounds": list(bounds),
        "more_means": more_means,
        "version": "1",
        "options": {},
        "exact": probe == "graph" or None,
        "source": {
            "citation": f"A. Author. {name.title()}. 2024.",
            "equation": "eq. 1",
            "bibtex": f"@article{{{name},\n  title = {{{name.title()}}}\n}}",
        },
    }


def with_replicates(result, random, has_paths=False, error=0.01):
    """Add replicates with a standard error of about a fraction of each value."""

    def drawn(value):
        groups = value * (1 + error * np.sqrt(8) * random.normal(0, 1, 8))
        groups += value - groups.mean()
        return tuple((groups.sum() - groups) / 7)

    if result.status != "ok":
        return result
    values = list(result.values)
    if not has_paths:  # a path has no error of its own
        values = [
            replace(v, replicates=drawn(v.statistics["value"])) if v.status == "ok" else v
            for v in values
        ]
    known = [v.replicates for v in values if v.replicates]
    whole = tuple(np.mean(known, axis=0)) if known else drawn(result.summary["value"])
    return replace(result, values=tuple(values), replicates=whole)


def make_run(networks=8, measures=tuple(MEASURES), seeds=1, sites=None, paths=8):
    """Build a run in memory, with numbers that depend only on the arguments."""
    random = np.random.default_rng(networks)
    errors = np.random.default_rng(networks + 1)
    records = []
    for number in range(networks):
        family = FAMILIES[number % len(FAMILIES)]
        provider = "torchvision/" if number % 3 else ""
        size = (8, 18, 34, 50, 101, 121, 152)[number // len(FAMILIES) % 7]
        model = f"{provider}{family}{size}"
        if number // len(FAMILIES) >= 7:
            model += f"-v{number // 56}"
        depth = sites or int(np.clip(4 + size // 2, 5, 60))
        level = random.uniform(0.5, 0.95)
        for seed in range(seeds):
            scores = np.clip(
                level
                + 0.1 * np.sin(np.arange(depth) / (2 + number % 5))
                + random.normal(0, 0.04, depth),
                0.02,
                1,
            )
            made = [_record(model, family, seed, name, scores, paths, random) for name in measures]
            records += [
                record
                if record.probe.name == "graph"
                else replace(
                    record,
                    result=with_replicates(record.result, errors, record.probe.name == "lines"),
                )
                for record in made
            ]
    machine = {"python": "3.11.9", "torch": "2.8.0", "packages": {"nlbench": "0.1.0"}}
    manifest = {
        "nlbench": "0.1.0",
        "created": "2026-03-04T10:20:30+00:00",
        "command": "nlbench run --measures '*' --model many",
        "request": {"measures": list(measures)},
        "environment": machine,
        "device": "cpu",
        "seconds": 83.2,
        **Manifest().describe_records(records),
    }
    return Run(manifest, records)


def _record(model, family, seed, name, scores, paths, random):
    probe = MEASURES[name][0]
    depth = len(scores)
    kind = KINDS.get(family, "relu")
    names = [f"layer{i // 6}.{i % 6 // 2}.act{i % 2 + 1}" for i in range(depth)]
    kinds = {site: "relu" if i % 4 == 0 else kind for i, site in enumerate(names)}
    return make_record(
        key=f"{model}-{seed}-{name}".replace("/", "-"),
        subject={
            "model": model,
            "weights": "trained",
            "data": "digits",
            "seed": seed,
            "weights_hash": "0f" * 32,
            "parameters": 100_000 + depth,
            "samples": 512,
            "sample_hash": "5a" * 32,
            "preprocessing": "8x8 grey images",
            "split": "test",
        },
        measure=measure_facts(name),
        probe={"name": probe, "options": {}, **({"kinds": kinds} if probe == "sites" else {})},
        machine={"device": "cpu", "dtype": "float32", "environment": {"python": "3.11.9"}},
        result=_result(name, family, names, scores, paths, random),
        seconds=0.25,
    )


def _result(name, family, names, scores, paths, random):
    if MEASURES[name][0] == "sites":
        if name == "r2" and family == "vit":
            return Result.missing("undefined", "512 samples for 768 features: the fit is exact")
        scale = {"norm": 30.0, "entropy": -2.0}.get(name, 1.0)
        values = []
        for place, score in zip(names, scores, strict=True):
            if name == "affinity" and family == "efficientnet" and random.random() < 0.2:
                values.append(Value.missing(place, "undefined", "constant output", 512))
                continue
            number = scale * float(np.clip(score + random.normal(0, 0.02), 0, 1))
            spread = abs(float(random.normal(0, 0.02)))
            values.append(Value(place, {"value": number, "std": spread, "batches": 4.0}, 512))
        return Result.of(values)
    if MEASURES[name][0] == "lines":
        if name == "density" and family in ("vit", "swin", "convnext"):
            return Result.missing("undefined", "gelu at layer0.0.act1: not piecewise affine")
        level = 100 * (1.05 - scores.mean())
        numbers = random.gamma(6, level, paths)
        return Result.of({f"path{i}": float(number) for i, number in enumerate(numbers)}, n=8)
    if name == "nlc" and family == "swin":
        return Result.missing("failed", "RuntimeError: out of memory on the device")
    return Result({"value": float(len(scores)) if name == "pathlength" else 3 * len(scores)})
