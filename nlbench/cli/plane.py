"""``nlbench plane``."""

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from nlbench.errors import RequestError, shorten
from nlbench.parsers import MAX_COUNT, MAX_INTEGER, parse_size

from .common import numbered, subject_options
from .parameters import DataName, DatasetSettings, Device, ProgressStyle

Samples = Annotated[str, typer.Option(help="Indices of two or three samples, comma-separated.")]
Weights = Annotated[
    str, typer.Option(help="trained, init, or a checkpoint's path; auto: trained if available.")
]
Seed = Annotated[
    int, typer.Option(help="Seed for the initialisation and the samples.", min=0, max=MAX_INTEGER)
]
Size = Annotated[int, typer.Option(min=2, max=16384, help="Width and height in pixels.")]
Margin = Annotated[
    float,
    typer.Option(min=0, max=1e6, help="Margin, as a fraction of the distance between samples."),
]
Memory = Annotated[
    str, typer.Option(help=r"Memory limit, such as 4GB. \[default: half of the free memory]")
]
Picture = Annotated[
    str | None,
    typer.Option("--out", "-o", help=r"New file. \[default: plane.png, numbered if it exists]"),
]


def plane(
    model: Annotated[str, typer.Argument(help="A registered model, or your own: my_net.py:Net.")],
    data: DataName = "digits",
    samples: Samples = "0,1,2",
    weights: Weights = "auto",
    seed: Seed = 0,
    size: Size = 256,
    margin: Margin = 0.3,
    split: Annotated[str, typer.Option(help="test or train.")] = "test",
    setting: DatasetSettings = None,
    device: Device = "auto",
    precision: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    memory: Memory = "",
    out: Picture = None,
    run: Annotated[Path | None, typer.Option(help="Run whose report shows the picture.")] = None,
    progress: ProgressStyle = "auto",
) -> None:
    """Plot a network's region boundaries and decisions on the plane through given samples."""
    from nlbench.lazy import load_reports
    from nlbench.serialization.files import make_folder
    from nlbench.store.run import load_run

    numbers = _sample_numbers(samples)
    if out is not None:
        _picture_file(out)
    loaded_run = load_run(run) if run else None
    if precision not in ("float32", "float64"):
        raise RequestError(f"--precision: '{precision}', expected float32 or float64")
    arguments, options = subject_options(setting or [], model, data)
    memory_limit = parse_size(memory) if memory else None

    import torch

    from nlbench.introspection.precision import resolve_device
    from nlbench.probes.lines import plane as evaluate_plane
    from nlbench.progress import create_progress
    from nlbench.subjects.load import load_subject
    from nlbench.subjects.spec import SubjectSpec

    spec = SubjectSpec(
        model,
        weights,
        data,
        seed,
        samples=max(numbers) + 1,
        split=split,
        options=options,
        arguments=arguments,
    )
    subject = load_subject(spec, resolve_device(device))
    if max(numbers) >= len(subject.inputs):
        raise RequestError(
            f"--samples: {max(numbers)}, but there are only {len(subject.inputs)} (0 is the first)"
        )
    with create_progress(progress) as bar:
        bar.begin(size)
        picture = evaluate_plane(
            subject.model,
            subject.inputs[numbers],
            size=size,
            margin=margin,
            dtype=getattr(torch, precision),
            memory=memory_limit,
            step=lambda: bar.step(f"{size} × {size} pixels"),
        )
    names = [f"sample {number}" for number in numbers]
    label = subject.facts.weights
    dataset_options = "".join(f", {name}={value}" for name, value in options)
    caption = (
        f"{model} ({label}, seed {seed}) on the plane through samples {samples} of {data}'s "
        f"{split} split{dataset_options}, {size} × {size} pixels"
    )
    draw = load_reports().draw_plane
    files = [_picture_file(out)] if out or not run else []
    if run:
        suffixes = (f"{name}-{value}" for name, value in options)
        parts = model, label, str(seed), data, *suffixes, split, *map(str, numbers)
        files.append(run / "planes" / f"{re.sub('[^A-Za-z0-9]', '-', '-'.join(parts))}.png")
    for file in files:
        make_folder(file.parent)
        draw(picture, file, names, caption)
        print(file)
    if run and loaded_run:
        print(loaded_run.report(run / "report.html"))


_FORMATS = (".png", ".svg", ".pdf", ".eps", ".jpg", ".jpeg", ".tif", ".tiff", ".webp")


def _picture_file(out: str | None) -> Path:
    """Return the file for the picture. Raise if it exists or its format isn't known."""
    if out is None:
        return numbered(Path("plane.png"))
    file = Path(out)
    if out and file.suffix == "" and not file.is_dir():
        file = file.with_name(f"{file.name}.png")
    if file.suffix.lower() not in _FORMATS or "\0" in out:
        expected = f"a file's name ending in {', '.join(_FORMATS)}"
        raise RequestError(f"--out: expected {expected}, got '{shorten(out)}'")
    if os.path.lexists(file):
        raise RequestError(f"--out: {file} already exists; choose another name")
    return file


def _sample_numbers(samples: str) -> list[int]:
    try:
        numbers = [int(part) for part in samples.split(",")]
    except ValueError:
        numbers = []
    is_valid = len(numbers) in (2, 3) and len(set(numbers)) == len(numbers)
    if not is_valid or not 0 <= min(numbers) <= max(numbers) <= MAX_COUNT:
        raise RequestError(
            f"--samples: '{samples[:100]}', expected two or three distinct indices, such as 0,1,2"
        )
    return numbers
