"""The command line: commands to library calls, nothing else.

PyTorch takes seconds to import, so nothing here imports it at the top: a command
imports what it needs when it runs.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.exceptions import TyperException

from nlbench import registry
from nlbench.errors import NlbenchError, RequestError

if TYPE_CHECKING:
    from nlbench.records import Run

__all__ = ["app", "main"]

INTERRUPTED = 130
"""Exit status after Ctrl-C."""

app = typer.Typer(
    name="nlbench",
    help="Measure how nonlinear a neural network is, with every measure side by side.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Listing(StrEnum):
    """What ``nlbench list`` lists."""

    measures = "measures"
    models = "models"
    datasets = "datasets"
    studies = "studies"
    recipes = "recipes"
    sites = "sites"


@app.command()
def run(
    measures: Annotated[
        list[str] | None, typer.Option(help="Names or globs, with commas. [affinity,absdev]")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Names or globs, with commas. [vgg8]")
    ] = None,
    weights: Annotated[
        str,
        typer.Option(help="trained, init, or a checkpoint's path; auto: trained where it ships."),
    ] = "auto",
    data: Annotated[list[str] | None, typer.Option(help="Datasets, with commas. [digits]")] = None,
    seeds: Annotated[
        list[str] | None,
        typer.Option(help="Seeds of the initialisation and the sample, with commas. [0]"),
    ] = None,
    samples: Annotated[int, typer.Option(help="Samples to look at; 0: the whole split.")] = 512,
    split: Annotated[str, typer.Option(help="test or train.")] = "test",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="OWNER.OPTION=VALUE",
            help="Option of a measure or a probe, repeatable: affinity.shrinkage=none.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; by default runs/MODEL-TIME.")
    ] = None,
    report: Annotated[bool, typer.Option(help="Write report.html into the run's folder.")] = True,
) -> None:
    """Measure models and write a run: board, records, tidy table, report."""
    from nlbench.progress import Bar

    # Misspelt names are found before anything slow is imported.
    names: dict[str, Any] = {
        "measures": _names(measures or ["affinity,absdev"], "--measures", "measures"),
        "models": _names(model or ["vgg8"], "--model", "models"),
        "data": _names(data or ["digits"], "--data", "datasets"),
        "seeds": tuple(_seed(text) for text in _names(seeds or ["0"], "--seeds")),
    }
    settings = _settings(setting or [])
    if not weights:
        raise RequestError("--weights: expected trained, init, auto or a checkpoint's path, got ''")
    folder = _default_folder(names["models"]) if out is None else out
    if out == Path():
        raise RequestError("--out: expected a folder's name, got ''")
    command = shlex.join(["nlbench", *sys.argv[1:]])
    with Bar() as bar:
        bar.say("loading")
        from nlbench.plan import Request
        from nlbench.runner import run as run_request

        request = Request(
            **names,
            weights=weights,
            samples=samples,
            split=split,
            device=device,
            settings=settings,
        )
        try:
            result = run_request(request, folder, progress=bar, command=command)
        except KeyboardInterrupt:
            raise _Interrupted(
                f"interrupted; what was finished is in {folder}",
                f"go on with: {_resume_command(command, folder, out)}",
            ) from None
    _show(result, report)


def _show(result: Run, report: bool) -> None:
    from rich.console import Console

    assert result.path is not None
    # The page first: what is printed may have no reader.
    page = result.report(result.path / "report.html") if report else None
    registry.load("reports", "terminal")(result, Console())
    print(f"\nrun     {result.path}")
    print(f"table   {result.path / 'scores.csv'}")
    if page:
        print(f"report  {page}")
    if result.failed:
        raise typer.Exit(1)


@app.command("list")
def list_(
    what: Annotated[Listing, typer.Argument(help="What to list.")],
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    model: Annotated[str | None, typer.Option(help="Whose sites to list.")] = None,
    data: Annotated[str, typer.Option(help="Dataset that decides the input's shape.")] = "digits",
) -> None:
    """List what can be named: measures, models, datasets, … or the sites of a model."""
    if what is not Listing.sites and model is not None:
        raise RequestError(f"list {what.value}: takes no --model; list sites --model {model} does")
    if what is Listing.sites:
        _print_table(_sites(model, data), as_json)
        return
    found = registry.entries(what.value)
    rows = [
        {
            "name": entry.name,
            "description": registry.describe(entry),
            "from": ", ".join(entry.providers),
        }
        for entry in found.values()
    ]
    _print_table(rows, as_json)
    conflicts = [entry.conflict for entry in found.values() if entry.conflict]
    for conflict in conflicts:
        _note(conflict)
    if conflicts:
        raise typer.Exit(2)


def _sites(model: str | None, data: str) -> list[dict[str, Any]]:
    if model is None:
        raise RequestError("list sites: name a model with --model")
    from nlbench.probes.sites import list_sites
    from nlbench.subject import build_model, load_dataset

    dataset = load_dataset(data)
    network = build_model(model, dataset, seed=0)
    example = dataset.sample(2).inputs
    return [
        {
            "site": site.name,
            "kind": site.kind,
            "shape": "×".join(map(str, site.shape)),
            "channels": f"axis {site.channel_axis}" + (" (assumed)" if site.assumed else ""),
        }
        for site in list_sites(network, example)
    ]


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A measure's name, or a run's folder.")],
    cite: Annotated[bool, typer.Option("--cite", help="Only the BibTeX entry.")] = False,
) -> None:
    """Show a measure's definition, bounds, options and source, or a run's manifest."""
    if Path(name, "manifest.json").is_file():
        from nlbench.records import load_run

        print(json.dumps(load_run(name).manifest, indent=1))
        return
    import inspect

    measure = registry.load("measures", name)
    if cite:
        print(measure.source.bibtex or measure.source.citation)
        return
    low, high = measure.bounds
    print(f"{measure.name} (version {measure.version}, probe {measure.probe})\n")
    print(inspect.cleandoc(measure.__doc__ or "(no description)"))
    print(f"\nbounds    {low:g} to {high:g}\nmore is   {measure.more_means}")
    for option, detail in measure.options.items():
        choices = f" ({', '.join(detail.choices)})" if detail.choices else ""
        print(f"option    {measure.name}.{option} = {detail.default}  {detail.help}{choices}")
    from nlbench.probes import PROBES

    for option, detail in PROBES[measure.probe].options.items():
        choices = f" ({', '.join(detail.choices)})" if detail.choices else ""
        print(f"probe     {measure.probe}.{option} = {detail.default}  {detail.help}{choices}")
    print(f"source    {measure.source.citation} {measure.source.equation}".rstrip())


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.", metavar="RUN...")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
) -> None:
    """Write one self-contained page for one or several runs."""
    from nlbench.records import load_run

    page = registry.load("reports", "html")([load_run(path) for path in runs], output)
    print(page)


@app.command()
def train(
    model: Annotated[str, typer.Option(help="A registered model.")],
    out: Annotated[Path, typer.Option(help="The checkpoint to write (safetensors).")],
    data: Annotated[str, typer.Option(help="A registered dataset.")] = "digits",
    recipe: Annotated[str, typer.Option(help="A registered recipe.")] = "vanilla",
    seed: Annotated[int, typer.Option(help="Of the initialisation and the order.")] = 0,
    label_noise: Annotated[
        float, typer.Option(help="Share of training labels changed to another class.", min=0, max=1)
    ] = 0.0,
    epochs: Annotated[
        int | None, typer.Option(help="Instead of the recipe's number.", min=1)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
) -> None:
    """Train a model and write its weights as a checkpoint that --weights takes."""
    from nlbench.progress import Bar

    with Bar() as bar:
        bar.say("loading")
        from nlbench.environment import resolve_device
        from nlbench.files import make_folder
        from nlbench.subject import build_model, load_dataset
        from nlbench.weights import save_weights

        if out.suffix != ".safetensors":
            raise RequestError(f"--out: expected a name that ends in .safetensors, got '{out}'")
        make_folder(out.parent)
        plan = registry.load("recipes", recipe)
        plan = plan if epochs is None else replace(plan, epochs=epochs)
        dataset = load_dataset(data)
        bar.begin(plan.epochs)
        result = plan.train(
            lambda: build_model(model, dataset, seed),
            dataset,
            seed=seed,
            device=resolve_device(device),
            label_noise=label_noise,
            progress=lambda epoch: bar.step(
                f"{model}: loss {epoch.loss:.3f}, test accuracy {epoch.test_accuracy:.1%}"
            ),
        )
        metadata = {
            "nlbench": version("nlbench"),
            "model": model,
            "data": data,
            "recipe": recipe,
            "epochs": str(plan.epochs),
            "seed": str(seed),
            "label_noise": str(label_noise),
            "train_accuracy": f"{result.train_accuracy:.4f}",
            "test_accuracy": f"{result.test_accuracy:.4f}",
            "command": shlex.join(["nlbench", *sys.argv[1:]]),
        }
        save_weights(out, result.model, metadata)
    print(f"train accuracy  {result.train_accuracy:.2%}")
    print(f"test accuracy   {result.test_accuracy:.2%}")
    print(f"weights         {out}")


def _names(texts: list[str], option: str, group: str | None = None) -> tuple[str, ...]:
    parts = (part.strip() for text in texts for part in text.split(","))
    names = tuple(dict.fromkeys(part for part in parts if part))
    if not names:
        raise RequestError(f"{option}: expected at least one name, got '{','.join(texts)}'")
    if group:
        registry.expand(group, names)
    return names


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) >= 2**63:
        raise RequestError(f"--seeds: expected whole numbers of 0 or more, got '{text}'")
    return int(text)


def _settings(given: Iterable[str]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise RequestError(f"--set: expected OWNER.OPTION=VALUE, got '{text}'")
        settings[key.strip()] = value.strip()
    return settings


def _default_folder(models: tuple[str, ...]) -> Path:
    name = "".join(c if c.isalnum() or c in "-_" else "-" for c in models[0]).strip("-") or "run"
    stem = f"{name[:40]}-{datetime.now():%Y%m%d-%H%M%S}"
    folder, count = Path("runs", stem), 1
    while folder.exists():
        count += 1
        folder = Path("runs", f"{stem}-{count}")
    return folder


def _resume_command(command: str, folder: Path, out: Path | None) -> str:
    return command if out else f"{command} --out {shlex.quote(str(folder))}"


def _print_table(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    if not rows:
        print("(none)")
        return
    widths = {key: max(len(str(row[key])) for row in rows) for key in rows[0]}
    for row in rows:
        print("  ".join(str(value).ljust(widths[key]) for key, value in row.items()).rstrip())


class _Interrupted(Exception):
    """The user stopped a run that can be taken up again; its arguments are lines to print."""


def _note(message: str) -> None:
    print(f"nlbench: {' '.join(message.split())}", file=sys.stderr)


def main() -> None:
    """Run a command; every error that a user can cause is one line and exit status 2."""
    _tame_output()
    try:
        status = app(standalone_mode=False)
        sys.stdout.flush()
        if status == INTERRUPTED:
            # Typer turns an interruption into this status, without a word.
            _note("interrupted")
    except _Interrupted as stop:
        for line in stop.args:
            _note(line)
        status = INTERRUPTED
    except NlbenchError as error:
        _note(str(error))
        status = 2
    except TyperException as error:
        # No arguments at all, or --help: the help has been printed and there is no message.
        message = error.format_message()
        if message:
            _note(f"{message} (see nlbench --help)")
        status = 2
    except (KeyboardInterrupt, typer.Abort):
        _note("interrupted")
        status = INTERRUPTED
    except Exception as error:
        # A defect of nlbench or of a plugin, or nowhere to print to. The traceback is for
        # whoever mends it.
        if os.environ.get("NLBENCH_TRACEBACK"):
            raise
        _note(f"{type(error).__name__}: {error} (set NLBENCH_TRACEBACK=1 to see where)")
        status = 1
    sys.exit(status if isinstance(status, int) else 0)


def _tame_output() -> None:
    """Print what a terminal can't show as ``?``, and end quietly when a pipe's reader is gone."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


if __name__ == "__main__":
    main()
