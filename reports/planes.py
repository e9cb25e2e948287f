"""Pictures of planes through input space, as ``nlbench plane`` leaves them in a run's folder."""

from __future__ import annotations

import base64
import io
import warnings
from pathlib import Path

from PIL import Image

from .layout import Picture

__all__ = ["planes_of"]

_DESCRIPTION = "Description"
"""PNG's keyword for what an image shows."""


def planes_of(folder: Path) -> tuple[Picture, ...]:
    """Take in the pictures of a run's folder ``planes``, by name; each says what it shows.

    What can't be read is left out with a warning: the page is about the numbers.
    """
    found = []
    for file in sorted((folder / "planes").glob("*.png")):
        try:
            content = file.read_bytes()
            with Image.open(io.BytesIO(content)) as image:
                image.verify()
                caption = str(image.info.get(_DESCRIPTION, file.stem))
        except (OSError, SyntaxError, ValueError) as error:
            warnings.warn(f"{file} is left out of the page: {error}", stacklevel=2)
            continue
        encoded = base64.b64encode(content).decode("ascii")
        found.append(Picture(f"data:image/png;base64,{encoded}", caption))
    return tuple(found)
