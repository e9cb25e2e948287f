from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression

from nlbench.cli.show import details
from nlbench.errors import RequestError
from nlbench.models.datasets.synthetic import (
    curves,
    grid,
    random_tensors,
    synthetic,
    target_values,
)
from nlbench.models.training.loop import train
from nlbench.models.training.recipes import adam
from nlbench.request import Request
from nlbench.runner import run
from nlbench.studies.networks.ladders import Ladders
from nlbench.subjects.data import dataset_info
from nlbench.subjects.load import load_dataset


@pytest.mark.parametrize("shape", ["3x32x32", "1x8x12", "16", "4×5"])
def test_random_tensors_have_the_shape_asked_for(shape):
    data = random_tensors(shape, classes=3, size=20)
    lengths = tuple(int(n) for n in shape.replace("×", "x").split("x"))
    assert data.shape == lengths
    assert data.sample(7).inputs.shape == (7, *lengths)
    assert data.sample(None).labels is None


def test_random_inputs_have_mean_zero_and_variance_one():
    inputs = random_tensors("3x16x16", size=200).sample(None).inputs
    # Five standard errors; the fourth moment of a uniform of variance 1 is 1.8.
    assert abs(inputs.mean()) < 5 / inputs.numel() ** 0.5
    assert abs(inputs.var() - 1) < 5 * (0.8 / inputs.numel()) ** 0.5


@pytest.mark.parametrize("make", [lambda n: random_tensors(size=n), lambda n: synthetic(size=n)])
def test_a_larger_size_keeps_the_first_items(make):
    few, many = make(4).train, make(9).train
    assert (len(few), len(many)) == (4, 9)
    for i in range(4):
        assert torch.equal(few[i][0], many[i][0])
        assert few[i][1] == many[i][1]


@pytest.mark.parametrize("make", [random_tensors, synthetic])
def test_splits_seeds_and_items_differ_and_asking_again_does_not(make):
    first = make(seed=0)
    same = make(seed=0)
    assert torch.equal(first.train[5][0], same.train[5][0])
    others = [first.train[6], first.test[5], make(seed=1).train[5]]
    assert not any(torch.equal(first.train[5][0], image) for image, _ in others)


@pytest.mark.parametrize("shape", ["", "3x", "0x2", "axb", "-1", "3 32"])
def test_a_shape_that_cannot_be_read_is_refused(shape):
    with pytest.raises(RequestError, match=r"random\.shape: expected lengths such as"):
        random_tensors(shape)


@settings(max_examples=25, deadline=None)
@given(
    classes=st.integers(2, 20),
    channels=st.integers(1, 4),
    side=st.integers(8, 40),
    difficulty=st.floats(0, 1),
    seed=st.integers(0, 2**31 - 1),
)
def test_synthetic_images_are_within_zero_and_one_and_classes_take_turns(
    classes, channels, side, difficulty, seed
):
    data = synthetic(6, 3, classes, channels, side, difficulty, seed)
    assert (len(data.train), len(data.test), data.classes) == (6, 3, classes)
    for index in range(6):
        image, label = data.train[index]
        assert image.shape == (channels, side, side) == data.shape
        assert 0 <= image.min() <= image.max() <= 1
        assert label == index % classes


def accuracy(difficulty):
    data = synthetic(size=600, test_size=300, image_size=16, difficulty=difficulty)
    train, test = data.sample(None, split="train"), data.sample(None)
    fit = LogisticRegression(C=0.01, max_iter=60)
    fit.fit(train.inputs.flatten(1), train.labels)
    return fit.score(test.inputs.flatten(1), test.labels)


def test_difficulty_goes_from_all_learnt_to_nothing():
    easy, middle, hard = accuracy(0.0), accuracy(0.85), accuracy(1.0)
    assert easy > 0.99
    assert hard < middle - 0.2 < easy
    # Five standard errors around one in ten.
    assert abs(hard - 0.1) < 5 * (0.1 * 0.9 / 300) ** 0.5


def test_the_share_of_variance_that_tells_nothing_is_the_difficulty():
    images = synthetic(size=400, classes=2, difficulty=0.4, image_size=16).sample(
        None, split="train"
    )
    # At difficulty 0 all that varies within a class is where the pattern lies.
    assert images.inputs.var().item() == pytest.approx(1, abs=0.05)


def test_a_tensor_that_no_memory_holds_is_refused():
    with pytest.raises(RequestError, match=r"30,000,000,000 numbers, expected at most 268,435,456"):
        random_tensors("3x100000x100000")


def test_patterns_that_no_memory_holds_are_refused():
    with pytest.raises(RequestError, match=r"10,000 classes of 3x1024x1024 have 31,457,280,000"):
        synthetic(classes=10_000, image_size=1024)


@pytest.mark.parametrize(
    ("make", "name"),
    [(random_tensors, "size"), (synthetic, "size"), (synthetic, "test_size")],
)
def test_a_split_is_no_larger_than_can_be_drawn_from(make, name):
    with pytest.raises(RequestError, match="out of bounds"):
        dataset_info(make).options[name].parse(10**11)


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
def test_an_affine_fit_explains_the_share_of_the_closed_form(target, k):
    x = np.linspace(-1, 1, 20_001)
    y = target_values(torch.from_numpy(x), target, k).numpy()
    fitted = np.polyval(np.polyfit(x, y, 1), x)
    share = 1 - ((y - fitted) ** 2).mean() / y.var()
    # An odd number of kinks is symmetric, an even one leaves what one piece of k + 1 explains.
    of_kinks = 0 if k % 2 else 1 / (k + 1) ** 4
    expected = 6 / (np.pi * k) ** 2 if target == "sine" else of_kinks
    assert share == pytest.approx(expected, abs=1e-3)


def test_a_curve_is_learnt():
    build = Ladders().load("mlp-relu-gain1-depth1")
    recipe = replace(adam, epochs=15, warmup_steps=0, learning_rate=0.01)
    found = train(lambda: build(input_shape=(1,)), curves("kinks", 0), recipe)
    assert found.scores["explained"] > 0.97
    assert found.test_accuracy > 0.5
    with pytest.raises(RequestError, match="nor labels to corrupt"):
        train(lambda: build(input_shape=(1,)), curves(), replace(recipe, label_noise=0.5))


def test_a_sine_without_a_period_is_refused():
    with pytest.raises(RequestError, match="expected at least 1"):
        curves("sine", 0)


def test_points_are_apart_and_the_same_for_all_targets():
    one, other = curves("sine", 3), curves("kinks", 5)
    assert torch.equal(one.train.rows, other.train.rows)
    assert not set(one.train.rows[:, 0].tolist()) & set(one.test.rows[:, 0].tolist())
    assert float(one.test.rows.min()) >= -1
    assert float(one.train.rows.max()) <= 1


def points(name, **options):
    return load_dataset(name, options).sample(None).inputs


def test_even_points_are_at_equal_steps():
    assert points("interval/-1:3", count=5).flatten().sort().values.tolist() == [-1, 0, 1, 2, 3]
    quantiles = points("normal/2:0.5", count=9).flatten().double().sort().values
    expected = (torch.arange(9) + 0.5) / 9
    reached = torch.special.ndtr((quantiles - 2) / 0.5)
    torch.testing.assert_close(reached, expected.double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "mean", "std"), [("interval/2:8", 5, 3**0.5), ("normal/-1:2", -1, 2)]
)
def test_drawn_points_have_the_distributions_mean_and_spread(name, mean, std):
    drawn = points(name, count=20_000, spacing="random", shape="2x3")
    assert drawn.shape == (20_000, 2, 3)
    assert drawn.mean().item() == pytest.approx(mean, abs=6 * std / 120_000**0.5)
    assert drawn.std().item() == pytest.approx(std, rel=0.02)
    same, other = (points(name, count=50, spacing="random", seed=s) for s in (0, 1))
    assert not torch.equal(same, other)
    assert torch.equal(same, points(name, count=50, spacing="random", seed=0))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("interval/2:1", {}, r"expected interval/LOW:HIGH, numbers with LOW < HIGH"),
        ("interval/a", {}, "expected interval/LOW:HIGH"),
        ("normal/0:nan", {}, "expected normal/MEAN:STD, numbers with STD > 0"),
        ("normal/0:1", {"shape": "3"}, "set normal.spacing=random"),
        ("normal/0:1", {"shape": "3y"}, r"normal/0:1\.shape: expected lengths"),
        ("normal/0:1", {"shape": "999999", "count": 9999}, "expected at most 268,435,456"),
    ],
)
def test_what_is_no_distribution_is_refused_in_one_line(name, options, message):
    with pytest.raises(RequestError, match=message):
        points(name, **options)


def test_an_option_is_set_for_one_member_or_for_all(tmp_path):
    data = ("interval/0:1", "interval/0:2")
    settings = {"interval.count": 7, "interval/0:2.count": 9}
    request = Request("r2", "functions/relu", data, "init", samples=0, settings=settings)
    table = run(request, tmp_path / "run").scores
    assert dict(zip(table.data, table.n, strict=False)) == {"interval/0:1": 7, "interval/0:2": 9}


def test_a_member_is_shown_with_its_options():
    shown = details("datasets", "normal/0:2")
    assert "Make points from N(0, 2²)." in shown
    assert "normal/0:2.spacing = even" in shown


def test_the_grid_covers_the_square_evenly_and_has_no_labels():
    sample = grid(5).sample(None, seed=1)
    points = {tuple(round(c, 6) for c in point) for point in sample.inputs.tolist()}
    assert points == {(x / 2, y / 2) for x in range(-2, 3) for y in range(-2, 3)}
    assert sample.labels is None
    assert torch.equal(sample.images, sample.inputs)
