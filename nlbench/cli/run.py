"""``nlbench run``."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nlbench import registry
from nlbench.request import ExecutionOptions, Flag, Request, RunOptions, flags_of, read_config

from .common import Interrupted, command_line, completed, show_run

if TYPE_CHECKING:
    from nlbench.runner import Preview

__all__ = ["run"]


ASKED = (Request, RunOptions, ExecutionOptions)
_FLAGS: dict[str, Flag] = {name: one for kind in ASKED for name, one in flags_of(kind).items()}


def run(*, config: Path | None, dry_run: bool, **given: Any) -> None:
    """Measure models and write a run: board, records, tidy table, report."""
    from nlbench.progress import shown_progress

    asked = _asked(config, given)
    request, options, execution = (_part(kind, asked) for kind in ASKED)
    for name, one in flags_of(Request).items():
        if one.group:
            # Misspelt names are found before anything slow is imported.
            registry.expand(one.group, getattr(request, name))
    if options.sites:
        settings = {**request.settings, "sites.select": options.sites}
        request = replace(request, settings=settings)
    # The folder that one is in has a name, too.
    folder = Path(options.out) if options.out else _default_folder(request.models)
    folder = folder if folder.name not in ("", "..") else folder.resolve()
    command = command_line()
    with shown_progress(options.progress) as bar:
        bar.say("planning")
        from nlbench import runner

        if dry_run:
            foreseen = runner.preview(request, folder, execution=execution, progress=bar)
            bar.say("predicting")
            predicted = runner.forecast(foreseen, execution=execution, progress=bar)
            bar.stop()
            _print_preview(foreseen, folder, predicted)
            return
        try:
            result = runner.run(request, folder, progress=bar, command=command, execution=execution)
        except KeyboardInterrupt:
            is_begun = (folder / "manifest.json").is_file()
            kept = f"what was finished is in {folder}" if is_begun else "nothing was measured yet"
            named = "" if options.out else f" --out {shlex.quote(str(folder))}"
            raise Interrupted(kept, f"{command}{named}") from None
    show_run(result, options.report)
    if result.failed:
        raise typer.Exit(1)


def _signature() -> inspect.Signature:
    """The command's parameters, for typer, from the fields that can be asked for."""
    parameters = [_parameter(name, one) for name, one in _FLAGS.items()]
    extra = {
        "config": Annotated[
            Path | None, typer.Option(help="A TOML file with any of these; flags go before it.")
        ],
        "dry_run": Annotated[
            bool,
            typer.Option(
                "--dry-run", help="Say what would be measured and what it will cost, and stop."
            ),
        ],
    }
    defaults = {"config": None, "dry_run": False}
    only = inspect.Parameter.KEYWORD_ONLY
    parameters += [
        inspect.Parameter(name, only, default=defaults[name], annotation=annotation)
        for name, annotation in extra.items()
    ]
    return inspect.Signature(parameters)


_METAVARS: Mapping[str, str | None] = {
    "names": "NAMES",
    "seeds": "SEEDS",
    "paths": "PATHS",
    "text": "TEXT",
    "choice": "NAME",
    "whole": "N",
    "number": "X",
    "size": "SIZE",
    "yes": None,
    "settings": "OWNER.OPTION=VALUE",
}


def _parameter(name: str, one: Flag) -> inspect.Parameter:
    spellings = [f"--{spelling}" for spelling in one.names]
    if one.kind == "yes":
        spellings = [f"{spellings[0]}/--no-{one.names[0]}"]
    option = typer.Option(
        *spellings,
        help=one.help,
        show_default=one.default or False,
        metavar=_METAVARS[one.kind],
        autocompletion=completed(one.group) if one.group else None,
    )
    # Text, for `Flag` reads it and says what is wrong with it.
    kind: Any = list[str] if one.is_repeatable else bool if one.kind == "yes" else str
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


run.__signature__ = _signature()  # type: ignore[attr-defined]


def _asked(config: Path | None, given: dict[str, Any]) -> dict[str, Any]:
    """What the flags and the file ask for, by field; flags go before the file."""
    asked = read_config(config) if config else {}
    for name, one in _FLAGS.items():
        text = given[name]
        if text is None or text == []:
            continue
        label = f"--{one.names[0]}"
        value = text if one.kind == "yes" else one.of_text(text, label)
        asked[name] = {**asked.get(name, {}), **value} if one.kind == "settings" else value
    return asked


def _part(kind: type[Any], asked: dict[str, Any]) -> Any:
    return kind(**{name: asked[name] for name in flags_of(kind) if name in asked})


def _print_preview(
    foreseen: Preview, folder: Path, predicted: Mapping[str, Mapping[str, str]]
) -> None:
    """Counts, then one line a subject, and what each of its probes is predicted to take."""
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
        for probe, said in predicted.get(target.key, {}).items():
            print(f"  {probe}: {said}")


def _default_folder(models: tuple[str, ...]) -> Path:
    name = "".join(c if c.isalnum() or c in "-_" else "-" for c in models[0]).strip("-") or "run"
    stem = f"{name[:40]}-{datetime.now():%Y%m%d-%H%M%S}"
    folder, count = Path("runs", stem), 1
    while folder.exists():
        count += 1
        folder = Path("runs", f"{stem}-{count}")
    return folder
