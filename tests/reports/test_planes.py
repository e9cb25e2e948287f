"""Pictures in a run's folder, which may be from others."""

import os
import shutil
import struct
import zlib
from pathlib import Path

import pytest
import torch
from PIL import Image, PngImagePlugin
from torch import nn

from nlbench.errors import RequestError
from nlbench.probes.lines import plane
from nlbench.reports.pictures import MAX_PICTURE_BYTES, load_planes
from nlbench.reports.planes import draw_plane


def chunk(kind, data):
    body = kind + data
    return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))


def header(width, height):
    """A PNG file that has a header alone."""
    size = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IEND", b"")


@pytest.fixture
def planes(tmp_path):
    folder = tmp_path / "run" / "planes"
    folder.mkdir(parents=True)
    caption = PngImagePlugin.PngInfo()
    caption.add_text("Description", "mine")
    Image.new("L", (4, 4)).save(folder / "a.png", pnginfo=caption)
    return folder


@pytest.mark.parametrize(
    "kind", ["pipe", "device", "link", "huge", "wide", "long", "text", "folder", "jpeg", "cut"]
)
def test_a_strange_file_is_omitted(planes, tmp_path, kind):
    file = planes / "b.png"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "link":
        shutil.copy(planes / "a.png", tmp_path / "private.png")
        file.symlink_to(tmp_path / "private.png")
    elif kind in ("huge", "wide"):
        file.write_bytes(header(*{"huge": (60_000, 60_000), "wide": (2**31 - 1, 1)}[kind]))
    elif kind == "long":
        file.touch()
        os.truncate(file, MAX_PICTURE_BYTES + 1)
    elif kind == "text":
        file.write_text("no picture")
    elif kind == "folder":
        file.mkdir()
    elif kind == "jpeg":
        Image.new("L", (4, 4)).save(file, format="JPEG")
    else:
        file.write_bytes((planes / "a.png").read_bytes()[:20])
    with pytest.warns(UserWarning, match=r"b\.png"):
        pictures = load_planes(planes.parent)
    assert [caption for _, caption in pictures] == ["mine"]


def test_a_linked_folder_is_not_read(planes, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "planes").symlink_to(planes)
    assert load_planes(tmp_path / "other") == ()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_full_disk_leaves_no_partial_picture(tmp_path, monkeypatch):
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(os, "fsync", lambda handle: os.write(full, b"x"))
    picture = plane(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.eye(3, 2), size=4)
    with pytest.raises(RequestError):
        draw_plane(picture, tmp_path / "plane.png", ["a", "b", "c"])
    assert list(tmp_path.iterdir()) == []
