"""Drawings of planes through input space."""

from __future__ import annotations

import io
import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.patheffects import Normal, Stroke
from matplotlib.ticker import FuncFormatter, NullFormatter

from nlbench.serialization.files import write_atomically

from .drawing import PAGE_WIDTH, POINTS, laid_out
from .pictures import DESCRIPTION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from nlbench.probes.lines import Plane

PANELS = 3
"""Number of groups of layers drawn next to the picture of all layers."""


def draw_plane(plane: Plane, path: Path, names: list[str], caption: str = "") -> None:
    """Plot the boundaries of all layers and of groups of layers, with the decision boundary.

    The title is a sentence with the caption, which a PNG file also stores as metadata.
    """
    sites = list(plane.right)
    groups = [list(part) for part in np.array_split(np.array(sites, dtype=object), PANELS)]
    parts = [(f"all {len(sites)} activations", sites)]
    if len(sites) > 1:
        parts += [(_span(part), part) for part in groups if part]
    counts = plane.boundaries(sites)
    total = int(counts.sum())
    norm = LogNorm(0.5, max(2.0, float(counts.max())))  # one scale for all panels

    def draw(figure: Figure) -> float:
        columns = min(2, len(parts))
        lines = math.ceil(len(parts) / columns)
        panels = figure.subplots(lines, columns, squeeze=False).ravel()
        for axes in panels[len(parts) :]:
            axes.set_axis_off()
        drawn = panels[: len(parts)]
        for axes, (title, part) in zip(drawn, parts, strict=True):
            _draw_boundaries(axes, plane, part, names, norm)
            axes.set_title(f"{title}: {int(plane.boundaries(part).sum()):,} boundaries")
        bar = figure.colorbar(
            drawn[0].images[0], ax=panels.tolist(), location="bottom", aspect=50, shrink=0.6
        )
        # Mathematical notation is off in the style.
        bar.ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        bar.ax.xaxis.set_minor_formatter(NullFormatter())
        bar.set_label("boundaries between a pixel and its neighbours to the right and above")
        handles, labels = drawn[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
        sentence = f"{total:,} region boundaries lie between neighbouring pixels"
        sentence += f": {caption}" if caption else ""
        figure.suptitle("\n".join(textwrap.wrap(f"{sentence}.", 100)), fontsize=POINTS)
        u = plane.u.numpy()
        v = plane.v.numpy()
        aspect = float((v[-1] - v[0]) / (u[-1] - u[0]))
        panel = (PAGE_WIDTH / columns - 0.6) * aspect
        return min(14.0, 1.5 + lines * (panel + 0.5))

    figure = laid_out(PAGE_WIDTH, "png", draw)
    kind = path.suffix.lower().removeprefix(".") or "png"
    metadata = {DESCRIPTION: caption} if caption and kind == "png" else None
    picture = io.BytesIO()
    figure.savefig(picture, format=kind, dpi=150, metadata=metadata)
    write_atomically(path, picture.getvalue())


def _draw_boundaries(
    axes: Axes, plane: Plane, sites: list[str], names: list[str], norm: LogNorm
) -> None:
    """Plot the boundaries of some sites, the decisions and the samples."""
    u = plane.u.numpy()
    v = plane.v.numpy()
    decisions = plane.decisions.numpy()
    counts = plane.boundaries(sites).numpy().astype(float)
    # The last row and column have no neighbour to compare them with.
    counts[-1], counts[:, -1] = counts[-2], counts[:, -2]
    axes.imshow(
        np.maximum(counts, 0.5),
        origin="lower",
        extent=(u[0], u[-1], v[0], v[-1]),
        cmap="inferno",
        norm=norm,
        interpolation="nearest",
    )
    for kind in np.unique(decisions):
        inside = (decisions == kind).astype(float)
        if 0 < inside.mean() < 1:
            axes.contour(u, v, inside, levels=[0.5], colors="white", linewidths=1.2)
    axes.plot([], [], color="white", linewidth=1.2, label="decision boundary",
              path_effects=[Stroke(linewidth=2.4, foreground="black"), Normal()])  # fmt: skip
    x, y = plane.points.numpy().T
    axes.plot(x, y, "o", markerfacecolor="white", markeredgecolor="black", color="none",
              markersize=5, label="sample")  # fmt: skip
    box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
    for position, name in zip(plane.points.tolist(), names, strict=False):
        axes.annotate(name, position, (0, 7), textcoords="offset points", ha="center", bbox=box)
    axes.set_xlabel("along the first two samples (their distance: 1)")
    axes.set_ylabel("perpendicular")


def _span(sites: list[str]) -> str:
    return sites[0] if len(sites) == 1 else f"{sites[0]} … {sites[-1]}"
