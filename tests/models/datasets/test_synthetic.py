import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression

from nlbench.errors import RequestError
from nlbench.models.datasets.synthetic import random_tensors, synthetic
from nlbench.subjects.data import dataset_info


@pytest.mark.parametrize("shape", ["3x32x32", "1x8x12", "16", "4×5"])
def test_random_tensors_have_their_shape(shape):
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
def test_items_are_deterministic_and_distinct(make):
    first = make(seed=0)
    same = make(seed=0)
    assert torch.equal(first.train[5][0], same.train[5][0])
    others = [first.train[6], first.test[5], make(seed=1).train[5]]
    assert not any(torch.equal(first.train[5][0], image) for image, _ in others)


@pytest.mark.parametrize("shape", ["", "3x", "0x2", "axb", "-1", "3 32"])
def test_an_invalid_shape_is_refused(shape):
    with pytest.raises(RequestError):
        random_tensors(shape)


@given(
    classes=st.integers(2, 20),
    channels=st.integers(1, 4),
    side=st.integers(8, 40),
    difficulty=st.floats(0, 1),
    seed=st.integers(0, 2**31 - 1),
)
def test_synthetic_images_are_in_bounds(classes, channels, side, difficulty, seed):
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


def test_difficulty_decides_the_accuracy():
    easy, middle, hard = accuracy(0.0), accuracy(0.85), accuracy(1.0)
    assert easy > 0.99
    assert hard < middle - 0.2 < easy
    # Five standard errors around one in ten.
    assert abs(hard - 0.1) < 5 * (0.1 * 0.9 / 300) ** 0.5


def test_synthetic_images_have_variance_one():
    images = synthetic(size=400, classes=2, difficulty=0.4, image_size=16).sample(
        None, split="train"
    )
    # At difficulty 0 all that varies within a class is where the pattern lies.
    assert images.inputs.var().item() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    ("make", "name"), [(random_tensors, "size"), (synthetic, "size"), (synthetic, "test_size")]
)
def test_a_huge_split_is_refused(make, name):
    with pytest.raises(RequestError):
        dataset_info(make).options[name].parse(10**11)
