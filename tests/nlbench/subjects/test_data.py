import pytest
import torch
from torch.utils.data import TensorDataset

from nlbench.errors import RequestError
from nlbench.options import Option
from nlbench.subjects.data import Dataset, DatasetInfo, Preprocessing, dataset, dataset_info


def data_of(shape=(2, 4, 4), count=10, mean=(0.25, 0.5), std=(0.5, 2.0), **more):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(count, *shape, generator=generator)
    items = TensorDataset(images, torch.arange(count) % 3)
    return Dataset("made-up", items, items, shape, 3, mean, std, "none", **more)


def test_a_plain_function_has_no_options():
    assert dataset_info(lambda: None) == DatasetInfo()


def test_declarations_are_kept_and_functions_stay_themselves():
    def fingerprint(size):
        return str(size)

    def mine(size):
        return size

    options = {"size": Option(3)}
    declared = dataset(options=options, version="2", fingerprint=fingerprint)(mine)
    assert declared is mine
    assert dataset_info(mine) == DatasetInfo(options, "2", fingerprint)


def test_normalising_is_per_channel_of_images():
    data = data_of()
    images = torch.rand(5, 2, 4, 4)
    expected = torch.stack([(images[:, 0] - 0.25) / 0.5, (images[:, 1] - 0.5) / 2.0], 1)
    torch.testing.assert_close(data.normalize(images), expected)
    torch.testing.assert_close(data.normalize(images[0]), expected[0])


def test_vectors_are_normalised_per_entry():
    points = torch.rand(5, 2)
    expected = (points - torch.tensor([0.25, 0.5])) / torch.tensor([0.5, 2.0])
    torch.testing.assert_close(data_of((2,)).normalize(points), expected)
    assert torch.equal(data_of((2,), mean=(), std=()).normalize(points), points)


def test_a_stream_is_the_sample_in_parts():
    data = data_of()
    whole = data.sample(7, seed=3)
    parts = list(data.stream(7, seed=3, batch=3))
    assert [len(part.inputs) for part in parts] == [3, 3, 1]
    for name in ("images", "inputs", "labels"):
        together = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(together, getattr(whole, name))


def test_a_sample_depends_on_its_seed_alone():
    data = data_of()
    assert torch.equal(data.sample(4, seed=1).images, data.sample(4, seed=1).images)
    assert not torch.equal(data.sample(4, seed=1).images, data.sample(4, seed=2).images)


def test_excess_count_gives_all_samples():
    assert len(data_of().sample(99).inputs) == 10 == data_of().count(99)
    assert data_of().count(4) == 4
    assert data_of().bytes_of(4) == 4 * 4 * 2 * 4 * 4


def test_data_without_labels_give_none():
    assert data_of(labelled=False).sample(2).labels is None


def test_preprocessing_texts_say_what_is_squashed():
    text = Preprocessing(8, 9, (), (), "bicubic", squash=True, origin="X").text
    assert text == (
        "resized to 9 pixels on both sides (bicubic, antialiased), centre 8x8, as for X"
    )


@pytest.mark.parametrize(
    ("there", "count", "split"), [(0, 3, "test"), (10, 3, "val"), (10, 0, "test"), (10, -3, "test")]
)
def test_impossible_samples_are_refused(there, count, split):
    with pytest.raises(RequestError):
        data_of(count=there).sample(count, split=split)
