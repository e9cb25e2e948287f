import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from recorded_items import RecordedItems
from torch import nn

from nlbench.errors import RequestError
from nlbench.models.datasets.images import images
from nlbench.models.training import batches as batches_module
from nlbench.models.training.batches import batches, prefetch
from nlbench.models.training.loop import train
from nlbench.models.training.recipes import Recipe
from nlbench.serialization.hashing import state_hash
from nlbench.subjects.data import Dataset

CPU = torch.device("cpu")
QUICK = Recipe("quick", epochs=3, batch_size=4, learning_rate=0.1, shift=1, label_noise=0.25)


@pytest.fixture(params=[True, False], ids=["prefetched", "in turn"])
def overlap(request, monkeypatch):
    monkeypatch.setattr(batches_module, "overlap_pays", lambda device: request.param)
    return request.param


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
def test_batches_are_whole_and_in_order(order, size, pays):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches_module, "overlap_pays", lambda device: pays)
        found = read(RecordedItems(9), torch.tensor(order), size)
    cut = [order[i : i + size] for i in range(0, 9, size)]
    assert found == [([float(i) for i in part], part) for part in cut]


def test_empty_items_give_no_batch():
    assert read(RecordedItems(0), torch.arange(0), 4) == []


def test_later_batches_are_read_in_another_thread(overlap):
    items = RecordedItems()
    read(items, torch.arange(12), 4)
    here = threading.current_thread().name
    assert [name == here for name in items.threads] == [True] * 4 + [not overlap] * 8


def test_a_batch_is_read_ahead(monkeypatch):
    monkeypatch.setattr(batches_module, "overlap_pays", lambda device: True)
    made = threading.Event()

    def numbers():
        yield 1
        made.set()
        yield 2

    prefetched = prefetch(numbers(), CPU)
    assert next(prefetched) == 1
    assert made.wait(60)
    assert list(prefetched) == [2]


def test_an_unreadable_image_raises_at_its_batch(overlap):
    found = batches(RecordedItems(broken=6), torch.arange(12), 4, CPU)
    assert next(found)[1].tolist() == [0, 1, 2, 3]
    with pytest.raises(RequestError):
        next(found)


def test_the_number_of_threads_is_restored(overlap):
    before = torch.get_num_threads()
    read(RecordedItems(), torch.arange(12), 4)
    unfinished = batches(RecordedItems(), torch.arange(12), 4, CPU)
    next(unfinished)
    unfinished.close()
    assert torch.get_num_threads() == before
    fresh = []
    thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert fresh == [before]


@pytest.mark.parametrize("chance", [False, True], ids=["fixed", "random items"])
def test_prefetching_changes_no_bit_of_the_weights(chance, monkeypatch):
    found = []
    for pays in (True, False):
        monkeypatch.setattr(batches_module, "overlap_pays", lambda device, pays=pays: pays)
        items = RecordedItems(chance=chance)
        dataset = Dataset("watched", items, items, (1, 2, 2), 12, (0.0,), (1.0,), "none")
        found.append(trained(dataset, replace(QUICK, label_noise=0.0)))
    assert found[0] == found[1]


def test_random_items_are_read_in_the_callers_thread(monkeypatch):
    monkeypatch.setattr(batches_module, "overlap_pays", lambda device: True)
    items = RecordedItems(chance=True)
    read(items, torch.arange(12), 4)
    assert set(items.threads) == {threading.current_thread().name}


def test_prefetched_image_files_train_the_same_network(tmp_path, monkeypatch):
    random = torch.Generator().manual_seed(0)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(6):
            pixels = torch.randint(0, 256, (9, 9, 3), generator=random, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(tmp_path / name / f"{i}.png")
    found = []
    for pays in (True, False):
        monkeypatch.setattr(batches_module, "overlap_pays", lambda device, pays=pays: pays)
        found.append(trained(images(str(tmp_path), size=8)))
    assert found[0] == found[1]
