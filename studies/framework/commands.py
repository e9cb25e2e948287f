"""The ``nlbench study`` command."""

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nlbench import registry
from nlbench.cli.common import Interrupted, command_line, name_completer, parse_folder, split_names
from nlbench.cli.parameters import Device, ProgressStyle
from nlbench.errors import NlbenchError, PluginError, RequestError
from nlbench.parsers import parse_seeds
from nlbench.request import ExecutionOptions

if TYPE_CHECKING:
    from .context import Context
    from .study import Findings, Runs, Study

VERDICTS = "verdicts.csv"
"""File in the output folder with the verdicts of all its studies."""

MAX_SERIAL_MINUTES = 0.3
"""Studies up to this duration run in a single process, since starting workers takes seconds."""


Names = Annotated[
    list[str],
    typer.Argument(
        help="Comma-separated names or globs of studies.", autocompletion=name_completer("studies")
    ),
]
Quick = Annotated[
    bool, typer.Option("--quick", help="Run a smaller version: fewer seeds, networks and paths.")
]
Folder = Annotated[
    str, typer.Option(help="Output folder; its studies share cells and checkpoints.")
]
Data = Annotated[str, typer.Option(help="Dataset to use instead of the default, if supported.")]
Weights = Annotated[
    str, typer.Option(help="init or trained, for studies of networks with published weights.")
]
StudySeeds = Annotated[list[str] | None, typer.Option(help="Seeds to use instead of the default.")]
Measures = Annotated[
    list[str] | None,
    typer.Option(
        "--measures",
        "--measure",
        help="Measures to use instead of the default.",
        autocompletion=name_completer("measures"),
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        help="Number of networks trained or measured in parallel. "
        r"\[default: number of cores; 1 on a GPU or for a study of a few seconds]",
        min=1,
        max=1024,
    ),
]


def study(
    names: Names,
    quick: Quick = False,
    out: Folder = "runs/studies",
    data: Data = "",
    weights: Weights = "",
    seeds: StudySeeds = None,
    measures: Measures = None,
    device: Device = "auto",
    workers: Workers = None,
    progress: ProgressStyle = "auto",
) -> None:
    """Run studies, compare their verdicts with published results, and write a page for each.

    Repeat the same command to resume an interrupted study.
    """
    folder = parse_folder(out)
    settings: dict[str, Any] = {
        "data": data,
        "weights": weights,
        "seeds": parse_seeds(seeds) if seeds else (),
        "measures": split_names(measures, "--measures") if measures else (),
    }
    if data:
        registry.expand("datasets", [data])
    if measures:
        settings["measures"] = tuple(registry.expand("measures", settings["measures"]))
    studies = _load_studies(names, [flag for flag, value in settings.items() if value])
    command = command_line()
    from nlbench.execution.supervisor import keep_workers
    from nlbench.progress import create_progress

    from .context import Context
    from .page import analyse_in_style, read_verdicts

    # Refuse an unusable table before measuring, which may take hours.
    read_verdicts(folder / VERDICTS)
    failed: list[str] = []
    with keep_workers():
        for index, (name, loaded) in enumerate(studies.items()):
            start = time.perf_counter()
            with create_progress(progress) as bar:
                context = Context(
                    folder,
                    name,
                    quick,
                    **settings,
                    device=device,
                    progress=bar,
                    execution=_execution_options(loaded, workers, device, quick=quick),
                    command=command,
                )
                try:
                    runs = loaded.measure(context)
                    bar.show_status("analysing")
                    findings = analyse_in_style(loaded, runs)
                except KeyboardInterrupt:
                    raise Interrupted(f"finished cells are in {folder}", command) from None
                except NlbenchError as error:
                    if len(studies) == 1:
                        raise
                    failed.append(name)
                    print(f"\n{name}: {error}", file=sys.stderr, flush=True)
                    continue
            print("\n" * bool(index), end="")
            _report(name, loaded, findings, runs, context)
            print(f"took    {(time.perf_counter() - start) / 60:.1f} minutes", flush=True)
    if failed:
        raise NlbenchError(
            f"{len(failed)} of {len(studies)} studies failed: {', '.join(failed)} (see above)"
        )


def _execution_options(
    study: "Study", workers: int | None, device: str, *, quick: bool
) -> ExecutionOptions:
    """Return options with one thread per worker, so that results don't depend on their number."""
    from nlbench.introspection.precision import resolve_device

    if workers is None:
        minutes = study.quick_minutes if quick else study.minutes
        is_serial = minutes <= MAX_SERIAL_MINUTES or resolve_device(device).type != "cpu"
        workers = 1 if is_serial else os.cpu_count() or 1
    if workers == 1:
        return ExecutionOptions(threads=1)
    return ExecutionOptions(executor="processes", workers=workers, threads=1)


def _load_studies(names: list[str], flags: Sequence[str]) -> "dict[str, Study]":
    """Load studies by name or glob, and check that they accept the given flags."""
    from .study import Study

    studies: dict[str, Study] = {}
    requested = split_names(names, "study")
    for name in registry.expand("studies", requested):
        plugin = registry.load("studies", name)
        if not (isinstance(plugin, type) and issubclass(plugin, Study)):
            raise PluginError(
                f"study '{name}' is not a subclass of nlbench.studies.framework.Study"
            )
        studies[name] = plugin()
        if problem := studies[name].missing():
            if name in requested:
                raise RequestError(f"study {name}: {problem}")
            print(f"{name}: skipped, {problem}", flush=True)
            del studies[name]
            continue
        for flag in flags:
            if flag not in plugin.takes:
                allowed = ", ".join(f"--{other}" for other in plugin.takes)
                only = f", only {allowed}" if allowed else ""
                raise RequestError(f"--{flag}: study {name} doesn't accept it{only}")
    return studies


def _report(
    name: str, study: "Study", findings: "Findings", runs: "Runs", context: "Context"
) -> None:
    """Print the verdicts and write them, the tables and the page."""
    from .page import add_verdicts, verdict_table, write_findings

    print(f"{name}: {study.question}")
    for line in findings.headline:
        print(line)
    for remark in findings.remarks:
        print(f"  ({remark})")
    _print_rows(verdict_table(findings).drop(columns="remark").to_dict("split")["data"])
    folder = context.folder / name
    page = write_findings(name, study, findings, runs, folder)
    add_verdicts(context.folder / VERDICTS, name, context.version, findings)
    print(f"\nfolder  {folder}\nreport  {page}")


def _print_rows(rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for head in ("claim", "published", "here", "agrees"):
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    Console().print(table, markup=False, highlight=False)
