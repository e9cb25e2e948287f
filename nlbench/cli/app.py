"""The application: its commands, and the exit status and message for each error.

Importing PyTorch takes seconds, so commands import it only when they run.
"""

import atexit
import contextlib
import io
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint
from importlib.metadata import version as distribution_version
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from nlbench.errors import NlbenchError, PluginError, RequestError, error_text, shorten, system_text
from nlbench.registry import entry_points
from nlbench.signals import check_interruption, interruptible, interruptions_first, uninterrupted

from .check_measure import check_measure
from .cite import cite
from .common import Interrupted, note
from .compare import compare
from .doctor import doctor
from .figure import figure
from .listing import list_
from .merge import merge
from .new_measure import new_measure
from .plane import plane
from .report import report
from .run import run
from .show import show
from .similarity import similarity
from .weight_linearity import weight_linearity

INTERRUPTED_STATUS = 130
"""Exit status after Ctrl-C."""

BROKEN_PIPE_STATUS = 141
"""Exit status if standard output is closed, as after SIGPIPE."""

app = typer.Typer(
    name="nlbench",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(f"nlbench {distribution_version('nlbench')}")
        raise typer.Exit


@app.callback()
def nlbench(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Measure how nonlinear a neural network is, with many measures side by side."""


PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Measure": (run, doctor),
    "Look up": (list_, show),
    "Results": (report, figure, compare, similarity, weight_linearity, cite, merge, plane),
    "Extend": (new_measure, check_measure),
}
EXAMPLES = {
    "run": (
        "nlbench run --measures @activations --model vgg8",
        "nlbench run --model my_net.py:Net --data ./images/val --weights best.pt",
        "nlbench run --model 'torchvision/resnet*' --samples 64 --out runs/resnets",
        "nlbench run --model vgg8 --dry-run",
    ),
    "list": ("nlbench list measures", "nlbench list sites --model vgg8"),
    "show": ("nlbench show affinity", "nlbench show runs/resnets"),
    "report": ("nlbench report runs/resnets --open", "nlbench report runs/* -o site"),
    "figure": (
        "nlbench figure runs/resnets strip -o strip.pdf",
        "nlbench figure runs/before compare --with runs/after --width text",
    ),
    "compare": ("nlbench compare runs/before runs/after --fail-if 'absdev > 5%'",),
    "similarity": (
        "nlbench similarity runs/vgg8",
        "nlbench similarity runs/vgg8 runs/resnet18 -o similarity.csv",
    ),
    "weight-linearity": ("nlbench weight-linearity runs/epochs -o epochs.csv",),
    "cite": ("nlbench cite runs/resnets >> paper.bib",),
    "plane": ("nlbench plane vgg8 --samples 0,1,2",),
}


def _epilog(name: str) -> str | None:
    """Return the examples below a command's help, one per line."""
    return "\n\n".join(("Examples:", *EXAMPLES[name])) if name in EXAMPLES else None


for panel, functions in PANELS.items():
    for function in functions:
        command_name = function.__name__.strip("_").replace("_", "-")
        app.command(command_name, rich_help_panel=panel, epilog=_epilog(command_name))(function)


def add_commands(app: typer.Typer, points: Iterable[EntryPoint]) -> None:
    """Add the commands of plugins.

    Commands that are broken or not unique are skipped and reported.
    """
    commands = app.registered_commands
    known = {command.name or getattr(command.callback, "__name__", "") for command in commands}
    for point in points:
        try:
            if point.name in known:
                raise PluginError("the name is already taken")
            function = point.load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # Importing a plugin may raise any exception; other commands work without it.
            owner = point.dist.name if point.dist else point.value
            note(f"command '{point.name}' of {owner} is not available: {error_text(error)}")
            continue
        known.add(point.name)
        app.command(point.name, rich_help_panel="Train, change and study networks")(function)


add_commands(app, entry_points("nlbench.commands"))


def main() -> None:
    """Run a command and exit with status 2 on a user error."""
    with interruptible():
        try:
            status = _status()
        except KeyboardInterrupt:
            # A second Ctrl-C, during the handling of the first.
            status = INTERRUPTED_STATUS
        _exit(status)


def _exit(status: int) -> NoReturn:
    """Exit, without waiting for threads that a plugin has left running."""
    main_thread = threading.main_thread()
    remaining = [t for t in threading.enumerate() if t is not main_thread and not t.daemon]
    deadline = time.monotonic() + 1.0
    for thread in remaining:
        # Ctrl-C may have interrupted the start of a thread, which then can't be joined.
        with contextlib.suppress(RuntimeError):
            thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in remaining):
        # `sys.exit` would wait indefinitely for these threads.
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)
    sys.exit(status)


def _status() -> int:
    """Run a command, print its error, and return the exit status."""
    # Keep SIGPIPE ignored, as Python sets it. Otherwise, sending a unit to a worker that has exited
    # would kill the run.
    _replace_unencodable_output()
    try:
        status = _run_command()
        if status == INTERRUPTED_STATUS:
            # Typer converts Ctrl-C to this status without a message.
            note("interrupted")
    except Interrupted as stop:
        with uninterrupted():
            for line in stop.args:
                note(line)
        status = INTERRUPTED_STATUS
    except NlbenchError as error:
        note(_shorten_words(str(error)))
        status = 2
    except TyperException as error:
        # After --help, or without arguments, the message is empty.
        message = error.format_message()
        if message:
            context = getattr(error, "ctx", None)
            command = context.command_path if context else "nlbench"
            note(f"{_shorten_words(_reword(message))} (see {command} --help)")
        status = 2
    except (KeyboardInterrupt, typer.Abort):
        with uninterrupted():
            note("interrupted")
        status = INTERRUPTED_STATUS
    except BrokenPipeError:
        status = BROKEN_PIPE_STATUS
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except SystemExit as stop:
        # Typer and Rich exit like this if standard output is closed.
        is_broken_pipe = isinstance(stop.__context__, BrokenPipeError)
        status = BROKEN_PIPE_STATUS if is_broken_pipe else stop.code
    except OSError as error:
        # A problem with a file, not a bug.
        if os.environ.get("NLBENCH_TRACEBACK"):
            raise
        file = f"{shorten(error.filename)}: " if error.filename else ""
        note(f"{file}{system_text(error)}")
        status = 2
    except Exception as error:
        if os.environ.get("NLBENCH_TRACEBACK"):
            raise
        if refusal := _refusal(error):
            note(f"the inputs don't fit: {refusal}; see --data, and nlbench list datasets")
            status = 2
        else:
            # A bug in nlbench or in a plugin.
            note(f"{error_text(error)} (set NLBENCH_TRACEBACK=1 for the traceback)")
            status = 1
    return status if isinstance(status, int) else 0


def _refusal(error: Exception) -> str:
    """Describe the inputs that a network refused, if that is the error."""
    if "torch" not in sys.modules:
        return ""
    from nlbench.introspection.refused_inputs import describe_refusal

    return describe_refusal(error)


def _run_command() -> object:
    """Run a command and return its status, if any.

    An interruption is re-raised even if other code suppressed it or raised another error instead.
    """
    with interruptions_first():
        _check_name_lengths(sys.argv[1:])
        # Without `prog_name`, Typer would show the name of the script that imports this module.
        status: object = app(prog_name="nlbench", standalone_mode=False)
        sys.stdout.flush()
    check_interruption()
    return status


def _check_name_lengths(arguments: list[str]) -> None:
    """Raise if the name of a command or option is too long.

    The parser searches for similar names, which takes minutes for a page of text.
    """
    for index, argument in enumerate(arguments):
        name = argument.partition("=")[0]
        if len(name) > 200 and (index == 0 or name.startswith("-")):
            what = "option" if name.startswith("-") else "command"
            raise RequestError(f"there is no {what} '{shorten(name)}' (see nlbench --help)")


_REWORDINGS = (
    (r"Invalid value for '?(.+?)'?: ", r"\1: "),
    (r"Value error, ", ""),
    (r"Input should be a valid integer.*", "expected a whole number"),
    (r"Input should be a valid number.*", "expected a number"),
    (r"Input should be a valid boolean.*", "expected true or false"),
    (r"Input should be greater than or equal to (\S+)", r"expected at least \1"),
    (r"Input should be less than or equal to (\S+)", r"expected at most \1"),
    (r"(\S+) is not one of (.*?)\.?$", r"unknown \1; available: \2"),
)


def _reword(message: str) -> str:
    """Reword a Typer message in the style of nlbench.

    Examples
    --------
    >>> _reword("Invalid value for '--epochs': Input should be a valid integer, no")
    '--epochs: expected a whole number'
    """
    for pattern, replacement in _REWORDINGS:
        message = re.sub(pattern, replacement, message)
    return message


def _shorten_words(message: str) -> str:
    """Abbreviate very long words, so that what is expected instead of them is printed.

    Examples
    --------
    >>> len(_shorten_words("x" * 5000 + " is unknown"))
    191
    """
    return re.sub(r"\S{181,}", lambda word: f"{word[0][:120]}…{word[0][-59:]}", message)


def _replace_unencodable_output() -> None:
    """Make output streams print ``?`` in place of characters that they can't encode."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    main()
