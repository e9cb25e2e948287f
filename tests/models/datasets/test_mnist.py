import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.datasets.mnist import read_image_file, read_label_file

from nlbench.errors import RequestError
from nlbench.models.datasets.published import fashion_mnist, mnist

NAMES = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"]
NAMES += [name.replace("train", "t10k") for name in NAMES]


def idx(array):
    lengths = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes([0, 0, 8, array.ndim]) + lengths + array.astype(np.uint8).tobytes()


def write(folder, packed=False, count=5):
    random = np.random.RandomState(0)
    folder.mkdir(parents=True)
    for name in NAMES:
        shape = (count, 28, 28) if "images" in name else (count,)
        content = idx(random.randint(0, 256 if "images" in name else 10, shape))
        end, content = (".gz", gzip.compress(content)) if packed else ("", content)
        (folder / (name + end)).write_bytes(content)
    return folder


@pytest.mark.parametrize("open_it", [mnist, fashion_mnist])
def test_images_and_labels_match_torchvision(tmp_path, open_it):
    folder = write(tmp_path / "data")
    data = open_it(str(folder), size="28")
    for split, prefix in (("train", "train"), ("test", "t10k")):
        images = read_image_file(str(folder / f"{prefix}-images-idx3-ubyte"))
        labels = read_label_file(str(folder / f"{prefix}-labels-idx1-ubyte"))
        items = data.split(split)
        assert [items[i][1] for i in range(len(items))] == labels.tolist()
        assert all(torch.equal(items[i][0], images[i][None] / 255) for i in range(len(items)))


def test_compressed_files_hold_the_same_images(tmp_path):
    plain, packed = (
        mnist(str(write(tmp_path / "a"))),
        mnist(str(write(tmp_path / "b", packed=True))),
    )
    assert torch.equal(plain.sample(None).images, packed.sample(None).images)


def test_default_is_32_pixels_with_margin_of_zeros(tmp_path):
    folder = str(write(tmp_path / "data"))
    padded, bare = mnist(folder).sample(3).images, mnist(folder, size="28").sample(3).images
    assert padded.shape == (3, 1, 32, 32)
    assert torch.equal(padded[..., 2:30, 2:30], bare)
    assert padded.count_nonzero() == bare.count_nonzero()


def test_three_channels_are_equal(tmp_path):
    data = mnist(str(write(tmp_path / "data")), channels="3")
    images = data.sample(2).images
    assert data.shape == images.shape[1:] == (3, 32, 32)
    assert torch.equal(images[:, 0], images[:, 2])


@pytest.mark.parametrize(
    ("open_it", "below"), [(mnist, "MNIST/raw"), (fashion_mnist, "FashionMNIST/raw")]
)
def test_torchvision_layout_is_recognized(tmp_path, monkeypatch, open_it, below):
    write(tmp_path / below)
    monkeypatch.setenv("NLBENCH_DATA", str(tmp_path))
    assert len(open_it().test) == 5
    assert len(open_it(str(tmp_path)).test) == 5


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (NAMES[2], b"\x00\x00\x09" + idx(np.zeros((5, 28, 28)))[3:]),
        (NAMES[2], b"\x00\x00\x08\x03\x00"),
        (NAMES[2], idx(np.zeros((5, 28, 28)))[:-1]),
        (NAMES[2], idx(np.zeros((5, 20, 20)))),
        (NAMES[3], idx(np.zeros(4))),
        (NAMES[3], idx(np.full(5, 10))),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, name, content):
    folder = write(tmp_path / "data")
    (folder / name).write_bytes(content)
    with pytest.raises(RequestError, match=r"test|t10k") as caught:
        mnist(str(folder)).sample(1)
    assert "\n" not in str(caught.value)


def test_a_truncated_compressed_file_is_refused(tmp_path):
    folder = write(tmp_path / "data", packed=True)
    file = folder / f"{NAMES[2]}.gz"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(RequestError):
        mnist(str(folder)).sample(1)


def test_missing_files_are_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "torchvision.datasets.MNIST", lambda root, download: write(Path(root) / "MNIST" / "raw")
    )
    assert len(mnist(str(tmp_path / "data"), download=True).test) == 5
