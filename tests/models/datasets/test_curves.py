"""The targets of the benchmark's curves have the nonlinearity that is said of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nlbench.errors import RequestError
from nlbench.models.datasets.curves import affine_share, curves, target_values
from nlbench.models.networks.ladders import Ladders
from nlbench.models.training.loop import train
from nlbench.models.training.recipes import adam


@pytest.mark.parametrize("k", [0, 1, 2, 3, 7])
def test_a_zigzag_has_its_kinks(k):
    # Four steps a piece, so that the knots are among the points.
    x = torch.linspace(-1, 1, 4 * (k + 1) + 1, dtype=torch.float64)
    slopes = target_values(x, "kinks", k).diff() / x.diff()
    torch.testing.assert_close(slopes.abs(), torch.full_like(slopes, k + 1))
    turns = (slopes.diff().abs() > 1e-9).nonzero()[:, 0] + 1
    assert turns.tolist() == [4 * i for i in range(1, k + 1)]
    assert slopes[0] > 0


@pytest.mark.parametrize(
    ("target", "k"), [("sine", 1), ("sine", 4), ("kinks", 0), ("kinks", 2), ("kinks", 3)]
)
def test_an_affine_fit_explains_the_share_that_is_stated(target, k):
    x = np.linspace(-1, 1, 20_001)
    y = target_values(torch.from_numpy(x), target, k).numpy()
    fitted = np.polyval(np.polyfit(x, y, 1), x)
    share = 1 - ((y - fitted) ** 2).mean() / y.var()
    assert share == pytest.approx(affine_share(target, k), abs=1e-3)


def test_a_curve_is_learnt():
    build = Ladders().load("mlp-relu-gain1-depth1")
    recipe = replace(adam, epochs=15, warmup_steps=0, learning_rate=0.01)
    found = train(lambda: build(input_shape=(1,)), curves("kinks", 0), recipe)
    assert found.scores["explained"] > 0.97
    assert found.test_accuracy > 0.5
    with pytest.raises(RequestError, match="nor labels to corrupt"):
        train(lambda: build(input_shape=(1,)), curves(), recipe, label_noise=0.5)


def test_a_sine_without_a_period_is_refused():
    with pytest.raises(RequestError, match="expected at least 1"):
        curves("sine", 0)


def test_points_are_apart_and_the_same_for_all_targets():
    one, other = curves("sine", 3), curves("kinks", 5)
    assert torch.equal(one.train.rows, other.train.rows)
    assert not set(one.train.rows[:, 0].tolist()) & set(one.test.rows[:, 0].tolist())
    assert float(one.test.rows.min()) >= -1
    assert float(one.train.rows.max()) <= 1
