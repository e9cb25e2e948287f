"""``nlbench run``."""

from __future__ import annotations

import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nlbench import registry
from nlbench.errors import RequestError
from nlbench.request import parse_size, read_config

from .common import Interrupted, split_names, split_seeds, split_settings

if TYPE_CHECKING:
    from nlbench.request import Request
    from nlbench.runner import Preview
    from nlbench.store.run_folder import Run

__all__ = ["run"]


Names = list[str] | None
DEFAULTS: dict[str, tuple[Any, ...]] = {
    "measures": ("affinity", "absdev"),
    "models": ("vgg8",),
    "data": ("digits",),
    "weights": ("auto",),
    "seeds": (0,),
}
_GROUPS = {"measures": "measures", "models": "models", "data": "datasets"}
_CONDUCT = ("rerun", "timeout", "executor", "workers", "address", "threads")


def run(
    measures: Annotated[
        Names, typer.Option(help="Names or globs, with commas. [affinity,absdev]")
    ] = None,
    model: Annotated[Names, typer.Option(help="Names or globs, with commas. [vgg8]")] = None,
    weights: Annotated[
        Names,
        typer.Option(
            help="trained, init, or a checkpoint's path, repeatable; auto: trained where it ships."
        ),
    ] = None,
    data: Annotated[Names, typer.Option(help="Datasets, with commas. [digits]")] = None,
    seeds: Annotated[
        Names, typer.Option(help="Seeds of the initialisation and the sample, with commas. [0]")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Samples to look at; 0: the whole split. [512]")
    ] = None,
    split: Annotated[str | None, typer.Option(help="test or train. [test]")] = None,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu, cuda, cuda:N or mps. [auto]")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="native, tf32, float64; bfloat16 or float16 by autocast. [native]"),
    ] = None,
    setting: Annotated[
        Names,
        typer.Option(
            "--set",
            metavar="OWNER.OPTION=VALUE",
            help="Option of a measure, probe or dataset, repeatable: affinity.shrinkage=none.",
        ),
    ] = None,
    sites: Annotated[
        str | None, typer.Option(help="Which sites to look at; short for --set sites.select=…")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file with any of these; flags go before it.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; by default runs/MODEL-TIME.")
    ] = None,
    report: Annotated[
        bool | None,
        typer.Option("--report/--no-report", help="Write report.html into the run's folder."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be measured, and stop.")
    ] = False,
    rerun: Annotated[
        str | None, typer.Option(help="Recorded cells to repeat: never, failed or all. [failed]")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds that a cell may take.")] = None,
    memory: Annotated[
        str | None, typer.Option(help="What a pass may use, such as 4GB. [a share of what is free]")
    ] = None,
    executor: Annotated[
        str | None, typer.Option(help="serial, processes or dask. [serial]")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="How many measure at a time.")] = None,
    address: Annotated[str | None, typer.Option(help="Of a Dask scheduler.")] = None,
    threads: Annotated[
        int | None, typer.Option(help="PyTorch's threads of each worker. [up to 4]")
    ] = None,
    progress: Annotated[
        str | None,
        typer.Option(help="auto, rich, plain or none. [auto: rich on a terminal, else none]"),
    ] = None,
) -> None:
    """Measure models and write a run: board, records, tidy table, report."""
    from nlbench.progress import shown_progress

    flags: dict[str, Any] = {
        # Misspelt names are found before anything slow is imported.
        "measures": split_names(measures, "--measures", "measures") if measures else None,
        "models": split_names(model, "--model", "models") if model else None,
        "data": split_names(data, "--data", "datasets") if data else None,
        "seeds": split_seeds(seeds) if seeds else None,
        "weights": tuple(dict.fromkeys(weights)) if weights else None,
        "samples": samples,
        "split": split,
        "device": device,
        "precision": precision,
        "sites": sites,
        "out": out,
        "report": report,
        "rerun": rerun,
        "timeout": timeout,
        "memory": memory,
        "executor": executor,
        "workers": workers,
        "address": address,
        "threads": threads,
        "progress": progress,
    }
    asked = read_config(config) if config else {}
    asked |= {name: value for name, value in flags.items() if value is not None}
    settings = {**asked.pop("settings", {}), **split_settings(setting or [])}
    if asked.get("sites"):
        settings["sites.select"] = asked["sites"]
    request, execution = _request(asked, settings), _conduct(asked)
    if asked.get("out") in ("", Path()):
        raise RequestError("--out: expected a folder's name, got ''")
    folder = Path(asked["out"]) if "out" in asked else _default_folder(request.models)
    command = shlex.join(["nlbench", *sys.argv[1:]])
    with shown_progress(asked.get("progress", "auto")) as bar:
        bar.say("planning")
        from nlbench import runner

        if dry_run:
            foreseen = runner.preview(request, folder, execution=execution, progress=bar)
            bar.stop()
            _print_outlook(foreseen, folder)
            return
        try:
            result = runner.run(request, folder, progress=bar, command=command, execution=execution)
        except KeyboardInterrupt:
            is_begun = (folder / "manifest.json").is_file()
            kept = f"what was finished is in {folder}" if is_begun else "nothing was measured yet"
            raise Interrupted(
                f"interrupted; {kept}",
                f"go on with: {_resume_command(command, folder, 'out' in asked)}",
            ) from None
    _show(result, asked.get("report", True))


def _request(asked: dict[str, Any], settings: dict[str, Any]) -> Request:
    from nlbench.request import Request

    names = {name: asked.get(name, default) for name, default in DEFAULTS.items()}
    for name, group in _GROUPS.items():
        registry.expand(group, names[name])
    if "" in names["weights"]:
        raise RequestError("--weights: expected trained, init, auto or a checkpoint's path, got ''")
    single = ("samples", "split", "device", "precision")
    rest = {name: asked[name] for name in single if name in asked}
    return Request(**names, **rest, settings=settings)


def _conduct(asked: dict[str, Any]) -> Any:
    from nlbench.request import ExecutionOptions

    given = {name: asked[name] for name in _CONDUCT if name in asked}
    if "memory" in asked:
        given["memory"] = parse_size(asked["memory"])
    return ExecutionOptions(**given)


def _print_outlook(foreseen: Preview, folder: Path) -> None:
    """Counts, then one line a subject."""
    groups = (
        ("new", foreseen.new),
        ("recorded", foreseen.recorded),
        ("impossible", foreseen.impossible),
    )
    plan = foreseen.plan
    counts = ", ".join(f"{len(cells)} {word}" for word, cells in groups)
    print(f"{len(plan.cells)} cells on {plan.device}: {counts}")
    print(f"run {folder}")
    for target in plan.targets:
        spec = target.spec
        parts = []
        for word, cells in groups:
            names = [c.wanted.name for c in cells if c.target.key == target.key]
            if names:
                parts.append(f"{word} {','.join(names)}")
        why = f" ({target.impossible})" if target.impossible else ""
        print(
            f"{spec.model}  {target.label}  {spec.data}  seed {spec.seed}: {'; '.join(parts)}{why}"
        )


def _show(result: Run, report: bool) -> None:
    from rich.console import Console

    assert result.path is not None
    # The page first: what is printed may have no reader.
    page = result.path / "report.html"
    if report and not _is_current(page, result.path):
        page = result.report(page)
    registry.load("reports", "terminal")(result, Console())
    print(f"\nrun     {result.path}")
    print(f"table   {result.path / 'scores.csv'}")
    if report:
        print(f"report  {page}")
    if result.failed:
        raise typer.Exit(1)


def _is_current(page: Path, folder: Path) -> bool:
    """Whether a page was written after the table that it shows."""
    try:
        return page.stat().st_mtime_ns > (folder / "manifest.json").stat().st_mtime_ns
    except OSError:
        return False


def _default_folder(models: tuple[str, ...]) -> Path:
    name = "".join(c if c.isalnum() or c in "-_" else "-" for c in models[0]).strip("-") or "run"
    stem = f"{name[:40]}-{datetime.now():%Y%m%d-%H%M%S}"
    folder, count = Path("runs", stem), 1
    while folder.exists():
        count += 1
        folder = Path("runs", f"{stem}-{count}")
    return folder


def _resume_command(command: str, folder: Path, is_named: bool) -> str:
    return command if is_named else f"{command} --out {shlex.quote(str(folder))}"
