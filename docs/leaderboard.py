"""Record the runs of the leaderboard, and write its page from them.

``python docs/leaderboard.py record`` measures everything anew, ``record zoo`` one run: about 20
minutes on two cores. A run is packed as ``docs/leaderboard/NAME.tar.xz``. ``python
docs/leaderboard.py add FOLDER`` packs a run's folder of your own, and ``page FILE`` writes the
page, as the build of the site does.
"""

from __future__ import annotations

import lzma
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import nlbench
from nlbench.errors import RequestError
from nlbench.reports import write_page
from nlbench.request import ExecutionOptions
from nlbench.store.run import Run

FOLDER = Path(__file__).with_name("leaderboard")
WORK = Path(__file__).with_name("_build") / "leaderboard"
"""Folder of the runs that are being recorded: after an interruption, the same command resumes."""
SITES = ("r2", "cka", "affinity")
FUNCTION = ("nlc", "affine-residual")
ZOO = (
    "smollm2-135m minilm-l6 efficientnet-lite0 mtcnn-pnet mtcnn-rnet mtcnn-onet crepe-tiny "
    "neuralfoil-large rxnmapper silero-vad"
)
REFERENCE = (
    "alexnet resnet18 resnet34 vgg11 vgg11_bn squeezenet1_1 mobilenet_v2 shufflenet_v2_x1_0 "
    "mnasnet1_0 regnet_x_400mf densenet121 convnext_tiny efficientnet_b0 mobilenet_v3_small"
)
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
        tuple(f"torchvision/{name}" for name in REFERENCE.split()),
        ("synthetic",),
        weights="init",
        samples=64,
        settings={"synthetic.size": 64},
    ),
}
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
    """Pack a run's folder, less what can be made from its records; the same bytes each time."""
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


@contextmanager
def recorded_runs(folder: Path = FOLDER) -> Iterator[list[Run]]:
    """Unpack and load the recorded runs."""
    with tempfile.TemporaryDirectory() as unpacked:
        for file in sorted(folder.glob("*.tar.xz")):
            with tarfile.open(file) as tar:
                tar.extractall(unpacked, filter="data")
        yield [nlbench.load_run(path) for path in sorted(Path(unpacked).iterdir())]


def write_leaderboard(output: Path) -> Path:
    """Write the page of all recorded runs.

    Failed cells, such as those that took too long, are left out.
    """
    with recorded_runs() as runs:
        if not runs:
            raise RequestError(f"no recorded runs in {FOLDER}; expected NAME.tar.xz")
        kept = [
            replace(run, records=[r for r in run.records if r.result.status != "failed"])
            for run in runs
        ]
        return write_page(kept, output)


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
