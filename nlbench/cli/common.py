"""Helpers for commands, including those of plugins: arguments, tables, messages."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlbench import registry
from nlbench.errors import RequestError, one_line, shorten, system_text
from nlbench.lazy import fast_imports
from nlbench.parsers import parse_names, parse_settings, unique
from nlbench.serialization.files import is_part

if TYPE_CHECKING:
    from nlbench.options import OptionValue
    from nlbench.store.run import Run

    SettingPairs = tuple[tuple[str, OptionValue | str], ...]


def split_names(texts: list[str], option: str) -> tuple[str, ...]:
    """Split comma-separated names and drop duplicates."""
    names = tuple(unique(name for text in texts for name in parse_names(text)))
    if not names:
        raise RequestError(
            f"{option}: expected at least one name, got '{shorten(','.join(texts))}'"
        )
    return names


def _take(settings: dict[str, str], owners: Iterable[str]) -> dict[str, str]:
    """Remove the settings of some owners, and return them by option. Later owners override."""
    taken: dict[str, str] = {}
    for owner in unique(owners):
        keys = [key for key in settings if key.rpartition(".")[0] == owner]
        taken |= {key.rpartition(".")[2]: settings.pop(key) for key in keys}
    return taken


def split_subject_options(
    texts: Iterable[str], model: str, data: str
) -> tuple[SettingPairs, SettingPairs, dict[str, str]]:
    """Split ``--set OWNER.OPTION=VALUE`` into the model's arguments, dataset options and others.

    Examples
    --------
    >>> split_subject_options(["synthetic.size=9", "absdev.normalize=range"], "vgg8", "synthetic")
    ((), (('size', '9'),), {'absdev.normalize': 'range'})
    >>> split_subject_options(["text.windows=9"], "vgg8", "text/python")
    ((), (('windows', '9'),), {})
    """
    from nlbench.subjects.data import dataset_info, settings_owners
    from nlbench.subjects.model import MODEL_OWNER, OUTPUT, declared_info, resolve_arguments

    settings = parse_settings(texts, "--set")
    # Options of one dataset ("text/python") override those of its family ("text").
    owners = settings_owners(data, dataset_info(registry.load("datasets", data)))
    options = tuple(sorted(_take(settings, owners).items()))
    info = declared_info(model)
    if info.options is not None and not info.options and f"{MODEL_OWNER}.{OUTPUT}" not in settings:
        return (), options, settings
    resolved = resolve_arguments(model, info, _take(settings, (MODEL_OWNER, model)))
    return tuple(sorted(resolved.items())), options, settings


def subject_options(
    texts: Iterable[str], model: str, data: str
) -> tuple[SettingPairs, SettingPairs]:
    """Return the model's arguments and the dataset's options. Raise if there are other settings."""
    arguments, options, others = split_subject_options(texts, model, data)
    if others:
        raise RequestError(f"--set {next(iter(others))}: expected {data}.OPTION=VALUE")
    return arguments, options


def name_completer(group: str) -> Callable[[str], list[str]]:
    """Return the shell completer for comma-separated names from a group.

    Examples
    --------
    >>> name_completer("measures")("affinity,affinit")
    ['affinity,affinity']
    """

    def complete(incomplete: str) -> list[str]:
        head, comma, last = incomplete.rpartition(",")
        return [f"{head}{comma}{n}" for n in registry.entries(group) if n.startswith(last)]

    return complete


def print_table(rows: list[dict[str, Any]], as_json: bool, *, show_header: bool = False) -> None:
    """Print rows that share the same keys as a table, by default without a header."""
    if as_json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    if not rows:
        print("(none)")
        return
    if show_header:
        rows = [{key: key for key in rows[0]}, *rows]
    lines = []
    for row in rows:
        lines.append({key: one_line(value) for key, value in row.items()})
    widths = {}
    for key in lines[0]:
        widths[key] = max(len(line[key]) for line in lines)
    for row in lines:
        print("  ".join(value.ljust(widths[key]) for key, value in row.items()).rstrip())


FILE_SUFFIXES = (
    *(".safetensors", ".pt", ".pth", ".ckpt", ".bin"),
    *(".csv", ".html", ".md", ".png", ".json", ".toml"),
)
"""Suffixes of files that nlbench reads or writes; a folder's name with one is a mistake."""


def parse_folder(text: str, option: str = "--out") -> Path:
    """Return the folder with a name. Raise RequestError if the name is empty or is that of a file.

    Examples
    --------
    >>> parse_folder("runs/v1.5").as_posix()
    'runs/v1.5'
    >>> parse_folder("kept.safetensors")
    Traceback (most recent call last):
    nlbench.errors.RequestError: --out: expected a folder's name, got 'kept.safetensors'
    """
    folder = Path(text)
    if not text.strip() or "\0" in text or folder.suffix.lower() in FILE_SUFFIXES:
        raise RequestError(f"{option}: expected a folder's name, got '{shorten(text)}'")
    return folder


def check_unused(folder: Path, option: str = "--out") -> None:
    """Raise unless a folder is missing or empty, so that nobody's files are overwritten."""
    try:
        is_unused = not os.path.lexists(folder) or (
            folder.is_dir() and all(map(is_part, folder.iterdir()))
        )
    except OSError as error:
        raise RequestError(f"{option}: can't read {folder}: {system_text(error)}") from error
    if not is_unused:
        raise RequestError(f"{folder} already exists and is not empty; choose another {option}")


def numbered(path: Path) -> Path:
    """Return a path that doesn't exist yet: the given one, or one with a number."""
    candidate = path
    number = 1
    while os.path.lexists(candidate):
        number += 1
        candidate = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return candidate


def file_stem(model: str) -> str:
    """Return a model's name as the start of the name of a file or folder."""
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in model).strip("-")


def command_line() -> str:
    """Return the current command line, quoted for a shell."""
    return shlex.join(["nlbench", *sys.argv[1:]])


def show_run(run: Run, report: bool, **files: Path) -> None:
    """Write a run's report and print its leaderboard and files.

    The report is written unless it is up to date. Additional files to list are passed as
    ``label=path``.
    """
    from rich.console import Console

    from nlbench.lazy import load_reports

    assert run.path is not None
    page = run.path / "report.html"
    reports = load_reports()
    # The report is written first, since printing fails if standard output is closed.
    if report:
        with fast_imports():
            is_current_page = reports.is_current_page
        if not is_current_page(run, page):
            page = run.report(page)
    reports.print_leaderboard(run, Console())
    files = {"run": run.path, **files, "table": run.path / "scores.csv"}
    files |= {"report": page} if report else {}
    width = max(map(len, ("report", *files))) + 2
    print("", *(f"{name:<{width}}{file}" for name, file in files.items()), sep="\n")
    folder = shlex.quote(str(run.path))
    if report:
        print(f"{'next':<{width}}nlbench report {folder} --open")
    print(
        f"{'' if report else 'next':<{width}}nlbench compare {folder} OTHER; nlbench cite {folder}"
    )


class Interrupted(BaseException):
    """The user interrupted a command that can be resumed. `args` are the lines to print."""

    def __init__(self, state: str, command: str) -> None:
        super().__init__(f"interrupted; {state}", f"resume with: {command}")


def note(message: str) -> None:
    """Print one line to standard error."""
    print(f"nlbench: {one_line(message)}", file=sys.stderr)
