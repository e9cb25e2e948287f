from pathlib import Path

import pytest
import torch
from accuracies import accuracy
from hypothesis import given
from hypothesis import strategies as st
from recorded_items import RecordedItems
from torch.utils.data import Subset

from nlbench.measures.absdev import absolute_deviation
from nlbench.models.datasets.digits import digits
from nlbench.models.datasets.images import images
from nlbench.models.networks.vgg import vgg8
from nlbench.models.training.batches import batches
from nlbench.models.training.label_noise import add_label_noise, corrupt_labels
from nlbench.probes.lines import trace_segments
from nlbench.probes.lines.paths import closed_paths
from nlbench.subjects.model import model_info
from nlbench.subjects.weights import load_weights


@given(
    classes=st.integers(2, 12),
    fraction=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_requested_fraction_of_labels_changes(classes, fraction, seed, data):
    given_labels = data.draw(st.lists(st.integers(0, classes - 1), max_size=60))
    labels = torch.tensor(given_labels, dtype=torch.long)
    corrupted = corrupt_labels(labels, fraction, classes, seed)
    assert int((corrupted != labels).sum()) == round(fraction * len(labels))
    assert all(0 <= label < classes for label in corrupted.tolist())
    assert labels.tolist() == given_labels
    assert torch.equal(corrupted, corrupt_labels(labels, fraction, classes, seed))


def test_corrupted_labels_are_uniform_over_other_classes():
    labels = torch.full((9000,), 4)
    counts = corrupt_labels(labels, 1.0, 10, seed=0).bincount(minlength=10)
    assert counts[4] == 0
    others = counts[torch.arange(10) != 4].double()
    # χ² of 8 degrees of freedom stays below 26.1 in 999 of 1,000 cases.
    assert float(((others - 1000) ** 2 / 1000).sum()) < 26.1


def test_another_seed_corrupts_other_labels():
    labels = torch.zeros(100, dtype=torch.long)
    first, second = (corrupt_labels(labels, 0.5, 10, seed) for seed in (0, 1))
    assert not torch.equal(first != labels, second != labels)


def test_relabelled_items_are_read_together():
    class Together(RecordedItems):
        def __getitems__(self, indices):
            asked.append(list(indices))
            return [self[i] for i in indices]

    asked = []
    items = add_label_noise(Together(), 1.0, 12, seed=0)
    asked.clear()
    found = list(batches(items, torch.tensor([3, 1, 2]), 2, torch.device("cpu")))
    assert asked == [[3, 1], [2]]
    pixels = torch.cat([images[:, 0, 0, 0] for images, _ in found])
    assert pixels.tolist() == [3.0, 1.0, 2.0]
    assert bool((pixels != torch.cat([labels for _, labels in found])).all())


def test_a_subset_is_relabelled():
    items = add_label_noise(Subset(RecordedItems(), [5, 7, 9]), 0.0, 12, seed=0)
    assert [label for _, label in (items[i] for i in range(3))] == [5, 7, 9]


def test_labels_are_corrupted_without_reading_an_image(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(3):
            (tmp_path / name / f"{i}.png").write_bytes(b"no image at all")
    items = images(str(tmp_path)).train
    assert add_label_noise(items, 1.0, 2, seed=0).labels == [1, 1, 1, 0, 0, 0]


SHIPPED = Path(model_info(vgg8).trained["digits"])
NOISY = SHIPPED.with_name("vgg8-digits-noise40.safetensors")


def network(file):
    model = vgg8()
    load_weights(model, file)
    return model.eval()


def test_the_shipped_noisy_network_fits_all_labels():
    data, model = digits(), network(NOISY)
    images = torch.stack([image for image, _ in data.train])
    labels = torch.tensor([label for _, label in data.train])
    with torch.no_grad():
        found = model(data.normalize(images)).argmax(dim=1)
    assert torch.equal(found, corrupt_labels(labels, 0.4, 10, seed=0))
    assert accuracy(model, "test", data) < 0.75


@pytest.mark.slow
def test_noisy_labels_raise_the_absolute_deviation():
    # M. Gamba et al., AISTATS 2022, table 2: on 99 to 100 % of the paths.
    data = digits()
    images = data.sample(1, split="train", seed=0).images
    paths = data.normalize(closed_paths(images, 4, 0.5)).double()
    clean, noisy = (
        [
            float(absolute_deviation(trace).norm())
            for trace in trace_segments(network(file), paths[:, 0], paths[:, 1])
        ]
        for file in (SHIPPED, NOISY)
    )
    assert all(higher > lower for lower, higher in zip(clean, noisy, strict=True))
