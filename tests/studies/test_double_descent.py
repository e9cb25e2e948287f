"""Peaks over widths, and the growth of density."""

import dataclasses

import numpy as np
import pytest
from paths_of_networks import record, run_of

from nlbench.studies.double_descent import DoubleDescent, _peak_heights
from nlbench.studies.framework.verdicts import mean_above


def runs(errors, deviations, densities, fits=(0.9, 0.9, 0.9)):
    parts = {"paths": [], "accuracy": []}
    for width, error, deviation, density, fit in zip(
        (4, 8, 16), errors, deviations, densities, fits, strict=True
    ):
        for seed in range(5):
            cells = [
                record("absdev", "noise 0.2", seed, np.full(4, deviation + 0.1 * seed * width / 4)),
                record("density", "noise 0.2", seed, np.full(4, density + 0.1 * seed)),
                record(
                    "accuracy", "noise 0.2", seed, [], summary=1 - error - 0.002 * seed * width / 4
                ),
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
    assert found == ["can't tell"] * 3


def test_falling_density_is_refuted():
    assert words((0.5, 0.4, 0.3), (1.0, 2.0, 3.0), (30, 20, 10))[2] == "no"


def test_highest_of_three_means_is_not_a_peak():
    """Each seed's curve has its highest value elsewhere, so the inner mean is high by chance."""
    curves = np.array([[1, 9, 3], [4, 2, 5], [5, 4, 1], [2, 3, 4], [4, 5, 3.0]])
    assert curves.mean(0).argmax() == 1
    assert mean_above(_peak_heights(curves)).agrees is None


@pytest.mark.parametrize("widths", [3, 4, 6])
def test_noise_rarely_has_a_peak(widths):
    rng = np.random.default_rng(widths)
    found = [mean_above(_peak_heights(rng.normal(size=(5, widths)))).agrees for _ in range(400)]
    assert np.mean([answer is True for answer in found]) < 0.05


def test_few_seeds_or_widths_have_no_peak():
    assert _peak_heights(np.ones((1, 3))).size == _peak_heights(np.ones((5, 2))).size == 0


def test_missing_peak_is_refuted_only_if_fitted():
    found = words((0.5, 0.4, 0.3), (1.0, 2.0, 3.0), (10, 30, 20), (0.8, 0.96, 1.0))
    assert found == ["no", "no", "can't tell"]


@pytest.mark.parametrize(
    ("fits", "missing"),
    [((0.8, 0.9, 1.0), "wider"), ((0.96, 1.0, 1.0), "narrower"), ((0.8, 0.96, 1.0), "")],
)
def test_missing_widths_are_named(fits, missing):
    numbers = (0.5, 0.4, 0.3), (1.0, 2.0, 3.0), (10, 30, 20)
    verdict, *_ = DoubleDescent().analyse(runs(*numbers, fits)).verdicts
    assert (verdict.agrees is None) is bool(missing)
    assert missing in verdict.remark.partition("which needs ")[2]


def test_rise_to_last_width_is_undecided():
    found = words((0.1, 0.2, 0.3), (1.0, 2.0, 3.0), (10, 20, 30), (0.8, 0.9, 1.0))
    assert found == ["can't tell", "can't tell", "yes"]
