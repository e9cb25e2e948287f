"""The command line: commands to library calls, nothing else.

PyTorch takes seconds to import, so nothing here imports it at the top: a command
imports what it needs when it runs.
"""

import io
import os
import re
import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint
from importlib.metadata import version as distribution_version
from typing import Annotated

import typer
from typer.exceptions import TyperException

from nlbench.errors import NlbenchError, PluginError, RequestError, error_text, shown, system_text
from nlbench.registry import entry_points
from nlbench.signals import interruptible, uninterrupted

from .check_measure import check_measure
from .cite import cite
from .common import Interrupted, note
from .compare import compare
from .doctor import doctor
from .listing import list_
from .merge import merge
from .new_measure import new_measure
from .plane import plane
from .report import report
from .run import run
from .show import show

__all__ = ["add_commands", "app", "main"]


INTERRUPTED = 130
"""Exit status after Ctrl-C."""

NO_READER = 141
"""Exit status when whoever read the output is gone, as of a program that SIGPIPE ends."""

app = typer.Typer(
    name="nlbench",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say_version(asked: bool) -> None:
    if asked:
        print(f"nlbench {distribution_version('nlbench')}")
        raise typer.Exit


@app.callback()
def nlbench(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_say_version, help="Say the version and exit."
        ),
    ] = False,
) -> None:
    """Measure how nonlinear a neural network is, with every measure side by side."""


app.command()(run)
app.command("list")(list_)
app.command()(show)
app.command()(report)
app.command()(compare)
app.command()(cite)
app.command()(merge)
app.command()(plane)
app.command()(doctor)
app.command("new-measure")(new_measure)
app.command("check-measure")(check_measure)


def add_commands(app: typer.Typer, points: Iterable[EntryPoint]) -> None:
    """Add commands of plugins; one that is broken or takes another's name is left out, and named.

    Parameters
    ----------
    app : typer.Typer
    points : iterable of EntryPoint
        Of the group ``nlbench.commands``: from a command's name to its function.
    """
    commands = app.registered_commands
    known = {command.name or getattr(command.callback, "__name__", "") for command in commands}
    for point in points:
        try:
            if point.name in known:
                raise PluginError("there is one of that name")
            function = point.load()
        except (Exception, SystemExit) as error:
            # A plugin's import can fail in any way; the other commands work without it.
            who = point.dist.name if point.dist else point.value
            note(f"command '{point.name}' of {who} is left out: {error_text(error)}")
            continue
        known.add(point.name)
        app.command(point.name)(function)


add_commands(app, entry_points("nlbench.commands"))


def main() -> None:
    """Run a command; every error that a user can cause is one line and exit status 2."""
    with interruptible():
        try:
            status = _status()
        except KeyboardInterrupt:
            # Once more, while the first was being answered.
            status = INTERRUPTED
    sys.exit(status)


def _status() -> int:
    """Run a command, say what went wrong, and give the exit status."""
    # SIGPIPE stays ignored, as Python has it: it would end a run together with its worker, in
    # the moment when the next unit is sent to it.
    _tame_output()
    try:
        _check_lengths(sys.argv[1:])
        status = app(standalone_mode=False)
        sys.stdout.flush()
        if status == INTERRUPTED:
            # Typer turns an interruption into this status, without a word.
            note("interrupted")
    except Interrupted as stop:
        with uninterrupted():
            for line in stop.args:
                note(line)
        status = INTERRUPTED
    except NlbenchError as error:
        note(str(error))
        status = 2
    except TyperException as error:
        # No arguments at all, or --help: the help has been printed and there is no message.
        message = error.format_message()
        if message:
            note(f"{_in_our_words(message)} (see nlbench --help)")
        status = 2
    except (KeyboardInterrupt, typer.Abort):
        with uninterrupted():
            note("interrupted")
        status = INTERRUPTED
    except BrokenPipeError:
        status = NO_READER
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except SystemExit as done:
        # So Typer and Rich end when nobody reads the output.
        status = NO_READER if isinstance(done.__context__, BrokenPipeError) else done.code
    except OSError as error:
        # What the system says against a file; where nobody foresaw it, it is still no defect.
        if os.environ.get("NLBENCH_TRACEBACK"):
            raise
        where = f"{shown(error.filename)}: " if error.filename else ""
        note(f"{where}{system_text(error)}")
        status = 2
    except Exception as error:
        # A defect of nlbench or of a plugin, or nowhere to print to. The traceback is for
        # whoever mends it.
        if os.environ.get("NLBENCH_TRACEBACK"):
            raise
        note(f"{error_text(error)} (set NLBENCH_TRACEBACK=1 to see where)")
        status = 1
    return status if isinstance(status, int) else 0


def _check_lengths(arguments: list[str]) -> None:
    """Refuse names of commands and flags that are longer than any.

    The parser looks for the nearest name, which takes minutes for a page of text.
    """
    for number, argument in enumerate(arguments):
        name = argument.partition("=")[0]
        if len(name) > LONGEST and (number == 0 or name.startswith("-")):
            what = "option" if name.startswith("-") else "command"
            raise RequestError(f"there is no {what} '{shown(name)}' (see nlbench --help)")


LONGEST = 200
"""Letters that the name of a command or a flag may have."""

_WORDING = (
    (r"Invalid value for '?(.+?)'?: ", r"\1: "),
    (r"Value error, ", ""),
    (r"Input should be a valid integer.*", "expected a whole number"),
    (r"Input should be a valid number.*", "expected a number"),
    (r"Input should be a valid boolean.*", "expected true or false"),
    (r"Input should be greater than or equal to (\S+)", r"expected at least \1"),
    (r"Input should be less than or equal to (\S+)", r"expected at most \1"),
    (r"(\S+) is not one of (.*?)\.?$", r"unknown \1; there are: \2"),
)


def _in_our_words(message: str) -> str:
    """Say what the parser of the command line says as the rest of nlbench would.

    Examples
    --------
    >>> _in_our_words("Invalid value for '--epochs': Input should be a valid integer, no")
    '--epochs: expected a whole number'
    """
    for pattern, words in _WORDING:
        message = re.sub(pattern, words, message)
    return message


def _tame_output() -> None:
    """Print what a terminal can't show as ``?``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    main()
