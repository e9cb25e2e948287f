"""``nlbench plane``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nlbench.content.files import make_folder
from nlbench.errors import RequestError
from nlbench.request import parse_size
from nlbench.store.run_folder import load_run

if TYPE_CHECKING:
    from nlbench.probes.lines import Plane

__all__ = ["draw", "plane"]

PANELS = 3
"""Groups of layers beside the picture of all."""


def plane(
    model: Annotated[str, typer.Argument(help="A model's name.")],
    data: Annotated[str, typer.Option(help="A dataset.")] = "digits",
    samples: Annotated[
        str, typer.Option(help="Two or three of the sample, by number, with commas.")
    ] = "0,1,2",
    weights: Annotated[
        str, typer.Option(help="trained, init, or a checkpoint's path; auto: trained if it ships.")
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Of the initialisation and the sample.")] = 0,
    size: Annotated[int, typer.Option(min=2, help="Pixels across and up.")] = 256,
    margin: Annotated[
        float, typer.Option(min=0.0, help="Beyond the samples, as a share of their distance.")
    ] = 0.3,
    split: Annotated[str, typer.Option(help="test or train.")] = "test",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    precision: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    memory: Annotated[
        str, typer.Option(help="What may be used, such as 4GB. [half of what is free]")
    ] = "",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The picture. [plane.png]")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="A run whose page is to show it, beside or without --out.")
    ] = None,
) -> None:
    """Draw a network's boundaries and decisions on the plane through samples."""
    numbers = _numbers(samples)
    shown = load_run(run) if run else None
    if precision not in ("float32", "float64"):
        raise RequestError(f"--precision: '{precision}', expected float32 or float64")
    room = parse_size(memory) if memory else None

    import torch
    from rich.console import Console
    from rich.progress import Progress

    from nlbench.execution.numerics import resolve_device
    from nlbench.probes.lines import plane as look
    from nlbench.subjects.load import SubjectSpec, load_subject

    spec = SubjectSpec(model, weights, data, seed=seed, samples=max(numbers) + 1, split=split)
    subject = load_subject(spec, resolve_device(device))
    if max(numbers) >= len(subject.inputs):
        raise RequestError(
            f"--samples: {max(numbers)}, but there are only {len(subject.inputs)}, counted from 0"
        )
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"{size} × {size} pixels", total=size)
        found = look(
            subject.model,
            subject.inputs[numbers],
            size=size,
            margin=margin,
            dtype=getattr(torch, precision),
            memory=room,
            step=lambda: progress.advance(task),
        )
    names = [f"sample {number}" for number in numbers]
    label = subject.facts.weights
    caption = (
        f"{model} ({label}, seed {seed}) on the plane through samples {samples} of {data}'s "
        f"{split} split, {size} × {size} pixels"
    )
    if out or not run:
        out = out or Path("plane.png")
        draw(found, out, names, caption)
        print(out)
    if run and shown:
        parts = model, label, str(seed), data, split, *map(str, numbers)
        file = run / "planes" / f"{'-'.join(_plain(part) for part in parts)}.png"
        make_folder(file.parent)
        draw(found, file, names, caption)
        print(file)
        print(shown.report(run / "report.html"))


def _plain(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in text)


def _numbers(samples: str) -> list[int]:
    try:
        numbers = [int(part) for part in samples.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (2, 3) or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise RequestError(
            f"--samples: '{samples[:100]}', expected two or three different numbers, as 0,1,2"
        )
    return numbers


def draw(found: Plane, path: Path, names: list[str], caption: str = "") -> None:
    """Draw boundaries, of all layers and of groups of them, under the lines between decisions.

    A PNG keeps the caption.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import numpy as np
    from matplotlib import pyplot as plt
    from matplotlib.colors import LogNorm

    sites = list(found.right)
    groups = [list(part) for part in np.array_split(np.array(sites, dtype=object), PANELS)]
    shown = [("all", sites), *((_span(part), part) for part in groups if part)]
    shown = shown if len(sites) > 1 else shown[:1]
    u, v = found.u.numpy(), found.v.numpy()
    extent = (u[0], u[-1], v[0], v[-1])
    height = 3.4 * (v[-1] - v[0]) / (u[-1] - u[0]) + 0.7
    figure, axes = plt.subplots(
        1, len(shown), figsize=(3.4 * len(shown), height), squeeze=False, layout="constrained"
    )
    decisions = found.decisions.numpy()
    for axis, (title, part) in zip(axes[0], shown, strict=True):
        counts = found.boundaries(part).numpy().astype(float)
        # Beyond the last row and column nothing was compared.
        counts[-1], counts[:, -1] = counts[-2], counts[:, -2]
        most = max(2.0, float(counts.max()))
        axis.imshow(
            np.maximum(counts, 0.5),
            origin="lower",
            extent=extent,
            cmap="inferno",
            norm=LogNorm(0.5, most),
            interpolation="nearest",
        )
        for kind in np.unique(decisions):
            inside = (decisions == kind).astype(float)
            if 0 < inside.mean() < 1:
                axis.contour(u, v, inside, levels=[0.5], colors="white", linewidths=1.2)
        axis.set_title(f"{title}: {int(found.boundaries(part).sum()):,}", fontsize=9)
        axis.tick_params(labelsize=7)
        for (x, y), name in zip(found.points.tolist(), names, strict=False):
            axis.plot(x, y, "o", color="#2fb5b5", markersize=4)
            axis.annotate(
                name, (x, y), (4, 4), textcoords="offset points", color="#2fb5b5", fontsize=7
            )
    try:
        is_png = path.suffix.lower() in (".png", "")
        about = {"Description": caption} if caption and is_png else None
        figure.savefig(path, dpi=130, metadata=about)
    except (OSError, ValueError) as error:
        raise RequestError(f"--out: {path} can't be written: {error}") from error
    finally:
        plt.close(figure)


def _span(sites: list[str]) -> str:
    return sites[0] if len(sites) == 1 else f"{sites[0]} … {sites[-1]}"
