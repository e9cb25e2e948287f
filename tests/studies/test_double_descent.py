"""Peaks over widths, and the growth of density."""

import dataclasses

import numpy as np
from paths_of_networks import record, run_of

from nlbench.studies.double_descent import DoubleDescent


def runs(errors, deviations, densities, fits=(0.9, 0.9, 0.9)):
    parts = {"paths": [], "accuracy": []}
    for width, error, deviation, density, fit in zip(
        (4, 8, 16), errors, deviations, densities, fits, strict=True
    ):
        for seed in (0, 1):
            cells = [
                record("absdev", "noise 0.2", seed, np.full(4, deviation + seed)),
                record("density", "noise 0.2", seed, np.full(4, density + seed)),
                record("accuracy", "noise 0.2", seed, [], summary=1 - error),
            ]
            made = {"seed": str(seed), "train_accuracy": str(fit), "label_noise": "0.2"}
            subject = dataclasses.replace(
                cells[0].subject, model=f"resnet18-w{width}", weights_metadata=made
            )
            cells = [
                dataclasses.replace(cell, key=f"{width}-{cell.key}", subject=subject)
                for cell in cells
            ]
            parts["paths"] += cells[:2]
            parts["accuracy"] += cells[2:]
    return {name: run_of(cells) for name, cells in parts.items()}


def words(*numbers):
    return [verdict.word for verdict in DoubleDescent().analyse(runs(*numbers)).verdicts]


def test_interior_peak_is_found():
    assert words((0.3, 0.5, 0.2), (1.0, 5.0, 3.0), (10, 20, 30)) == ["yes"] * 3


def test_without_a_peak_the_verdict_is_undecided():
    found = words((0.5, 0.4, 0.3), (1.0, 2.0, 3.0), (10, 30, 20))
    assert found == ["can't tell", "can't tell", "no"]


def test_missing_peak_is_refuted_only_if_fitted():
    found = words((0.5, 0.4, 0.3), (1.0, 2.0, 3.0), (10, 30, 20), (0.8, 0.96, 1.0))
    assert found == ["no", "no", "no"]


def test_rise_to_last_width_is_undecided():
    found = words((0.1, 0.2, 0.3), (1.0, 2.0, 3.0), (10, 20, 30), (0.8, 0.9, 1.0))
    assert found == ["can't tell", "can't tell", "yes"]
