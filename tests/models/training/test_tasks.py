import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import Subset

from nlbench.content.hashing import state_hash
from nlbench.errors import RequestError
from nlbench.models.datasets.images import images
from nlbench.models.datasets.items import ByteImages
from nlbench.models.training import tasks as loading
from nlbench.models.training.loop import train
from nlbench.models.training.recipes import Recipe
from nlbench.models.training.tasks import ahead, augment, batches, relabelled
from nlbench.subjects.data import Dataset

CPU = torch.device("cpu")
QUICK = Recipe("quick", epochs=3, batch_size=4, learning_rate=0.1, shift=1, label_noise=0.25)


@pytest.fixture(params=[True, False], ids=["beside", "in turn"])
def overlap(request, monkeypatch):
    monkeypatch.setattr(loading, "overlap_pays", lambda device: request.param)
    return request.param


class Watched(TorchDataset):
    """Images whose index is their label, and which thread read them."""

    def __init__(self, size=12, broken=None, chance=False):
        self.size, self.broken, self.chance = size, broken, chance
        self.threads = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.threads.append(threading.current_thread().name)
        if index == self.broken:
            raise RequestError(f"can't read image {index}")
        image = torch.full((1, 2, 2), float(index))
        return image + (torch.rand(1) if self.chance else 0), index


def read(items, order, size):
    return [(x.flatten(1)[:, 0].tolist(), y.tolist()) for x, y in batches(items, order, size, CPU)]


def trained(dataset, recipe=QUICK):
    inputs = dataset.shape[0] * dataset.shape[1] ** 2

    def build():
        layers = nn.Linear(inputs, 16), nn.Dropout(), nn.Linear(16, dataset.classes)
        return nn.Sequential(nn.Flatten(), *layers)

    result = train(build, dataset, recipe, seed=4)
    return state_hash(result.model), result.history


@given(order=st.permutations(range(9)), size=st.integers(1, 10), pays=st.booleans())
def test_batches_come_whole_and_in_order_read_beside_or_in_turn(order, size, pays):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "overlap_pays", lambda device: pays)
        found = read(Watched(9), torch.tensor(order), size)
    cut = [order[i : i + size] for i in range(0, 9, size)]
    assert found == [([float(i) for i in part], part) for part in cut]


def test_nothing_gives_no_batch():
    assert read(Watched(0), torch.arange(0), 4) == []


def test_later_batches_are_read_in_another_thread_where_that_pays(overlap):
    items = Watched()
    read(items, torch.arange(12), 4)
    here = threading.current_thread().name
    assert [name == here for name in items.threads] == [True] * 4 + [not overlap] * 8


def test_a_batch_is_read_before_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(loading, "overlap_pays", lambda device: True)
    made = threading.Event()

    def numbers():
        yield 1
        made.set()
        yield 2

    made_ahead = ahead(numbers(), CPU)
    assert next(made_ahead) == 1
    assert made.wait(timeout=30)
    assert list(made_ahead) == [2]


def test_an_image_that_cannot_be_read_is_told_at_its_batch(overlap):
    found = batches(Watched(broken=6), torch.arange(12), 4, CPU)
    assert next(found)[1].tolist() == [0, 1, 2, 3]
    with pytest.raises(RequestError, match="can't read image 6"):
        next(found)


def test_the_number_of_threads_is_as_before(overlap):
    before = torch.get_num_threads()
    read(Watched(), torch.arange(12), 4)
    unfinished = batches(Watched(), torch.arange(12), 4, CPU)
    next(unfinished)
    unfinished.close()
    assert torch.get_num_threads() == before
    fresh = []
    thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert fresh == [before]


@pytest.mark.parametrize("chance", [False, True], ids=["fixed", "random items"])
def test_reading_beside_training_changes_no_bit_of_the_weights(chance, monkeypatch):
    found = []
    for pays in (True, False):
        monkeypatch.setattr(loading, "overlap_pays", lambda device, pays=pays: pays)
        items = Watched(chance=chance)
        dataset = Dataset("watched", items, items, (1, 2, 2), 12, (0.0,), (1.0,), "none")
        found.append(trained(dataset, replace(QUICK, label_noise=0.0)))
    assert found[0] == found[1]


def test_items_that_draw_from_the_global_generator_are_read_in_the_callers_thread(monkeypatch):
    monkeypatch.setattr(loading, "overlap_pays", lambda device: True)
    items = Watched(chance=True)
    read(items, torch.arange(12), 4)
    assert set(items.threads) == {threading.current_thread().name}


def test_items_that_know_how_are_read_together_also_under_other_labels():
    class Together(Watched):
        def __getitems__(self, indices):
            asked.append(list(indices))
            return [self[i] for i in indices]

    asked = []
    items = relabelled(Together(), 1.0, 12, seed=0)
    asked.clear()
    found = read(items, torch.tensor([3, 1, 2]), 2)
    assert asked == [[3, 1], [2]]
    assert [image for part, _ in found for image in part] == [3.0, 1.0, 2.0]
    assert all(a != b for part, labels in found for a, b in zip(part, labels, strict=True))


def test_a_subset_is_relabelled_as_the_items_it_names():
    items = relabelled(Subset(Watched(), [5, 7, 9]), 0.0, 12, seed=0)
    assert [label for _, label in (items[i] for i in range(3))] == [5, 7, 9]


def test_labels_are_corrupted_without_reading_an_image(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(3):
            (tmp_path / name / f"{i}.png").write_bytes(b"no image at all")
    items = images(str(tmp_path)).train
    assert relabelled(items, 1.0, 2, seed=0).labels == [1, 1, 1, 0, 0, 0]


def test_bytes_converted_together_are_those_converted_one_by_one():
    import numpy as np

    random = np.random.default_rng(0)
    arrays = random.integers(0, 256, (7, 1, 5, 5), np.uint8), np.arange(7)
    items = ByteImages(lambda: arrays, padding=1, channels=3)
    together = items.__getitems__([6, 2])
    for (image, label), index in zip(together, (6, 2), strict=True):
        expected = torch.zeros(3, 7, 7)
        expected[:, 1:6, 1:6] = torch.tensor(arrays[0][index].astype("float32") / 255)
        assert torch.equal(image, expected)
        assert torch.equal(items[index][0], expected)
        assert label == items[index][1] == index
    assert items.read_labels() == list(range(7))


def test_training_on_image_files_is_the_same_read_beside_or_in_turn(tmp_path, monkeypatch):
    random = torch.Generator().manual_seed(0)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(6):
            pixels = torch.randint(0, 256, (9, 9, 3), generator=random, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(tmp_path / name / f"{i}.png")
    found = []
    for pays in (True, False):
        monkeypatch.setattr(loading, "overlap_pays", lambda device, pays=pays: pays)
        found.append(trained(images(str(tmp_path), size=8)))
    assert found[0] == found[1]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def moved(image, down, right):
    """One image (c, h, w) moved by whole pixels, black moving in, pixel by pixel."""
    result = torch.zeros_like(image)
    _, height, width = image.shape
    for y in range(height):
        for x in range(width):
            if 0 <= y - down < height and 0 <= x - right < width:
                result[:, y, x] = image[:, y - down, x - right]
    return result


@given(seed=st.integers(0, 10**6), shift=st.integers(0, 4), flip=st.booleans())
def test_every_image_is_one_of_its_moved_or_mirrored_copies(seed, shift, flip):
    images = torch.rand(3, 2, 5, 4, generator=generator(seed))
    found = augment(images, shift, flip, generator(seed))
    assert found.shape == images.shape
    for before, after in zip(images, found, strict=True):
        copies = [
            moved(before, down, right)
            for down in range(-shift, shift + 1)
            for right in range(-shift, shift + 1)
        ]
        if flip:
            copies += [copy.flip(2) for copy in copies]
        assert any(torch.equal(after, copy) for copy in copies)


def test_every_shift_is_equally_likely_along_both_axes():
    images = torch.zeros(9000, 1, 9, 9)
    images[:, 0, 4, 4] = 1
    found = augment(images, 1, False, generator()).flatten(1).argmax(dim=1)
    counts = found.bincount(minlength=81).double()
    counts = counts[counts > 0]
    assert len(counts) == 9
    # χ² of 8 degrees of freedom stays below 26.1 in 999 of 1,000 cases.
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 26.1


def test_half_of_the_images_are_mirrored():
    images = torch.zeros(4000, 1, 1, 2)
    images[:, 0, 0, 0] = 1
    mirrored = float(augment(images, 0, True, generator())[:, 0, 0, 1].mean())
    assert abs(mirrored - 0.5) < 0.03


def test_images_of_one_batch_move_each_on_its_own():
    images = torch.rand(1, 1, 8, 8, generator=generator(1)).expand(16, 1, 8, 8)
    found = augment(images, 4, True, generator())
    assert len({tuple(image.flatten().tolist()) for image in found}) > 8


def test_without_shift_and_flip_nothing_changes():
    images = torch.rand(3, 1, 4, 4)
    assert torch.equal(augment(images, 0, False, generator()), images)


def test_what_is_no_image_is_refused():
    with pytest.raises(RequestError, match=r"got \(3, 4\)"):
        augment(torch.zeros(3, 4), 1, False, generator())
