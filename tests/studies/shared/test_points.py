import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from nlbench import registry
from nlbench.cli.show import details
from nlbench.errors import RequestError
from nlbench.models.training.loop import train
from nlbench.models.training.recipes import adam
from nlbench.request import Request
from nlbench.runner import run
from nlbench.studies.networks.planted import Ladders
from nlbench.studies.shared.points import ARMS, SPREAD, curves, grid, spirals
from nlbench.subjects.load import load_dataset


def test_a_curve_is_learnt():
    build = Ladders().load("mlp-relu-gain2-depth3")
    recipe = replace(adam, epochs=15, warmup_steps=0, learning_rate=0.01)
    found = train(lambda: build(input_shape=(1,)), curves(), recipe)
    assert found.scores["explained"] > 0.9
    assert found.test_accuracy > 0.4
    with pytest.raises(RequestError):
        train(lambda: build(input_shape=(1,)), curves(), replace(recipe, label_noise=0.5))


def test_points_are_apart_and_same_for_all_sines():
    one, other = curves(3), curves(5)
    assert torch.equal(one.train.rows, other.train.rows)
    assert not set(one.train.rows[:, 0].tolist()) & set(one.test.rows[:, 0].tolist())
    assert float(one.test.rows.min()) >= -1
    assert float(one.train.rows.max()) <= 1


def inputs_of(name, **options):
    return load_dataset(name, options).sample(None).inputs


def test_even_points_are_at_equal_steps():
    assert inputs_of("interval/-1:3", count=5).flatten().sort().values.tolist() == [-1, 0, 1, 2, 3]
    quantiles = inputs_of("normal/2:0.5", count=9).flatten().double().sort().values
    expected = (torch.arange(9) + 0.5) / 9
    reached = torch.special.ndtr((quantiles - 2) / 0.5)
    torch.testing.assert_close(reached, expected.double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "mean", "std"), [("interval/2:8", 5, 3**0.5), ("normal/-1:2", -1, 2)]
)
def test_drawn_points_have_the_distributions_mean_and_spread(name, mean, std):
    drawn = inputs_of(name, count=20_000, spacing="random", shape="2x3")
    assert drawn.shape == (20_000, 2, 3)
    assert drawn.mean().item() == pytest.approx(mean, abs=6 * std / 120_000**0.5)
    assert drawn.std().item() == pytest.approx(std, rel=0.02)
    same, other = (inputs_of(name, count=50, spacing="random", seed=s) for s in (0, 1))
    assert not torch.equal(same, other)
    assert torch.equal(same, inputs_of(name, count=50, spacing="random", seed=0))


def test_option_applies_to_one_member_or_all(tmp_path):
    data = ("interval/0:1", "interval/0:2")
    settings = {"interval.count": 7, "interval/0:2.count": 9}
    request = Request("r2", "functions/relu", data, "init", samples=0, settings=settings)
    table = run(request, tmp_path / "run").scores
    assert dict(zip(table.data, table.n, strict=False)) == {"interval/0:1": 7, "interval/0:2": 9}


def test_a_member_is_shown_with_its_options():
    shown = details("datasets", "normal/0:2")
    assert "Make points from N(0, 2²)." in shown
    assert "normal/0:2.spacing = even" in shown


def test_grid_covers_square_evenly_and_has_no_labels():
    sample = grid(5).sample(None, seed=1)
    points = {tuple(round(c, 6) for c in point) for point in sample.inputs.tolist()}
    assert points == {(x / 2, y / 2) for x in range(-2, 3) for y in range(-2, 3)}
    assert sample.labels is None
    assert torch.equal(sample.images, sample.inputs)


def test_exponential_points_are_quantiles_of_a_skewed_law():
    quantiles = inputs_of("exponential/1:2", count=9).flatten().double().sort().values
    expected = stats.expon(1, 2).ppf((np.arange(9) + 0.5) / 9)
    np.testing.assert_allclose(quantiles, expected, rtol=1e-6)
    drawn = inputs_of("exponential/1:2", count=20_000, spacing="random").flatten().double()
    assert drawn.min() >= 1
    assert drawn.mean().item() == pytest.approx(3, rel=0.05)
    assert stats.skew(drawn) == pytest.approx(2, rel=0.2)


def test_spirals_turn_with_the_radius_and_splits_differ():
    data = spirals()
    points = torch.stack([data.train[i][0] for i in range(200)]).double() / 1.7
    labels = torch.tensor([data.train[i][1] for i in range(200)])
    radius, angle = points.norm(dim=1), torch.atan2(points[:, 1], points[:, 0])
    turned = angle / (2 * math.pi) - labels / ARMS - radius
    spread = (turned - turned.round()).std() * 2 * math.pi
    assert spread.item() == pytest.approx(SPREAD, rel=0.2)
    assert 0.1 <= radius.min() < radius.max() <= 1
    assert len(data.test) == 1024
    assert not torch.equal(data.train[0][0], data.test[0][0])


def test_networks_share_drawn_points_and_not_their_samples():
    build = registry.load("datasets", "normal/0:1")
    first, second = (build(shape="2", spacing="random", count=100) for _ in range(2))
    expected = first.sample(4).inputs.clone()
    first.sample(4).inputs.zero_()
    assert second.sample(4).inputs.equal(expected)
    assert first.train.rows.data_ptr() == second.train.rows.data_ptr()
