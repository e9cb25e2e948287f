"""``nlbench study``."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nlbench import registry
from nlbench.cli.common import Interrupted, command_line, completed, split_names
from nlbench.errors import PluginError, RequestError
from nlbench.request import ExecutionOptions, parse_seeds

if TYPE_CHECKING:
    from .study import Context, Findings, Study

__all__ = ["study"]


def study(
    names: Annotated[
        list[str],
        typer.Argument(
            help="Studies: names or globs, with commas.", autocompletion=completed("studies")
        ),
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="A smaller version: fewer seeds, networks, paths.")
    ] = False,
    out: Annotated[
        Path, typer.Option(help="Folder of all studies, which share cells and checkpoints there.")
    ] = Path("studies"),
    data: Annotated[
        str, typer.Option(help="Dataset in place of the study's own, where it can be another.")
    ] = "",
    weights: Annotated[
        str, typer.Option(help="init or trained, for studies of networks with published weights.")
    ] = "",
    seeds: Annotated[
        list[str] | None, typer.Option(help="Seeds in place of the study's own.")
    ] = None,
    measures: Annotated[
        list[str] | None,
        typer.Option(
            "--measures",
            "--measure",
            help="Measures in place of the study's own.",
            autocompletion=completed("measures"),
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    workers: Annotated[
        int | None,
        typer.Option(
            help="How many networks are trained or measured at a time. [the cores; on a GPU, or "
            "for a study of a few seconds, 1]",
            min=1,
            max=1024,
        ),
    ] = None,
    progress: Annotated[str, typer.Option(help="auto, rich, plain or none.")] = "auto",
) -> None:
    """Carry out studies: a fixed run each, its verdicts beside what was published, a page.

    The same command goes on where it was interrupted.
    """
    given: dict[str, Any] = {
        "data": data,
        "weights": weights,
        "seeds": parse_seeds(seeds) if seeds else (),
        "measures": split_names(measures, "--measures") if measures else (),
    }
    if data:
        registry.expand("datasets", [data])
    if measures:
        given["measures"] = tuple(registry.expand("measures", given["measures"]))
    chosen = {name: _loaded(name) for name in registry.expand("studies", split_names(names, ""))}
    for name, one in chosen.items():
        for flag, value in given.items():
            if value and flag not in one.takes:
                taken = ", ".join(f"--{other}" for other in one.takes) or "none of its settings"
                raise RequestError(f"--{flag}: study {name} fixes it (it takes {taken})")
    command = command_line()
    from nlbench.execution.executors import workers_kept
    from nlbench.progress import shown_progress

    from .page import analysed
    from .study import Context

    with workers_kept():
        for number, (name, one) in enumerate(chosen.items()):
            began = time.perf_counter()
            with shown_progress(progress) as bar:
                context = Context(
                    out,
                    name,
                    quick,
                    **given,
                    device=device,
                    progress=bar,
                    execution=_execution(one, workers, device, quick=quick),
                    command=command,
                )
                try:
                    runs = one.measure(context)
                    bar.say("analysing")
                    findings = analysed(one, runs)
                except KeyboardInterrupt:
                    raise Interrupted(f"what was finished is in {out}", command) from None
            print("\n" * bool(number), end="")
            _show(name, one, findings, runs, context)
            print(f"took    {(time.perf_counter() - began) / 60:.1f} minutes", flush=True)


SHORT = 0.3
"""Minutes up to which it isn't worth while to start processes, which takes seconds."""


def _execution(one: "Study", workers: int | None, device: str, *, quick: bool) -> ExecutionOptions:
    """How a study is carried out, with one thread each so that workers change no number."""
    from nlbench.execution.numerics import resolve_device

    if workers is None:
        is_short = (one.quick_minutes if quick else one.minutes) <= SHORT
        is_alone = is_short or resolve_device(device).type != "cpu"
        workers = 1 if is_alone else os.cpu_count() or 1
    if workers == 1:
        return ExecutionOptions(threads=1)
    return ExecutionOptions(executor="processes", workers=workers, threads=1)


def _loaded(name: str) -> "Study":
    from .study import Study

    found = registry.load("studies", name)
    if not (isinstance(found, type) and issubclass(found, Study)):
        raise PluginError(f"study '{name}' is no subclass of nlbench.studies.study.Study")
    one: Study = found()
    return one


def _show(
    name: str, one: "Study", findings: "Findings", runs: Mapping[str, Any], context: "Context"
) -> None:
    """Print the verdicts, and write them with the tables and the page."""
    from .page import add_verdicts, verdict_table, write_findings

    print(f"{name}: {one.question}")
    for remark in findings.remarks:
        print(f"  ({remark})")
    _print_rows(verdict_table(findings).drop(columns="remark").to_dict("split")["data"])
    folder = context.folder / name
    files = write_findings(name, one, findings, runs, folder)
    add_verdicts(context.folder / "verdicts.csv", name, context.version, findings)
    print(f"\nfolder  {folder}\nreport  {files}")


def _print_rows(rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for head in ("claim", "published", "here", "agrees"):
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    Console().print(table, markup=False, highlight=False)
