"""Record the runs of the leaderboard, and write its page from them.

``python docs/leaderboard.py record`` measures everything, ``record zoo`` one run: about 40 minutes
on one core. A run is packed as ``docs/leaderboard/NAME.tar.xz``. ``python docs/leaderboard.py add
FOLDER`` packs a run's folder of your own, and ``page FILE`` writes the page, as the build of the
site does.
"""

from __future__ import annotations

import lzma
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reference_networks import NETWORKS, ZOO

import nlbench
from nlbench.errors import RequestError
from nlbench.reports.page import render_page
from nlbench.request import ExecutionOptions
from nlbench.store.run import Run, merge_runs

FOLDER = Path(__file__).with_name("leaderboard")
WORK = Path(__file__).parents[1] / "runs" / "leaderboard"
"""Folder of the runs that are being recorded: after an interruption, the same command resumes."""
SITES = ("affinity", "cka", "r2")
FUNCTION = ("nlc", "affine-residual")
TOO_LARGE = ("alexnet", "inception_v3")
"""Networks that don't accept the synthetic images of 32 pixels."""
REQUESTS = {
    "zoo": nlbench.Request(
        (*SITES, *FUNCTION, "pathlength", "substitution"),
        tuple(f"zoo/{name}" for name in ZOO.split()),
        ("auto",),
        samples=64,
    ),
    "vgg8": nlbench.Request(
        (*SITES, *FUNCTION, "pathlength", "substitution", "absdev", "density"),
        ("vgg8",),
        weights=("trained", "init"),
    ),
    "torchvision": nlbench.Request(
        (*SITES, *FUNCTION, "pathlength"),
        tuple(f"torchvision/{name}" for name in NETWORKS.split() if name not in TOO_LARGE),
        ("synthetic",),
        weights="init",
        samples=64,
        settings={"synthetic.size": 64},  # few training images, which no measure here uses
    ),
}
ORDER = REQUESTS["vgg8"].measures
"""Order of the measures; the board is sorted by the first one."""
SECONDS_PER_CELL = 240.0
"""Limit for one cell; one that takes longer is left out of the leaderboard."""


def record(names: Sequence[str] = ()) -> None:
    """Measure and pack runs, by default all."""
    execution = ExecutionOptions(timeout=SECONDS_PER_CELL)
    for name in names or REQUESTS:
        run = nlbench.run(REQUESTS[name], WORK / name, execution=execution)
        print(f"{name}: {run!r}", flush=True)
        pack(run)


def pack(run: Run) -> Path:
    """Pack a run's folder, less what can be made from its records.

    The bytes are the same each time.
    """
    assert run.path is not None
    FOLDER.mkdir(exist_ok=True)
    file = FOLDER / f"{run.path.name}.tar.xz"
    members = [run.path / "manifest.json", *sorted(run.path.glob("cells/*.json"))]
    with lzma.open(file, "wb", preset=9) as stream, tarfile.open(fileobj=stream, mode="w") as tar:
        for member in members:
            info = tarfile.TarInfo(f"{run.path.name}/{member.relative_to(run.path)}")
            info.size = member.stat().st_size
            with member.open("rb") as content:
                tar.addfile(info, content)
    return file


def leaderboard_run(folder: Path = FOLDER) -> Run:
    """Return the cells of all recorded runs as one run.

    Failed cells, such as those that took too long, are left out, and so is when and where the runs
    were merged: the same runs make the same page.

    Raises
    ------
    nlbench.RequestError
        If there is no recorded run, or two runs contradict each other.
    """
    files = sorted(folder.glob("*.tar.xz"))
    if not files:
        raise RequestError(f"no recorded runs in {folder}; expected NAME.tar.xz")
    with tempfile.TemporaryDirectory() as unpacked:
        for file in files:
            with tarfile.open(file) as tar:
                tar.extractall(unpacked, filter="data")
        runs = sorted(path.parent for path in Path(unpacked).glob("*/manifest.json"))
        merged = merge_runs(runs, Path(unpacked, "leaderboard"))
    facts = {name: value for name, value in merged.manifest.items() if name != "merged"}
    about = facts["measures"]
    order = [name for name in ORDER if name in about] + [n for n in about if n not in ORDER]
    return replace(
        merged,
        records=[r for r in merged.records if r.result.status != "failed"],
        manifest={**facts, "measures": {name: about[name] for name in order}},
    )


def write_leaderboard(output: Path) -> Path:
    """Write the page of all recorded runs."""
    html = render_page(leaderboard_run(), title="Leaderboard")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(html, encoding="utf-8")
    return output


def setup(app: Any) -> dict[str, bool]:
    """Write the page when Sphinx has written the site."""
    app.connect(
        "build-finished",
        lambda app, error: write_leaderboard(Path(app.outdir, "pages", "leaderboard.html")),
    )
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def main(command: str = "", *arguments: str) -> None:
    if command == "record":
        record(arguments)
    elif command == "add" and arguments:
        for folder in arguments:
            print(pack(nlbench.load_run(folder)))
    elif command == "page" and len(arguments) == 1:
        print(write_leaderboard(Path(arguments[0])))
    else:
        sys.exit("usage: python docs/leaderboard.py record [NAME...] | add FOLDER... | page FILE")


if __name__ == "__main__":
    main(*sys.argv[1:])
