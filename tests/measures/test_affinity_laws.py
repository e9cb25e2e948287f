"""Affinity compares the laws of input and output, not pairs of samples."""

import math

import pytest
import torch

from nlbench.measures.affinity import affinity_score
from nlbench.measures.r2 import r2_score
from nlbench.studies.networks.formulas import Formula

N = 2048


def samples(d, seed=0):
    return torch.randn(N, d, generator=torch.Generator().manual_seed(seed)).double()


def test_tent_map_scores_near_one():
    x = torch.rand(N, 1, generator=torch.Generator().manual_seed(0)).double()
    y = Formula("tent", 5)(x)
    assert affinity_score(x, y).item() == pytest.approx(0.98, abs=0.015)
    assert r2_score(x, y).item() < 0.01


def test_independent_copy_scores_near_one():
    x, y = samples(1), samples(1, seed=1)
    assert affinity_score(x, y).item() == pytest.approx(0.97, abs=0.015)
    assert r2_score(x, y).item() < 0.01


def test_rotation_scores_below_tent_map():
    x = samples(16)
    rotation = torch.linalg.qr(samples(16, seed=1)[:16]).Q
    # Both are isotropic, so that the best affine transport is close to the identity.
    assert affinity_score(x, x @ rotation).item() == pytest.approx(0.46, abs=0.015)
    assert r2_score(x, x @ rotation).item() == pytest.approx(1)


def test_negated_skewed_variable_scores_below_one():
    """The quantile functions of ±(x - 1) are at the squared distance 4 - π²/3."""
    x = -torch.log((torch.arange(N, dtype=torch.float64)[:, None] + 0.5) / N)
    expected = 1 - math.sqrt(2 - math.pi**2 / 6)
    assert affinity_score(x, -x).item() == pytest.approx(expected, abs=0.01)
    assert affinity_score(samples(1), -samples(1)).item() > 0.95  # A symmetric law is kept.
