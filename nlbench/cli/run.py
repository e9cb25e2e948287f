"""``nlbench run``.

The flags mirror the fields of the dataclasses in `nlbench.request`; to add a flag, add a field.
"""

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
from nlbench.errors import RequestError
from nlbench.lazy import fast_imports
from nlbench.options import Option
from nlbench.request import AUTO_DATA, ExecutionOptions, Request, RunOptions, list_options
from nlbench.signals import check_interruption

from .common import (
    Interrupted,
    command_line,
    file_stem,
    name_completer,
    numbered,
    parse_folder,
    show_run,
)

if TYPE_CHECKING:
    from nlbench.runner import Preview

NO_ARGUMENTS = (
    "nothing to measure; try: nlbench run --model vgg8 (a bundled network), "
    "nlbench run --model my_net.py:Net --data ./images --weights 'checkpoints/*.ckpt' (your own), "
    "nlbench list models"
)
"""The commands that people want next after ``nlbench run`` alone."""

SECTIONS = (Request, RunOptions, ExecutionOptions)
PANELS = {Request: "What to measure", RunOptions: "Output", ExecutionOptions: "Execution"}
_OPTIONS: dict[str, Option] = {
    name: option for kind in SECTIONS for name, option in list_options(kind).items()
}


def run(
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with these options; flags take precedence.",
            rich_help_panel=PANELS[RunOptions],
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the cells to measure and those recorded, then exit.",
            rich_help_panel=PANELS[RunOptions],
        ),
    ] = False,
    **flags: Any,
) -> None:
    """Measure models, record the results and print the leaderboard."""
    from nlbench.progress import create_progress

    values = _field_values(config, flags)
    if not values and config is None and not dry_run:
        raise RequestError(NO_ARGUMENTS)
    request, options, execution = (_create(kind, values) for kind in SECTIONS)
    for name, option in list_options(Request).items():
        if option.group:
            # Unknown names are reported before PyTorch is imported.
            registry.expand(option.group, [n for n in getattr(request, name) if n != AUTO_DATA])
    if options.sites:
        settings = {**request.settings, "sites.select": options.sites}
        request = replace(request, settings=settings)
    folder = parse_folder(options.out) if options.out else _default_folder(request.models)
    folder = folder if folder.name not in ("", "..") else folder.resolve()
    command = command_line()
    with create_progress(options.progress) as bar:
        bar.show_status("planning")
        with fast_imports():
            from nlbench import runner

        if dry_run:
            preview = runner.preview(request, folder, execution=execution, progress=bar)
            bar.stop()
            _print_preview(preview, folder)
            return
        try:
            result = runner.run(request, folder, progress=bar, command=command, execution=execution)
            bar.stop()
            show_run(result, options.report)
            check_interruption()
        except KeyboardInterrupt:
            has_begun = (folder / "manifest.json").is_file()
            state = f"finished cells are in {folder}" if has_begun else "nothing measured yet"
            out = "" if options.out else f" --out {shlex.quote(str(folder))}"
            raise Interrupted(state, f"{command}{out}") from None
    if result.failed:
        raise typer.Exit(1)


def _signature() -> inspect.Signature:
    """Return the command's signature, which Typer reads."""
    options = [
        _parameter(name, option, PANELS[Request if name == "sites" else kind])
        for kind in SECTIONS
        for name, option in list_options(kind).items()
    ]
    config, dry_run, _ = inspect.signature(run, eval_str=True).parameters.values()
    return inspect.Signature([*options, config, dry_run])


_METAVARS: Mapping[str, str | None] = {
    "names": "NAMES",
    "seeds": "SEEDS",
    "paths": "PATHS",
    "text": "TEXT",
    "integer": "N",
    "number": "X",
    "size": "SIZE",
    "boolean": None,
    "settings": "KEY=VALUE",
}


def _parameter(name: str, option: Option, panel: str) -> inspect.Parameter:
    flags = [f"--{flag}" for flag in option.names]
    if option.kind == "boolean":
        flags = [f"{flags[0]}/--no-{option.names[0]}"]
    # Typer puts a default that it doesn't compute in parentheses.
    default = rf" \[default: {option.default_text}]" if option.default_text else ""
    typer_option = typer.Option(
        *flags,
        help=f"{option.help}{default}",
        show_default=False,
        metavar="NAME" if option.choices else _METAVARS[option.kind],
        autocompletion=name_completer(option.group) if option.group else None,
        rich_help_panel=panel,
    )
    # Typer passes numbers as strings; `Option` parses them with better error messages.
    kind: Any = list[str] if option.is_repeatable else bool if option.kind == "boolean" else str
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, typer_option],
    )


run.__signature__ = _signature()  # type: ignore[attr-defined]


def _field_values(config: Path | None, flags: dict[str, Any]) -> dict[str, Any]:
    """Merge the values from the config file and the flags. Flags take precedence."""
    values: dict[str, Any] = {}
    if config:
        from nlbench.request import read_config

        values = read_config(config)
    for name, option in _OPTIONS.items():
        text = flags[name]
        if text is None or text == []:
            continue
        label = f"--{option.names[0]}"
        parse = option.parse_flags if option.is_repeatable else option.parse
        value: Any = parse(text, label)
        values[name] = {**values.get(name, {}), **value} if option.kind == "settings" else value
    return values


def _create(kind: type[Any], values: dict[str, Any]) -> Any:
    return kind(**{name: values[name] for name in list_options(kind) if name in values})


def _print_preview(preview: Preview, folder: Path) -> None:
    """Print the cell counts, then one line per subject."""
    groups = (
        ("new", preview.new),
        ("recorded", preview.recorded),
        ("unmeasurable", preview.impossible),
    )
    plan = preview.plan
    counts = ", ".join(f"{len(cells)} {word}" for word, cells in groups)
    print(f"{len(plan.cells)} cells on {plan.device}: {counts}")
    print(f"run {folder}")
    for name in preview.superseded:
        print(f"{name} has changed since cells were recorded")
    for subject in plan.subjects:
        spec = subject.spec
        parts = []
        for word, cells in groups:
            names = [c.measure.name for c in cells if c.subject.key == subject.key]
            if names:
                parts.append(f"{word} {','.join(names)}")
        reason = f" ({subject.impossible})" if subject.impossible else ""
        title = f"{spec.model}  {subject.label}  {spec.data}  seed {spec.seed}"
        print(f"{title}: {'; '.join(parts)}{reason}")


def _default_folder(models: tuple[str, ...]) -> Path:
    name = file_stem(models[0])[:40] or "run"
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    return numbered(Path("runs", stem))
