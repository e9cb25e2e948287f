"""Folders of image files: ImageNet's, and anybody's; and where datasets' files lie."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from nlbench.errors import RequestError
from nlbench.measure import Source
from nlbench.options import Option
from nlbench.subjects.data import Dataset, Preprocessing, dataset

__all__ = ["FOLDER", "imagenet", "images", "wanted_folder"]


FOLDER = Option("", "where the files are; by default below the folder that NLBENCH_DATA names")

USUAL = Preprocessing(224, 256, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""What most networks for ImageNet were trained with."""

SIZE = Option(
    0,
    "side of the square in pixels; 0: what the model's weights want, else 224",
    minimum=0,
    maximum=4096,
)
VALIDATION = ("val", "validation", "test")

Files = list[tuple[str, int]]


def wanted_folder(name: str, folder: str) -> Path:
    """Folder that a dataset is looked for in.

    Parameters
    ----------
    name : str
        The dataset's.
    folder : str
        The option; empty: ``$NLBENCH_DATA/NAME``.

    Raises
    ------
    nlbench.RequestError
        If neither says where.

    Examples
    --------
    >>> wanted_folder("mnist", "somewhere").name
    'somewhere'
    """
    if folder:
        return Path(os.path.expanduser(folder))  # noqa: PTH111 - Path's fails for unknown users
    root = os.environ.get("NLBENCH_DATA", "")
    if not root:
        raise RequestError(
            f"{name}: no folder is given; say where its files are with --set {name}.folder=PATH, "
            f"or set NLBENCH_DATA to a folder and put them into its subfolder {name}"
        )
    return Path(os.path.expanduser(root), name)  # noqa: PTH111


def _fingerprint_of(name: str) -> Callable[..., str]:
    def fingerprint(folder: str = "", **_: Any) -> str:
        place = _existing(name, folder)
        kept = [place, *sorted(p for p in place.glob("*") if p.is_dir())]
        kept += [
            inner for p in kept[1:] if p.name in ("train", *VALIDATION) for inner in p.glob("*")
        ]
        # A folder's time changes when a file in it is added, removed or renamed.
        return " ".join(f"{p.name}:{p.stat().st_mtime_ns}" for p in sorted(kept) if p.is_dir())

    return fingerprint


@dataset(options={"folder": FOLDER, "size": SIZE}, fingerprint=_fingerprint_of("imagenet"))
def imagenet(folder: str = "", size: int = 0) -> Dataset:
    """ImageNet-1K: photographs of 1,000 classes in a folder a class, for training and validation.

    The folders ``train`` and ``val`` lie in `folder`, each with 1,000 folders named after
    their WordNet identifiers (``n01440764``, …), whose order gives the labels; the test
    split is ``val``. Images are read one at a time, when they are asked for.

    Parameters
    ----------
    folder : str
        Where the two folders are; by default ``$NLBENCH_DATA/imagenet``.
    size : int
        Side of the square that the network is given. 0: as the model's weights want it,
        with their resizing, cropping and normalisation; else 224.

    Returns
    -------
    Dataset
        ``shape`` (3, size, size), 1,000 classes.

    Raises
    ------
    nlbench.RequestError
        If the folders aren't there, or don't hold 1,000 classes.
    """
    place = _existing("imagenet", folder)
    if not any((place / name).is_dir() for name in ("val", "train")):
        raise RequestError(
            f"imagenet: {place} has no folder val; put ImageNet's val there, with a folder a class"
        )

    def find(split: str) -> Files:
        files, classes = _by_class("imagenet", place / split)
        if len(classes) != 1000:
            raise RequestError(
                f"imagenet: {place / split} has {len(classes)} folders, expected 1000, one a class"
            )
        return files

    return _of_files(
        "imagenet",
        train=lambda: find("train"),
        test=lambda: find("val"),
        classes=1000,
        size=size,
        note="labels by the order of the classes' folders",
        source=Source(
            "O. Russakovsky et al. ImageNet Large Scale Visual Recognition Challenge. "
            "International Journal of Computer Vision, 2015."
        ),
    )


@dataset(
    options={
        "folder": FOLDER,
        "size": SIZE,
        "classes": Option(
            0,
            "number of logits; 0: as many as class folders, else 1000",
            minimum=0,
            maximum=1_000_000,
        ),
    },
    fingerprint=_fingerprint_of("images"),
)
def images(folder: str = "", size: int = 0, classes: int = 0) -> Dataset:
    """Any folder of image files, with a folder for each class or without.

    With the folders ``train`` and ``val`` (or ``validation``, ``test``) in it, those are
    the two splits; otherwise both splits are all images. Class folders, in alphabetical
    order, give the labels; images that lie side by side have none.

    Parameters
    ----------
    folder : str
        By default ``$NLBENCH_DATA/images``.
    size : int
        See `imagenet`.
    classes : int
        Number of logits of the networks built for it. 0: the number of class folders, or
        1,000 if there are none. Another number than that of the folders leaves the images
        without labels, since theirs are not the network's.

    Returns
    -------
    Dataset
        ``shape`` (3, size, size).

    Raises
    ------
    nlbench.RequestError
        If the folder isn't there, or holds no images; if images lie beside class folders; if
        one of the two splits is missing, or their class folders differ.
    """
    place = _existing("images", folder)
    train, test = _splits(place)
    is_split = train != test
    found = _class_folders(test)
    return _of_files(
        "images",
        train=lambda: _any_files(train),
        test=lambda: _any_files(test),
        classes=classes or len(found) or 1000,
        size=size,
        note=(
            f"test split: {test.name}, training split: train"
            if is_split
            else "both splits are all images"
        ),
        source=Source(""),
        labelled=bool(found) and classes in (0, len(found)),
    )


def _of_files(
    name: str,
    *,
    train: Callable[[], Files],
    test: Callable[[], Files],
    classes: int,
    size: int,
    note: str,
    source: Source,
    labelled: bool = True,
) -> Dataset:
    from .items import ImageFiles

    def with_preprocessing(wanted: Preprocessing) -> Dataset:
        used = wanted
        if size and size != wanted.crop:
            used = replace(wanted, crop=size, resize=round(wanted.resize * size / wanted.crop))
        return Dataset(
            name=name,
            train=ImageFiles(train, used),
            test=ImageFiles(test, used),
            shape=(3, used.crop, used.crop),
            classes=classes,
            mean=used.mean,
            std=used.std,
            preprocessing=(
                f"{used.text}; divided by 255; normalised per channel by mean {used.mean} and "
                f"standard deviation {used.std}; {note}"
            ),
            source=source,
            labelled=labelled,
            adapt=with_preprocessing,
        )

    return with_preprocessing(USUAL)


def _splits(place: Path) -> tuple[Path, Path]:
    """Where the training and the test images are; one and the same where they aren't split."""
    validation = next((n for n in VALIDATION if (place / n).is_dir()), None)
    if validation is None or not (place / "train").is_dir():
        # A class may be called train, but not the only one.
        if _class_folders(place) in (["train"], [validation]):
            there = validation or "train"
            raise RequestError(
                f"images: {place} has no folder beside {there}; put "
                f"{'val' if there == 'train' else 'train'} there, or give {place / there} as the "
                "folder"
            )
        return place, place
    train, test = place / "train", place / validation
    unlike = sorted(set(_class_folders(train)) ^ set(_class_folders(test)))
    if unlike:
        raise RequestError(
            f"images: the class folder '{unlike[0]}' is only in one of {train} and {test}; the "
            "order of the folders gives the labels, so both need the same ones"
        )
    return train, test


def _existing(name: str, folder: str) -> Path:
    place = wanted_folder(name, folder)
    if not place.is_dir():
        what = (
            "ImageNet's folders train and val" if name == "imagenet" else "a folder of image files"
        )
        raise RequestError(f"{name}: there is no folder {place}; put {what} there")
    return place


def _class_folders(place: Path) -> list[str]:
    return sorted(p.name for p in place.glob("*") if p.is_dir() and not p.name.startswith("."))


def _by_class(name: str, place: Path) -> tuple[Files, list[str]]:
    from torchvision.datasets import folder

    if not place.is_dir():
        raise RequestError(
            f"{name}: there is no folder {place}; put one there, with a folder a class"
        )
    classes = _class_folders(place)
    if not classes:
        raise RequestError(f"{name}: {place} has no folders in it, expected one a class")
    try:
        files = folder.make_dataset(
            place,
            {each: label for label, each in enumerate(classes)},
            extensions=folder.IMG_EXTENSIONS,
        )
    except FileNotFoundError as error:
        raise RequestError(f"{name}: {' '.join(str(error).split())}") from error
    return files, classes


def _any_files(place: Path) -> Files:
    from torchvision.datasets import folder

    flat = sorted(p for p in place.glob("*") if p.suffix.lower() in folder.IMG_EXTENSIONS)
    classes = _class_folders(place)
    if flat and classes:
        raise RequestError(
            f"images: {place} holds images, such as {flat[0].name}, beside folders, such as "
            f"{classes[0]}; put all images into class folders, or none"
        )
    if classes:
        return _by_class("images", place)[0]
    if not flat:
        raise RequestError(
            f"images: {place} holds no images; put files of "
            f"{', '.join(folder.IMG_EXTENSIONS)} there"
        )
    return [(str(p), 0) for p in flat]
