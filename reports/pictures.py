"""Pictures of planes in the folder of a run. They are read without matplotlib, which draws them."""

from __future__ import annotations

import base64
import io
import warnings
from pathlib import Path

from nlbench.serialization.files import check_is_file

MAX_PICTURE_BYTES = 2**24

DESCRIPTION = "Description"
"""PNG keyword for the caption."""


def load_planes(folder: Path) -> tuple[tuple[str, str], ...]:
    """Load the pictures in the folder ``planes`` of a run as data URLs with captions.

    Links and unreadable or unusually large files are omitted with a warning. The folder may be
    from others.
    """
    pictures = []
    planes = folder / "planes"
    files = [] if planes.is_symlink() else sorted(planes.glob("*.png"))
    for file in files:
        try:
            content, caption = _read_picture(file)
        except (OSError, SyntaxError, ValueError) as error:
            warnings.warn(f"{file} is omitted from the page: {error}", stacklevel=2)
            continue
        encoded = base64.b64encode(content).decode("ascii")
        pictures.append((f"data:image/png;base64,{encoded}", caption))
    return tuple(pictures)


def _read_picture(file: Path) -> tuple[bytes, str]:
    """Read a PNG file and its caption."""
    if file.is_symlink():
        raise ValueError("it is a link")
    check_is_file(file, MAX_PICTURE_BYTES)
    content = file.read_bytes()
    # The header, whose first entry has the size, precedes everything else in a PNG file.
    width, height = (int.from_bytes(content[start : start + 4], "big") for start in (16, 20))
    # Limits for a picture on a page; `draw_plane` draws at most 1.2 million pixels.
    if width * height > 2**24:
        raise ValueError(f"it has {width} × {height} pixels")
    from PIL import Image  # needed for runs with pictures only

    with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
        image.verify()
        return content, str(image.info.get(DESCRIPTION, file.stem))
