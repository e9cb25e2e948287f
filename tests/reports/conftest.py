"""Made-up runs with the attributes that reports read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from made_scores import records_of

from nlbench.store.record import Record
from nlbench.store.run_folder import COLUMNS

DETAILS: dict[str, dict[str, Any]] = {
    "affinity": {
        "description": "How close each activation is to its best affine approximation.",
        "probe": "sites",
        "bounds": [0.0, 1.0],
        "more_means": "less nonlinear",
        "version": "1",
        "options": {"shrinkage": "ledoit-wolf", "ridge": 1e-6},
        "source": {
            "citation": "Bouniot, Redko, Mallasto et al., The affinity score, 2024",
            "equation": "eq. 5",
            "bibtex": "@article{affinity,\n  title = {Affinity},\n  url = {https://example.org/a}\n}",
        },
    },
    "absdev": {
        "description": "Area between the network along a path and its chord.",
        "probe": "lines",
        "bounds": [0.0, None],
        "more_means": "more nonlinear",
        "version": "2",
        "options": {},
        "source": {
            "citation": "Gamba et al., 2022",
            "equation": "eq. 3",
            "bibtex": "@article{absdev}",
        },
    },
    "pathlength": {
        "description": "Active nonlinear units on a random path.",
        "probe": "graph",
        "bounds": [0.0, None],
        "more_means": "more nonlinear",
        "version": "1",
        "options": {"normalized": True},
        "source": {"citation": "", "equation": "", "bibtex": ""},
    },
}


@dataclass
class FakeRun:
    """What reports read of a run, with the records of a tidy table."""

    name: str = "first"
    path: Path | None = None
    scores: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=list(COLUMNS)))
    manifest: dict[str, Any] = field(default_factory=dict)

    @property
    def records(self) -> list[Record]:
        return records_of(self.scores, self.manifest.get("measures") or {})


def cell_rows(
    subject: tuple[str, str, str, int],
    measure: str,
    values: dict[str, float | str],
    *,
    std: float | None = None,
    n: int = 128,
) -> list[tuple[Any, ...]]:
    """Rows of one cell; a text in place of a number is the reason why there is none."""
    numbers = [v for v in values.values() if not isinstance(v, str)]
    rows: list[tuple[Any, ...]] = []

    def add(place: str, statistic: str, value: float, status: str = "ok", reason: str = "") -> None:
        rows.append((*subject, measure, place, statistic, value, n, status, reason))

    if numbers:
        add("", "value", float(np.mean(numbers)))
        add("", "std", float(np.std(numbers)))
        add("", "min", min(numbers))
        add("", "max", max(numbers))
    else:
        add("", "value", np.nan, "undefined", "no place has a value")
    for place, value in values.items():
        if isinstance(value, str):
            add(place, "value", np.nan, "undefined", value)
            continue
        add(place, "value", value)
        if std is not None:
            add(place, "std", std)
            add(place, "batches", 4.0)
    return rows


def missing_row(
    subject: tuple[str, str, str, int], measure: str, status: str, reason: str
) -> list[tuple[Any, ...]]:
    """The one row of a cell without a number."""
    return [(*subject, measure, "", "value", np.nan, 0, status, reason)]


def frame(rows: Sequence[tuple[Any, ...]]) -> pd.DataFrame:
    """Rows as a tidy table."""
    # As objects: with pyarrow installed pandas makes its own strings of names, and those can't
    # hold what UTF-8 can't.
    table = pd.DataFrame(list(rows), columns=list(COLUMNS), dtype=object)
    return table.astype({"value": float, "n": int, "seed": int}) if len(table) else table


def manifest_of(scores: pd.DataFrame, measures: Sequence[str] = tuple(DETAILS)) -> dict[str, Any]:
    """A manifest that fits the scores."""
    subjects = scores[["model", "weights", "data", "seed"]].drop_duplicates()
    return {
        "nlbench": "0.1.0",
        "created": "2026-03-04T10:20:30+00:00",
        "seconds": 83.2,
        "command": "nlbench run --measures affinity,absdev,pathlength --model vgg8",
        "request": {"measures": list(measures)},
        "environment": {
            "python": "3.11.9",
            "torch": "2.15.0",
            "numpy": "2.3.1",
            "cpu": "x86_64, 2 threads",
            "git": {"commit": "0123456789abcdef", "dirty": False},
        },
        "device": "cpu",
        "dtype": "float32",
        "subjects": [
            {
                "model": str(row.model),
                "weights": str(row.weights),
                "weights_hash": f"{i:064x}"[::-1],
                "data": str(row.data),
                "preprocessing": "8×8 digits, enlarged to 32×32, three channels, normalised",
                "split": "test",
                "samples": 512,
                "sample_hash": "5a3b" * 16,
                "seed": row.seed,
                "parameters": 174116,
            }
            for i, row in enumerate(subjects.itertuples())
        ],
        "measures": {name: DETAILS[name] for name in measures},
        "probes": {
            "sites": {"reduction": "spatial", "batch": 128},
            "lines": {"paths": "closed", "number": 4, "anchors": 8, "radius": 4.0},
        },
        "cells": {"ok": 1},
    }


def realistic_run(name: str = "first", seeds: Sequence[int] = (0,)) -> FakeRun:
    """Three models with undefined sites, an undefined cell and a failed one."""
    random = np.random.default_rng(7)
    rows: list[tuple[Any, ...]] = []
    models = {"vgg8": 7, "resnet18_w16": 17, "mobilenet_v3_small": 19}
    for model, depth in models.items():
        for weights in ("trained", "init"):
            for seed in seeds:
                subject = (model, weights, "digits", seed)
                level = 0.75 if weights == "trained" else 0.92
                sites: dict[str, float | str] = {}
                for i in range(depth):
                    kind = "hardswish" if model.startswith("mobile") and i > 8 else "relu"
                    score = level - 0.2 * np.sin(i / 3) + random.normal(0, 0.02)
                    sites[f"layer{i // 4}.{i % 4}.{kind}"] = float(np.clip(score, 0, 1))
                if weights == "init":
                    sites[list(sites)[2]] = "constant output"
                    sites[list(sites)[-1]] = "constant output"
                rows += cell_rows(subject, "affinity", sites, std=0.012, n=512)
                if model.startswith("mobile"):
                    reason = "hardswish at features.0.2: not piecewise affine"
                    rows += missing_row(subject, "absdev", "undefined", reason)
                else:
                    scale = 2.0 if weights == "trained" else 0.4
                    paths = {f"path{i}": float(v) for i, v in enumerate(random.gamma(4, scale, 16))}
                    rows += cell_rows(subject, "absdev", paths, n=8)
                if (model, weights) == ("mobilenet_v3_small", "init"):
                    rows += missing_row(subject, "pathlength", "failed", "out of memory")
                else:
                    rows += cell_rows(subject, "pathlength", {"output": depth * 0.75})
    scores = frame(rows)
    return FakeRun(name, Path("runs") / name, scores, manifest_of(scores))


@pytest.fixture
def run() -> FakeRun:
    return realistic_run()


@pytest.fixture(scope="session")
def conftest() -> Any:
    """What this file holds, for tests that make their own runs."""
    return sys.modules[__name__]
