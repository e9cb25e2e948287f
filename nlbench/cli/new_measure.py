"""``nlbench new-measure``."""

import keyword
import re
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from nlbench import registry
from nlbench.errors import RequestError, shorten

from .common import check_unused, parse_folder

_PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "nlbench-$dashed"
version = "0.1"
description = "The measure $name for nlbench."
requires-python = ">=3.11"
dependencies = ["nlbench", "torch"]

[project.entry-points."nlbench.measures"]
$name = "nlbench_$name:$name"

[tool.setuptools.packages.find]
where = ["src"]
"""

_MODULE = '''\
"""The measure $name: replace the formula, the declaration and the source with your own."""

import torch

import nlbench

__all__ = ["$name"]


@nlbench.site_measure(
    bounds=(-1.0, 1.0),
    more_means="less nonlinear",
    version="1",  # increase whenever the values change
    options={"center": nlbench.Option(True, "subtract the mean over samples first")},
    invariant_to=("order", "units", "offsets", "rotations"),
    source="Author, Title, 2026",
)
def $name(x, y, center):
    """Cosine similarity of an activation's flattened input and output.

    x and y are (samples, channels). Raise `nlbench.Undefined` if there is no value.
    """
    if x.shape != y.shape:
        raise nlbench.Undefined(f"input {tuple(x.shape)} and output {tuple(y.shape)} differ")
    x, y = x.double(), y.double()
    if center:
        x, y = x - x.mean(0), y - y.mean(0)
    sizes = torch.linalg.vector_norm(x) * torch.linalg.vector_norm(y)
    if sizes == 0:
        raise nlbench.Undefined("constant input or output")
    return (x * y).sum() / sizes
'''

_TEST = '''\
"""Compare the measure with known values, and run nlbench's checks."""

import pytest
import torch
from nlbench.conformance import check_measure

import nlbench
from nlbench_$name import $name


def value(function):
    """Measure an activation function on fixed samples."""
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))

    class Activation(torch.nn.Module):
        def forward(self, x):
            return function(x)

    return nlbench.evaluate(Activation(), x, [$name])["$name"].summary["value"]


def test_a_leaky_relu_of_slope_one_is_linear():
    assert value(torch.nn.LeakyReLU(1.0)) == pytest.approx(1.0)


def test_a_relu_is_less_linear_than_a_leaky_relu():
    assert value(torch.nn.ReLU()) < value(torch.nn.LeakyReLU(0.5)) < 1


def test_conformance_checks_pass():
    assert [check for check in check_measure($name) if check.outcome == "broken"] == []
'''

_README = """\
# nlbench-$dashed

The measure `$name` for nlbench.

```
pip install -e .
nlbench check-measure $name
nlbench run --measures $name,affinity --model vgg8
pytest
```
"""


def new_measure(
    name: Annotated[str, typer.Argument(help="Name of the measure.")],
    out: Annotated[
        str | None,
        typer.Option(
            "--out", "-o", help=r"Folder to create. \[default: nlbench-NAME]", metavar="DIR"
        ),
    ] = None,
) -> None:
    """Write a package for a new measure: entry point, formula and tests."""
    from nlbench.serialization.files import make_folder, write_atomically

    _check_name(name)
    dashed = name.replace("_", "-")
    folder = parse_folder(out) if out is not None else Path(f"nlbench-{dashed}")
    check_unused(folder)
    files = {
        "pyproject.toml": _PYPROJECT,
        "README.md": _README,
        f"src/nlbench_{name}/__init__.py": _MODULE,
        f"tests/test_{name}.py": _TEST,
    }
    for path, text in files.items():
        make_folder((folder / path).parent)
        write_atomically(folder / path, Template(text).substitute(name=name, dashed=dashed))
    print(
        f"folder   {folder}\n"
        f"formula  {folder / 'src' / f'nlbench_{name}' / '__init__.py'}\n"
        f"install  pip install -e {folder}\n"
        f"check    nlbench check-measure {name}\n"
        f"run      nlbench run --measures {name},affinity --model vgg8"
    )


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,59}", name) or keyword.iskeyword(name):
        raise RequestError(
            f"'{shorten(name)}' can't be a measure's name: expected lower-case letters, digits and "
            "underscores, starting with a letter"
        )
    for group in ("measures", "probes"):
        if name in registry.entries(group):
            raise RequestError(f"there is already a {registry.GROUPS[group]} '{name}'")
