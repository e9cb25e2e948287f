import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder

from nlbench.errors import RequestError
from nlbench.models.datasets.images import imagenet, images
from nlbench.models.datasets.items import read_image
from nlbench.models.training.recipes import vanilla
from nlbench.models.training.tasks import Classification
from nlbench.subjects import samples
from nlbench.subjects.data import Preprocessing, dataset_info


def picture(file, seed=0, size=(40, 30), mode="RGB"):
    file.parent.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=generator, dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).convert(mode).save(file)


@pytest.fixture
def animals(tmp_path):
    for index, name in enumerate(
        ["cat/a.png", "cat/b.JPEG", "ant/c.bmp", "ant/d.png", "dog/e.jpg"]
    ):
        picture(tmp_path / "animals" / name, index)
    return tmp_path / "animals"


def test_labels_follow_alphabetical_class_folders(animals):
    data = images(str(animals), size=16)
    theirs = ImageFolder(str(animals))
    assert data.classes == 3
    assert [data.test[i][1] for i in range(len(data.test))] == theirs.targets
    assert data.sample(5).inputs.shape == (5, 3, 16, 16)


def test_images_side_by_side_have_no_labels(tmp_path):
    for index in range(3):
        picture(tmp_path / f"{index}.png", index)
    (tmp_path / "notes.txt").write_text("no image")
    data = images(str(tmp_path), size=16)
    assert len(data.test) == 3
    assert data.classes == 1000
    assert data.sample(2).labels is None


def test_another_number_of_classes_leaves_images_without_labels(animals):
    assert images(str(animals), classes=3).sample(2).labels is not None
    data = images(str(animals), classes=1000)
    assert (data.classes, data.sample(2).labels) == (1000, None)


def test_folders_train_and_val_are_the_splits(tmp_path):
    picture(tmp_path / "train" / "x" / "1.png")
    picture(tmp_path / "train" / "y" / "2.png")
    picture(tmp_path / "val" / "x" / "3.png")
    picture(tmp_path / "val" / "y" / "4.png")
    picture(tmp_path / "val" / "y" / "5.png")
    data = images(str(tmp_path))
    assert (len(data.train), len(data.test), data.classes) == (2, 3, 2)
    assert "test split: val" in data.preprocessing


def test_only_the_images_that_are_drawn_are_read(animals):
    for file in sorted(animals.rglob("*.*"))[1:]:
        file.write_bytes(b"not an image")
    data = images(str(animals), size=16)
    readable = next(
        seed
        for seed in range(100)
        if torch.randperm(5, generator=torch.Generator().manual_seed(seed))[0] == 0
    )
    assert data.sample(1, seed=readable).inputs.shape == (1, 3, 16, 16)
    with pytest.raises(RequestError):
        data.sample(2, seed=readable)


def test_stream_holds_images_of_sample_batch_at_time(animals):
    data = images(str(animals), size=16)
    parts = list(data.stream(None, seed=2, batch=2))
    assert [len(part.inputs) for part in parts] == [2, 2, 1]
    whole = data.sample(None, seed=2)
    assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
    assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)


def test_the_preprocessing_of_weights_replaces_the_usual_one(animals):
    wanted = Preprocessing(24, 27, (0.5,) * 3, (0.25,) * 3, "bicubic", origin="somebody")
    data = images(str(animals)).adapt(wanted)
    assert data.shape == (3, 24, 24)
    sample = data.sample(None)
    torch.testing.assert_close(sample.inputs, (sample.images - 0.5) / 0.25)
    assert "27 pixels on the shorter side (bicubic" in data.preprocessing
    assert "as for somebody" in data.preprocessing


def test_explicit_size_overrides_that_of_the_weights(animals):
    wanted = Preprocessing(224, 256, (0.5,) * 3, (0.25,) * 3)
    data = images(str(animals), size=28).adapt(wanted)
    assert data.shape == (3, 28, 28)
    assert data.mean == (0.5,) * 3
    assert "resized to 32 pixels" in data.preprocessing


def test_usual_preprocessing_is_that_of_the_older_networks(tmp_path):
    from torchvision.models import AlexNet_Weights

    picture(tmp_path / "one.png", size=(300, 280))
    ours = images(str(tmp_path)).sample(1).inputs[0]
    with Image.open(tmp_path / "one.png") as image:
        expected = AlexNet_Weights.IMAGENET1K_V1.transforms()(image)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


def test_squashing_ignores_proportions(tmp_path):
    picture(tmp_path / "wide.png", size=(64, 16))
    squashed = Preprocessing(16, 16, (), (), squash=True)
    with Image.open(tmp_path / "wide.png") as image:
        expected = image.resize((16, 16), Image.Resampling.BILINEAR)
    pixels = (read_image(tmp_path / "wide.png", squashed) * 255).round().to(torch.uint8)
    assert pixels.permute(1, 2, 0).numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_other_kinds_of_images_get_three_channels(tmp_path, mode):
    file = tmp_path / ("image.jpg" if mode == "CMYK" else "image.png")
    picture(file, mode=mode)
    assert read_image(file, Preprocessing(8, 8, (), ())).shape == (3, 8, 8)


@pytest.mark.parametrize(
    ("dataset", "entries", "name"),
    [
        (lambda folder: images(f"{folder}/nowhere"), [], "nowhere"),
        (images, [], "images"),
        (images, ["cat/1.png", "bee"], "bee"),
        (images, ["train/x/1.png"], "val"),
        (images, ["val/x/1.png"], "train"),
        (images, ["train/a/1.png", "train/b/1.png", "val/a/1.png", "val/c/1.png"], "'b'"),
        (images, ["loose.png", "thumbs/1.png"], r"loose\.png"),
        (imagenet, [], "val"),
        (imagenet, ["val/n01440764/a.JPEG"], "val"),
        (imagenet, ["val/ILSVRC2012_val_00000001.JPEG"], "val"),
    ],
)
def test_unusable_folder_is_refused_by_name(tmp_path, dataset, entries, name):
    for entry in entries:
        (picture if "." in entry else Path.mkdir)(tmp_path / entry)
    with pytest.raises(RequestError, match=name):
        dataset(str(tmp_path)).sample(1)


def test_imagenets_labels_are_order_of_thousand_folders(tmp_path):
    for index in range(1000):
        (tmp_path / "val" / f"n{index:08d}").mkdir(parents=True)
        file = tmp_path / "val" / f"n{index:08d}" / "ILSVRC2012_val_1.JPEG"
        if index:
            file.symlink_to(tmp_path / "val" / "n00000000" / file.name)
        else:
            picture(file)
    data = imagenet(str(tmp_path), size=16)
    assert data.classes == 1000
    assert [data.test[i][1] for i in (0, 1, 999)] == [0, 1, 999]
    with pytest.raises(RequestError):
        data.sample(1, split="train")


def test_the_fingerprint_changes_with_the_images(animals):
    fingerprint = dataset_info(images).fingerprint
    before = fingerprint(folder=str(animals), size=0, classes=0)
    assert before == fingerprint(folder=str(animals), size=0, classes=0)
    image = animals / "cat" / "new.png"
    picture(image)
    added = fingerprint(folder=str(animals), size=0, classes=0)
    assert added != before
    state = image.stat()
    content = image.read_bytes()
    image.write_bytes(content[:-1] + b"x")
    os.utime(image, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert fingerprint(folder=str(animals), size=0, classes=0) != added


@pytest.mark.parametrize("size", [-5, 4097])
def test_invalid_image_size_raises(size):
    with pytest.raises(RequestError):
        dataset_info(images).options["size"].parse(size, "images.size")


def test_a_class_may_be_called_train(tmp_path):
    for name in ("car", "train"):
        picture(tmp_path / name / "1.png")
    data = images(str(tmp_path))
    assert (len(data.test), data.classes) == (2, 2)


PLAIN = Preprocessing(4, 4, (0.5,) * 3, (0.5,) * 3)


def test_sixteen_bit_images_keep_their_upper_byte(tmp_path):
    coarse = torch.arange(16, dtype=torch.int32).reshape(4, 4).numpy() * 16
    fine = (coarse * 256 + 77).astype("uint16")
    Image.fromarray(fine).save(tmp_path / "fine.png")
    Image.fromarray(coarse.astype("uint8")).save(tmp_path / "coarse.png")
    read = [read_image(tmp_path / f"{name}.png", PLAIN) for name in ("fine", "coarse")]
    assert torch.equal(*read)
    assert read[0].unique().numel() == 16


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_pixels_without_a_white_are_refused(tmp_path, dtype):
    Image.fromarray(torch.rand(4, 4).numpy().astype(dtype)).save(tmp_path / "x.tiff")
    with pytest.raises(RequestError):
        read_image(tmp_path / "x.tiff", PLAIN)


@pytest.mark.parametrize("name", ["cat/a.png", "cat/b.JPEG", "ant/c.bmp", "dog/e.jpg"])
def test_truncated_image_is_refused_before_training(animals, name):
    data = images(str(animals), size=16)
    data.train.check()
    whole = (animals / name).read_bytes()
    (animals / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RequestError, match=name):
        data.train.check()
    (animals / name).write_bytes(b"")
    with pytest.raises(RequestError):
        Classification(data, vanilla, 0)


@pytest.mark.parametrize("kind", ["pipe", "sides"])
def test_unreadable_image_files_raise(tmp_path, kind):
    file = tmp_path / "a.png"
    if kind == "pipe":
        os.mkfifo(file)
    else:
        header = struct.pack(">4sIIBBBBB", b"IHDR", 60_000, 60_000, 8, 2, 0, 0, 0)
        size = struct.pack(">I", len(header) - 4)
        check = struct.pack(">I", zlib.crc32(header))
        file.write_bytes(b"\x89PNG\r\n\x1a\n" + size + header + check)
    with pytest.raises(RequestError):
        images(str(tmp_path)).sample(1)


def test_damaged_png_is_refused_before_training(animals):
    file = animals / "cat" / "a.png"
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file)
    images(str(animals), size=16).train.check()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(RequestError):
        images(str(animals), size=16).train.check()


def test_trailing_bytes_after_an_image_are_ignored(animals):
    for name in ("cat/a.png", "cat/b.JPEG"):
        with (animals / name).open("ab") as file:
            file.write(b"\0" * 1000)
    images(str(animals), size=16).train.check()


def test_damaged_image_fails_its_subject_before_measuring(animals):
    (animals / "dog" / "e.jpg").write_bytes(b"\xff\xd8 no image")
    data = images(str(animals), size=16)
    with pytest.raises(RequestError):
        samples.draw(data, None, split="test", seed=0, model=torch.nn.Identity(), max_bytes=0)


def test_oversized_image_is_refused(tmp_path, monkeypatch):
    picture(tmp_path / "x.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(RequestError):
        read_image(tmp_path / "x.png", PLAIN)


def test_links_to_folders_above_do_not_repeat_images(animals):
    expected = [images(str(animals)).test._files[i] for i in range(5)]
    (animals / "ant" / "again").symlink_to(".")
    (animals / "cat" / "above").symlink_to("..")
    (animals / "cat" / "again").symlink_to(animals / "cat")
    (animals / "loop").symlink_to(".")
    (animals / "self").symlink_to("self")
    data = images(str(animals))
    assert (data.classes, data.test._files) == (3, expected)


def test_linked_folders_are_read_once(animals):
    for name, other in (("x", "y"), ("y", "x")):
        (animals / "ant" / name).mkdir()
        (animals / "ant" / name / "other").symlink_to(f"../{other}")
        picture(animals / "ant" / name / "1.png")
    assert len(images(str(animals)).test) == 7


def test_linked_class_folders_and_files_are_read(animals, tmp_path):
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "cat").symlink_to(animals / "cat")
    (tmp_path / "linked" / "pets").mkdir()
    (tmp_path / "linked" / "pets" / "dogs").symlink_to(animals / "dog")
    (tmp_path / "linked" / "pets" / "f.png").symlink_to(animals / "ant" / "d.png")
    assert images(str(tmp_path / "linked")).test.read_labels() == [0, 0, 1, 1]
