"""Folders of image files: ImageNet and user folders."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from nlbench.citation import Source
from nlbench.errors import RequestError
from nlbench.options import Option
from nlbench.serialization.files import check_is_file
from nlbench.serialization.versions import files_version
from nlbench.subjects.data import Dataset, Preprocessing, dataset

FOLDER = Option("", "folder that holds the files; default: a subfolder of NLBENCH_DATA")

IMAGENET_PREPROCESSING = Preprocessing(224, 256, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Preprocessing of most ImageNet networks."""

SIZE = Option(
    0,
    "side of the square in pixels; 0: the side that the model's weights expect, else that of the "
    "images, if they are squares of one size below 224, else 224",
    minimum=0,
    maximum=4096,
)
CHANNELS = Option(3, "3: RGB; 1: grayscale", minimum=1, maximum=3)
EXIF = Option(False, "rotate images as their EXIF data say")
COMPARED_FILES = 64
"""Maximum number of images whose sizes are compared, evenly spaced over the files."""
VALIDATION = ("val", "validation", "test")

LabelledFiles = list[tuple[str, int]]


def dataset_folder(name: str, folder: str) -> Path:
    """Return the folder of a dataset: the value of its option, or else ``$NLBENCH_DATA/NAME``.

    Examples
    --------
    >>> dataset_folder("mnist", "somewhere").name
    'somewhere'
    """
    if folder:
        return Path(os.path.expanduser(folder))  # noqa: PTH111 - Path.expanduser raises for unknown users
    root = os.environ.get("NLBENCH_DATA", "")
    if not root:
        raise RequestError(
            f"{name}: its folder is unknown; set it with --set {name}.folder=PATH, "
            f"or set NLBENCH_DATA to a folder with the subfolder {name}"
        )
    return Path(os.path.expanduser(root), name)  # noqa: PTH111


def _fingerprint(name: str, folder: str = "", **_: Any) -> str:
    root = _existing(name, folder)
    paths = [root, *sorted(p for p in root.glob("*") if p.is_dir())]
    paths += [inner for p in paths[1:] if p.name in ("train", *VALIDATION) for inner in p.glob("*")]
    # A folder's modification time changes when a file in it is added, removed or renamed.
    return " ".join(f"{p.name}:{p.stat().st_mtime_ns}" for p in sorted(paths) if p.is_dir())


def _files_fingerprint(folder: str = "", **_: Any) -> str:
    return files_version(list(shown_files(_existing("images", folder))))


def shown_files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder that are not hidden."""
    for root, subfolders, names in os.walk(folder):
        subfolders[:] = sorted(n for n in subfolders if n[0] != ".")
        yield from (Path(root, n) for n in sorted(names) if n[0] != ".")


@dataset(options={"folder": FOLDER, "size": SIZE}, fingerprint=partial(_fingerprint, "imagenet"))
def imagenet(folder: str = "", size: int = 0) -> Dataset:
    """ImageNet-1K: photographs of 1,000 classes, with a folder per class.

    `folder` contains the folders ``train`` and ``val``, each with 1,000 folders named by WordNet
    identifiers (``n01440764``, …), whose order determines the labels. The test split is ``val``.
    Images are read on access.
    """
    root = _existing("imagenet", folder)
    if not any((root / name).is_dir() for name in ("val", "train")):
        raise RequestError(
            f"imagenet: {root} has no folder val; put ImageNet's val there, with a folder per class"
        )

    def find(split: str) -> LabelledFiles:
        files, classes = _files_by_class("imagenet", root / split)
        if len(classes) != 1000:
            raise RequestError(
                f"imagenet: {root / split} has {len(classes)} folders, expected 1000, one per class"
            )
        return files

    source = Source(
        "O. Russakovsky et al. ImageNet Large Scale Visual Recognition Challenge. "
        "International Journal of Computer Vision, 2015."
    )
    splits = _ImageSplits(
        "imagenet",
        partial(find, "train"),
        partial(find, "val"),
        size,
        1000,
        "labels by the order of the classes' folders",
        declared={"source": source},
    )
    return splits.preprocessed(IMAGENET_PREPROCESSING)


@dataset(
    options={
        "folder": FOLDER,
        "size": SIZE,
        "classes": Option(
            0,
            "number of logits; 0: number of class folders, else 1000",
            minimum=0,
            maximum=1_000_000,
        ),
        "channels": CHANNELS,
        "exif": EXIF,
    },
    fingerprint=_files_fingerprint,
)
def images(
    folder: str = "", size: int = 0, classes: int = 0, channels: int = 3, exif: bool = False
) -> Dataset:
    """Any folder of image files, with or without a folder per class.

    If it has the folders ``train`` and ``val`` (or ``validation``, ``test``), they are the two
    splits; otherwise both splits contain all images. The alphabetical order of class folders
    determines the labels. Images without class folders have no labels, nor do those of a given
    number of `classes` that isn't that of the folders. Hidden files are no samples;
    the preprocessing counts files of other formats.
    """
    return image_folder(_existing("images", folder), "images", size, channels, exif, classes)


def image_folder(
    root: Path, name: str, size: int, channels: int, exif: bool, classes: int = 0
) -> Dataset:
    """Open a folder of images, see `images`."""
    if channels == 2:
        raise RequestError("images.channels: expected 1 or 3, got 2")
    train, test = _splits(root)
    class_folders = _class_folders(test)
    note = f"test split: {test.name}, training split: train"
    find_test = partial(_image_files, test)
    splits = _ImageSplits(
        name,
        partial(_image_files, train),
        find_test,
        size,
        classes or len(class_folders) or 1000,
        note if train != test else "both splits are all images",
        channels,
        exif,
        {"labelled": bool(class_folders) and classes in (0, len(class_folders))},
    )
    steps = IMAGENET_PREPROCESSING
    side = None if size else _common_side(find_test)
    return splits.preprocessed(steps if side is None else replace(steps, crop=side, resize=side))


@dataclass(frozen=True)
class _ImageSplits:
    """Files of the training and the test split, and how they are read.

    The side of the images is that of the preprocessing unless a `size` is given. `declared` are
    further fields of the dataset.
    """

    name: str
    train: Callable[[], LabelledFiles]
    test: Callable[[], LabelledFiles]
    size: int
    classes: int
    note: str
    channels: int = 3
    exif: bool = False
    declared: Mapping[str, Any] = field(default_factory=dict)

    def preprocessed(self, steps: Preprocessing) -> Dataset:
        """Return the dataset with the preprocessing that a model requires."""
        from .items import ImageFiles

        size = self.size
        channels = self.channels
        if size and size != steps.crop:
            steps = replace(steps, crop=size, resize=round(steps.resize * size / steps.crop))
        mean, std = (
            numbers if channels == len(numbers) else (sum(numbers) / len(numbers),)
            for numbers in (steps.mean, steps.std)
        )
        form = "rotated as EXIF data say; " if self.exif else ""
        form += "converted to grayscale; " if channels == 1 else ""
        return Dataset(
            name=self.name,
            train=ImageFiles(self.train, steps, channels, exif=self.exif),
            test=ImageFiles(self.test, steps, channels, exif=self.exif),
            shape=(channels, steps.crop, steps.crop),
            classes=self.classes,
            mean=mean,
            std=std,
            preprocessing=(
                f"{form}{steps.text}; divided by 255; normalised per channel by mean {mean} "
                f"and standard deviation {std}; {self.note}"
            ),
            adapt=self.preprocessed,
            **self.declared,
        )


def _common_side(find: Callable[[], LabelledFiles]) -> int | None:
    """Return the side of the images if all compared ones are squares of one small size."""
    from PIL import Image

    from .items import image_errors

    sizes = set()
    # What can't be listed or read is reported when the images are read.
    with contextlib.suppress(RequestError, OSError):
        files = find()
        for path, _ in files[:: -(-len(files) // COMPARED_FILES)]:
            check_is_file(Path(path))
            with image_errors(path), Image.open(path) as image:
                sizes.add(image.size)
    if len(sizes) != 1:
        return None
    width, height = sizes.pop()
    return width if width == height < IMAGENET_PREPROCESSING.crop else None


def _splits(root: Path) -> tuple[Path, Path]:
    """Return the folders of the training and the test split, which may be the same."""
    validation = next((n for n in VALIDATION if (root / n).is_dir()), None)
    if validation is None or not (root / "train").is_dir():
        # A class may be called train, unless it is the only one.
        if _class_folders(root) in (["train"], [validation]):
            present = validation or "train"
            absent = "val" if present == "train" else "train"
            raise RequestError(
                f"images: {root} has only the folder {present}; add {absent}, or set the folder "
                f"to {root / present}"
            )
        return root, root
    train = root / "train"
    test = root / validation
    unshared = sorted(set(_class_folders(train)) ^ set(_class_folders(test)))
    if unshared:
        raise RequestError(
            f"images: the class folder '{unshared[0]}' is only in one of {train} and {test}; the "
            "order of the folders determines the labels, so both need the same folders"
        )
    return train, test


def _existing(name: str, folder: str) -> Path:
    root = dataset_folder(name, folder)
    if not root.is_dir():
        expected = (
            "ImageNet's folders train and val" if name == "imagenet" else "a folder of image files"
        )
        raise RequestError(f"{name}: there is no folder {root}; put {expected} there")
    return root


def _class_folders(root: Path) -> list[str]:
    outer = _list_parents(root)
    folders = (p for p in root.glob("*") if p.is_dir() and not p.name.startswith("."))
    return sorted(p.name for p in folders if p.resolve() not in outer)


def _list_parents(folder: Path) -> set[Path]:
    """Return a folder and its parents. A link to any of them would form a loop."""
    resolved = folder.resolve()
    return {resolved, *resolved.parents}


def _files_by_class(name: str, root: Path) -> tuple[LabelledFiles, list[str]]:
    from torchvision.datasets import folder

    if not root.is_dir():
        raise RequestError(
            f"{name}: there is no folder {root}; put one there, with a folder per class"
        )
    classes = _class_folders(root)
    if not classes:
        raise RequestError(f"{name}: {root} has no folders, expected one per class")
    files_of = {each: _files_below(root / each, folder.IMG_EXTENSIONS) for each in classes}
    empty = [each for each, files in files_of.items() if not files]
    if empty:
        others = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise RequestError(
            f"{name}: the class folder {root / empty[0]}{others} holds no images; supported "
            f"formats are {', '.join(folder.IMG_EXTENSIONS)}"
        )
    files = [(file, label) for label, each in enumerate(classes) for file in files_of[each]]
    return files, classes


def _files_below(folder: Path, extensions: tuple[str, ...]) -> list[str]:
    """List the image files below a class folder, folder by folder.

    Links to folders are followed, but no folder is read twice, and no parent folder is read.
    """

    def fail(error: OSError) -> None:
        raise error

    visited = _list_parents(folder)
    images: list[tuple[str, list[str]]] = []
    for root, subfolders, names in os.walk(folder, onerror=fail, followlinks=True):
        shown = [n for n in names if n.lower().endswith(extensions) and n[0] != "."]
        images.append((root, sorted(shown)))
        unread = {}
        for name in sorted(n for n in subfolders if n[0] != "."):
            target = Path(root, name).resolve()
            if target not in visited:
                visited.add(target)
                unread[name] = target
        subfolders[:] = unread
    return [os.path.join(root, name) for root, names in sorted(images) for name in names]  # noqa: PTH118


def _image_files(root: Path) -> LabelledFiles:
    from torchvision.datasets import folder

    files = (p for p in root.glob("*") if p.suffix.lower() in folder.IMG_EXTENSIONS)
    images = sorted(p for p in files if p.name[0] != ".")
    classes = _class_folders(root)
    if images and classes:
        raise RequestError(
            f"images: {root} holds both images, such as {images[0].name}, and folders, such as "
            f"{classes[0]}; put all images into class folders, or none"
        )
    if classes:
        return _files_by_class("images", root)[0]
    if not images:
        raise RequestError(
            f"images: {root} holds no images; put {', '.join(folder.IMG_EXTENSIONS)} files there"
        )
    return [(str(p), 0) for p in images]
