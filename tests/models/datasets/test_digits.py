import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from nlbench.models.datasets.digits import digits


@pytest.fixture(scope="module")
def data():
    return digits()


def enlarged_by_hand(small):
    """(n, 8, 8) to (n, 32, 32): each new pixel's centre between the two nearest old centres."""
    weights = np.zeros((32, 8))
    for new in range(32):
        centre = min(max((new + 0.5) / 4 - 0.5, 0.0), 7.0)
        low = min(int(centre), 6)
        weights[new, low] = 1 - (centre - low)
        weights[new, low + 1] = centre - low
    return np.einsum("ai,nij,bj->nab", weights, small, weights)


def expected_split():
    order = np.random.RandomState(0).permutation(1797)
    return order[512:], order[:512]


def test_splits_have_1285_and_512_images(data):
    assert (len(data.train), len(data.test)) == (1285, 512)
    assert data.train[0][0].shape == data.shape == (3, 32, 32)
    assert data.train[0][0].dtype == torch.float32
    assert type(data.train[0][1]) is int


def test_each_image_is_bilinear_enlargement_of_its_original(data):
    original = load_digits()
    for items, chosen in zip((data.train, data.test), expected_split(), strict=True):
        expected = enlarged_by_hand(original.images[chosen] / 16)
        images = torch.stack([image for image, _ in items]).numpy()
        np.testing.assert_allclose(images, expected[:, None].repeat(3, axis=1), atol=1e-6)
        assert [label for _, label in items] == original.target[chosen].tolist()


def test_split_equals_the_published_one(data):
    # Written down when the split was made: a change of NumPy's or scikit-learn's would show.
    assert [label for _, label in list(data.test)[:12]] == [2, 8, 2, 6, 6, 7, 1, 9, 8, 5, 2, 8]
    assert [label for _, label in list(data.train)[:6]] == [7, 8, 8, 1, 1, 3]


def test_mean_and_deviation_are_those_of_training_split(data):
    train, _ = expected_split()
    pixels = enlarged_by_hand(load_digits().images[train] / 16)
    assert data.mean == pytest.approx([pixels.mean()] * 3, abs=1e-6)
    assert data.std == pytest.approx([pixels.std()] * 3, abs=1e-6)
    assert data.mean[0] == pytest.approx(0.3054, abs=5e-5)
    assert data.std[0] == pytest.approx(0.3242, abs=5e-5)


def test_loading_leaves_the_global_random_states_alone():
    def states():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()  # noqa: NPY002

    before = states()
    digits()
    assert states() == before


def test_preprocessing_is_described(data):
    for word in ("divided by 16", "bilinear", "32x32", "3 equal channels", "512", "1285", "mean"):
        assert word in data.preprocessing
