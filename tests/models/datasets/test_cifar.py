import hashlib
import pickle
import struct

import numpy as np
import pytest
import torch
from torchvision import datasets

from nlbench.errors import RequestError
from nlbench.models.datasets.published import cifar10, cifar100
from nlbench.models.networks.vgg import vgg8
from nlbench.models.training.loop import train
from nlbench.subjects.data import dataset_info


def write_cifar10(folder, per_batch=4, seed=0):
    """Five training batches and a test batch, as the authors' Python version has them."""
    random = np.random.RandomState(seed)
    folder.mkdir(parents=True)
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    for name in names:
        batch = {
            "batch_label": "testing batch 1 of 1",
            "labels": random.randint(0, 10, per_batch).tolist(),
            "data": random.randint(0, 256, (per_batch, 3072)).astype(np.uint8),
            "filenames": ["x.png"] * per_batch,
        }
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return folder


def write_cifar100(folder, count=6):
    random = np.random.RandomState(0)
    folder.mkdir(parents=True)
    for name in ("train", "test"):
        batch = {
            "fine_labels": random.randint(0, 100, count).tolist(),
            "coarse_labels": random.randint(0, 20, count).tolist(),
            "data": random.randint(0, 256, (count, 3072)).astype(np.uint8),
        }
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return folder


class AsTorchvision(datasets.CIFAR10):
    """Torchvision's reader without the check of the MD5 sums."""

    def _check_integrity(self):
        return True

    def _load_meta(self):
        pass


@pytest.mark.parametrize("split", ["train", "test"])
def test_images_and_labels_are_those_that_torchvision_reads(tmp_path, split, monkeypatch):
    write_cifar10(tmp_path / "cifar-10-batches-py")
    monkeypatch.setattr(datasets.cifar, "check_integrity", lambda *_: True)
    theirs = AsTorchvision(str(tmp_path), train=split == "train")
    ours = cifar10(str(tmp_path)).split(split)
    assert len(ours) == len(theirs)
    for (image, label), (expected, theirs_label) in zip(ours, theirs, strict=False):
        pixels = torch.from_numpy(np.array(expected)).permute(2, 0, 1) / 255
        assert torch.equal(image, pixels)
        assert label == theirs_label


@pytest.mark.parametrize("below", ["", "cifar-10-batches-py"])
def test_files_are_found_in_folder_or_subfolder(tmp_path, below):
    write_cifar10(tmp_path / "data" / below)
    data = cifar10(str(tmp_path / "data"))
    assert (len(data.train), len(data.test)) == (20, 4)
    assert (data.shape, data.classes) == ((3, 32, 32), 10)


@pytest.mark.parametrize("below", ["cifar10", "cifar-10-batches-py", "cifar10/cifar-10-batches-py"])
def test_default_folder_comes_from_the_environment(tmp_path, monkeypatch, below):
    write_cifar10(tmp_path / below)
    monkeypatch.setenv("NLBENCH_DATA", str(tmp_path))
    assert len(cifar10().test) == 4


def test_fine_labels_are_those_of_the_hundred_classes(tmp_path):
    folder = write_cifar100(tmp_path / "cifar-100-python")
    batch = pickle.loads((folder / "train").read_bytes())
    data = cifar100(str(tmp_path))
    assert [data.train[i][1] for i in range(6)] == batch["fine_labels"]
    assert data.classes == 100


def written_by_python_2(labels, data):
    """Opcode by opcode, as Python 2 and its NumPy pickled the published files."""

    def text(raw):
        return b"U" + bytes([len(raw)]) + raw

    def number(n):
        return b"J" + struct.pack("<i", n)

    raw = data.tobytes()
    dtype = b"cnumpy\ndtype\n(" + text(b"u1") + number(0) + number(1) + b"tR("
    dtype += number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n("
    array += number(0) + b"t" + text(b"b") + b"tR(" + number(1)
    array += b"(" + number(len(data)) + number(3072) + b"t" + dtype + b"I00\n"
    array += b"T" + struct.pack("<I", len(raw)) + raw + b"tb"
    items = text(b"data") + array + text(b"labels") + b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}(" + items + b"u."


def test_files_that_python_2_wrote_are_read(tmp_path):
    folder = write_cifar10(tmp_path / "cifar-10-batches-py")
    pixels = np.random.RandomState(1).randint(0, 256, (3, 3072)).astype(np.uint8)
    (folder / "test_batch").write_bytes(written_by_python_2([7, 0, 9], pixels))
    test = cifar10(str(tmp_path)).test
    assert [test[i][1] for i in range(3)] == [7, 0, 9]
    for index in range(3):
        expected = torch.tensor(pixels[index].reshape(3, 32, 32)) / 255
        assert torch.equal(test[index][0], expected)


def test_official_files_are_recognized_by_checksum(tmp_path, monkeypatch):
    folder = write_cifar10(tmp_path / "cifar-10-batches-py")
    assert "MD5 sums are not the published ones" in cifar10(str(tmp_path)).preprocessing

    def listed(*names):
        return [[n, hashlib.md5((folder / n).read_bytes()).hexdigest()] for n in names]

    batches = [f"data_batch_{i}" for i in range(1, 6)]
    monkeypatch.setattr(datasets.CIFAR10, "train_list", listed(*batches))
    monkeypatch.setattr(datasets.CIFAR10, "test_list", listed("test_batch"))
    assert "MD5 sums are the published ones" in cifar10(str(tmp_path)).preprocessing


class Harmful:
    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x02garbage",
        pickle.dumps(Harmful()),
        pickle.dumps({"labels": [1]}),
        pickle.dumps({"data": np.zeros((2, 7), np.uint8), "labels": [1, 1]}, 2),
        pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, 2),
        pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [10]}, 2),
    ],
)
def test_damaged_file_is_refused_by_name(tmp_path, capsys, content):
    folder = write_cifar10(tmp_path / "cifar-10-batches-py")
    (folder / "test_batch").write_bytes(content)
    with pytest.raises(RequestError, match="test_batch") as caught:
        cifar10(str(tmp_path)).sample(1)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""


def test_missing_dataset_is_refused_with_instructions(tmp_path):
    with pytest.raises(RequestError) as caught:
        cifar10(str(tmp_path))
    assert str(caught.value) == (
        f"cifar10: its files are not in {tmp_path}; put the folder cifar-10-batches-py of the "
        "Python version (it holds test_batch) there"
    )


def test_a_missing_batch_is_named(tmp_path):
    folder = write_cifar10(tmp_path / "cifar-10-batches-py")
    (folder / "data_batch_3").unlink()
    with pytest.raises(RequestError, match="data_batch_3"):
        cifar10(str(tmp_path))


def test_missing_folder_option_is_explained(monkeypatch):
    monkeypatch.delenv("NLBENCH_DATA", raising=False)
    with pytest.raises(RequestError, match=r"cifar10\.folder"):
        cifar10()


def test_fingerprint_changes_with_the_files_and_not_without(tmp_path):
    folder = write_cifar10(tmp_path / "cifar-10-batches-py")
    fingerprint = dataset_info(cifar10).fingerprint
    before = fingerprint(folder=str(tmp_path), download=False)
    assert before == fingerprint(folder=str(tmp_path), download=False)
    (folder / "test_batch").write_bytes(b"other")
    assert fingerprint(folder=str(tmp_path), download=False) != before


def test_failed_download_raises_in_one_line(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("no\nroute")

    monkeypatch.setattr(datasets, "CIFAR10", fail)
    with pytest.raises(RequestError):
        cifar10(str(tmp_path), download=True)


def test_files_that_are_there_are_not_downloaded_again(tmp_path, monkeypatch):
    folder = write_cifar10(tmp_path / "data")
    tried = []
    monkeypatch.setattr(
        "nlbench.models.datasets.published._download", lambda *given: tried.append(given)
    )
    assert len(cifar10(str(folder), download=True).test) == 4
    assert tried == []


def test_damaged_test_batch_is_refused_before_training(tmp_path):
    folder = tmp_path / "data"
    write_cifar10(folder)
    (folder / "test_batch").write_bytes(b"damaged")
    heard = []
    with pytest.raises(RequestError):
        train(vgg8, cifar10(str(folder)), progress=heard.append)
    assert heard == []
