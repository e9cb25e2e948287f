import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accuracies import accuracy
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import Subset

from nlbench.errors import NotFinite, RequestError
from nlbench.measures.absdev import absolute_deviation
from nlbench.models.datasets.digits import digits
from nlbench.models.datasets.images import images
from nlbench.models.datasets.items import ByteImages
from nlbench.models.datasets.number_words import number_words
from nlbench.models.datasets.parallel_text import END, PAD, START
from nlbench.models.networks.transformer import TransformerTiny
from nlbench.models.networks.vgg import vgg8
from nlbench.models.sparsified import nonlinear_units
from nlbench.models.training import tasks as loading
from nlbench.models.training.linearisation import post_training
from nlbench.models.training.loop import train
from nlbench.models.training.recipes import Recipe, translation
from nlbench.models.training.tasks import (
    ahead,
    augment,
    batches,
    bleu,
    corrupt_labels,
    relabelled,
    task_of,
    translate,
)
from nlbench.probes.lines.paths import closed_paths
from nlbench.probes.lines.probe import trace_segments
from nlbench.serialization.hashing import state_hash
from nlbench.subjects.data import Dataset
from nlbench.subjects.model import model_info
from nlbench.subjects.weights import load_weights

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


SHIPPED = Path(model_info(vgg8).trained["digits"])
NOISY = SHIPPED.with_name("vgg8-digits-noise40.safetensors")


def network(file):
    model = vgg8()
    load_weights(model, file)
    return model.eval()


def test_the_shipped_noisy_network_fits_every_corrupted_label():
    data, model = digits(), network(NOISY)
    images = torch.stack([image for image, _ in data.train])
    labels = torch.tensor([label for _, label in data.train])
    with torch.no_grad():
        found = model(data.normalize(images)).argmax(dim=1)
    assert torch.equal(found, corrupt_labels(labels, 0.4, 10, seed=0))
    assert accuracy(model, "test", data) < 0.75


@pytest.mark.slow
def test_noisy_labels_raise_the_absolute_deviation_of_every_path():
    # M. Gamba et al., AISTATS 2022, table 2: on 99 to 100 % of the paths.
    data = digits()
    images = data.sample(2, split="train", seed=0).images
    paths = data.normalize(closed_paths(images, 4, 1.0)).double()
    clean, noisy = (
        [
            float(absolute_deviation(trace).norm())
            for trace in trace_segments(network(file), paths[:, 0], paths[:, 1])
        ]
        for file in (SHIPPED, NOISY)
    )
    assert all(higher > lower for lower, higher in zip(clean, noisy, strict=True))


@pytest.fixture(scope="module")
def data():
    return number_words(train=60, test=20, largest=99)


class Copies(nn.Module):
    """Translates by repeating the source; its logits at a place depend on the place alone."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens = tokens

    def forward(self, tokens):
        return nn.functional.one_hot(tokens[:, 0], self.tokens).float()


class Counts(nn.Module):
    """Says the token after the one before it: only right decoding, token by token, shows it."""

    def forward(self, tokens):
        before = tokens[:, 1]
        following = torch.where(before == START, 5, before + 1)
        return nn.functional.one_hot(torch.where(following > 8, END, following), 12).float()


def test_each_token_is_decoded_from_those_decoded_before():
    found = translate(Counts(), torch.ones(3, 7, dtype=torch.long), CPU)
    assert found.tolist() == [[5, 6, 7, 8, END, PAD, PAD]] * 3


def test_a_sentence_without_an_end_fills_the_length():
    found = translate(Counts(), torch.ones(1, 3, dtype=torch.long), CPU)
    assert found.tolist() == [[5, 6, 7]]


def test_decoding_is_that_of_the_published_loop_sentence_by_sentence(data):
    torch.manual_seed(0)
    network = TransformerTiny(data.classes).eval()
    sources = data.test.inputs[:5, 0]
    with torch.no_grad():
        for source, found in zip(sources, translate(network, sources, CPU), strict=True):
            said = [START]
            while len(said) <= len(source):
                target = torch.full_like(source, PAD)
                target[: len(said)] = torch.tensor(said)
                token = int(network(torch.stack([source, target])[None])[0, len(said) - 1].argmax())
                said.append(token)
                if token == END or len(said) > len(source):
                    break
            assert found.tolist()[: len(said) - 1] == said[1:]


def test_token_accuracy_counts_tokens_and_end_marks_but_no_padding(data):
    copies = Copies(data.classes)
    pairs = data.test
    right = total = 0
    for source, wanted in zip(pairs.inputs[:, 0].tolist(), pairs.wanted.tolist(), strict=True):
        for a, b in zip(source, wanted, strict=True):
            total += b != -100
            right += b != -100 and a == b
    assert task_of(data, translation, 0).accuracy(copies, "test", CPU) == right / total


def test_the_loss_leaves_padding_out(data):
    task = task_of(data, translation, 0)
    wanted = data.train.wanted[:4]
    logits = torch.randn(*wanted.shape, data.classes, generator=torch.Generator().manual_seed(0))
    by_hand = [
        -float(logits[i, j].log_softmax(0)[token])
        for i, row in enumerate(wanted.tolist())
        for j, token in enumerate(row)
        if token != -100
    ]
    assert float(task.loss(logits, wanted)) == pytest.approx(sum(by_hand) / len(by_hand), rel=1e-5)


def test_a_network_that_is_no_translator_is_refused(data):
    task = task_of(data, translation, 0)
    with pytest.raises(RequestError, match="one logit a class"):
        task.loss(torch.zeros(4, 10), data.train.wanted[:4])


def test_accuracy_of_a_translator_that_gives_nan_is_an_error(data):
    network = TransformerTiny(data.classes)
    nn.init.constant_(network.logits.bias, float("nan"))
    with pytest.raises(NotFinite, match="not finite"):
        task_of(data, translation, 0).accuracy(network, "test", CPU)


def test_bleu_is_that_of_the_formula():
    # One sentence: precisions 5/6, 3/5, 2/4, 1/3, no brevity penalty.
    found, wanted = "the cat sat on a mat", "the cat sat on the mat"
    expected = 100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25
    assert bleu([found], [wanted]) == pytest.approx(expected)


def test_bleu_of_unknown_tokens_is_refused():
    with pytest.raises(RequestError, match="unknown tokens 'words'; there are: 13a"):
        bleu(["a"], ["a"], "words")


@pytest.mark.slow
def test_the_recipe_leads_to_a_network_that_translates_numbers_it_never_saw():
    data = number_words(train=400, test=50, largest=499, length=14)
    recipe = replace(translation, epochs=8, batch_size=16)
    result = train(lambda: TransformerTiny(data.classes), data, recipe, seed=0)
    assert result.test_accuracy > 0.9
    assert result.scores["bleu"] > 70
    assert result.metadata["vocabulary"] == data.vocabulary.text


def test_a_transformer_is_linearised(data):
    torch.manual_seed(0)
    recipe = replace(post_training, epochs=2, omega=0.5, learning_rate=0.01)
    result = train(lambda: TransformerTiny(data.classes), data, recipe)
    assert [units for _, units in nonlinear_units(result.model).values()] == [128] * 4
    assert result.metadata["transform"] == "sparsify"
    assert "bleu" in result.scores
