"""Pictures of planes through input space."""

from __future__ import annotations

import base64
import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from nlbench.errors import RequestError
from nlbench.serialization.files import check_is_file

if TYPE_CHECKING:
    from nlbench.probes.lines import Plane

PANELS = 3
"""Number of groups of layers drawn next to the picture of all layers."""

MAX_PICTURE_BYTES = 2**24
MAX_PICTURE_PIXELS = 2**24
"""Limits for a picture on a page; `draw_plane` draws at most 1.2 million pixels."""

_DESCRIPTION = "Description"
"""PNG keyword for the caption."""


def planes_of(folder: Path) -> tuple[tuple[str, str], ...]:
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
    if width * height > MAX_PICTURE_PIXELS:
        raise ValueError(f"it has {width} × {height} pixels")
    with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
        image.verify()
        return content, str(image.info.get(_DESCRIPTION, file.stem))


def draw_plane(plane: Plane, path: Path, names: list[str], caption: str = "") -> None:
    """Plot the boundaries of all layers and of groups of layers, with the decision boundary.

    In a PNG file, the caption is stored as metadata.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import numpy as np
    from matplotlib import pyplot as plt
    from matplotlib.colors import LogNorm

    sites = list(plane.right)
    groups = [list(part) for part in np.array_split(np.array(sites, dtype=object), PANELS)]
    shown = [("all", sites), *((_span(part), part) for part in groups if part)]
    shown = shown if len(sites) > 1 else shown[:1]
    u, v = plane.u.numpy(), plane.v.numpy()
    extent = (u[0], u[-1], v[0], v[-1])
    height = 3.4 * (v[-1] - v[0]) / (u[-1] - u[0]) + 0.7
    figure, axes = plt.subplots(
        1, len(shown), figsize=(3.4 * len(shown), height), squeeze=False, layout="constrained"
    )
    decisions = plane.decisions.numpy()
    for axis, (title, part) in zip(axes[0], shown, strict=True):
        counts = plane.boundaries(part).numpy().astype(float)
        # The last row and column have no neighbour to compare them with.
        counts[-1], counts[:, -1] = counts[-2], counts[:, -2]
        largest = max(2.0, float(counts.max()))
        axis.imshow(
            np.maximum(counts, 0.5),
            origin="lower",
            extent=extent,
            cmap="inferno",
            norm=LogNorm(0.5, largest),
            interpolation="nearest",
        )
        for kind in np.unique(decisions):
            inside = (decisions == kind).astype(float)
            if 0 < inside.mean() < 1:
                axis.contour(u, v, inside, levels=[0.5], colors="white", linewidths=1.2)
        axis.set_title(f"{title}: {int(plane.boundaries(part).sum()):,}", fontsize=9)
        axis.tick_params(labelsize=7)
        for (x, y), name in zip(plane.points.tolist(), names, strict=False):
            axis.plot(x, y, "o", color="#2fb5b5", markersize=4)
            axis.annotate(
                name, (x, y), (4, 4), textcoords="offset points", color="#2fb5b5", fontsize=7
            )
    try:
        is_png = path.suffix.lower() in (".png", "")
        metadata = {_DESCRIPTION: caption} if caption and is_png else None
        figure.savefig(path, dpi=130, metadata=metadata)
    except (OSError, ValueError) as error:
        raise RequestError(f"--out: {path} can't be written: {error}") from error
    finally:
        plt.close(figure)


def _span(sites: list[str]) -> str:
    return sites[0] if len(sites) == 1 else f"{sites[0]} … {sites[-1]}"
