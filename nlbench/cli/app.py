"""The command line: commands to library calls, nothing else.

PyTorch takes seconds to import, so nothing here imports it at the top: a command
imports what it needs when it runs.
"""

from __future__ import annotations

import io
import os
import signal
import sys

import typer
from typer.exceptions import TyperException

from nlbench.commands.cite import cite
from nlbench.commands.compare import compare
from nlbench.errors import NlbenchError
from nlbench.models.training.linearize_command import linearize
from nlbench.models.training.train_command import train

from .common import Interrupted, note
from .doctor import doctor
from .listing import list_
from .merge import merge
from .report import report
from .run import run
from .show import show

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
app.command()(run)
app.command("list")(list_)
app.command()(show)
app.command()(report)
app.command()(compare)
app.command()(cite)
app.command()(merge)
app.command()(doctor)
app.command()(train)
app.command()(linearize)


def main() -> None:
    """Run a command; every error that a user can cause is one line and exit status 2."""
    _tame_output()
    try:
        status = app(standalone_mode=False)
        sys.stdout.flush()
        if status == INTERRUPTED:
            # Typer turns an interruption into this status, without a word.
            note("interrupted")
    except Interrupted as stop:
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
            note(f"{message} (see nlbench --help)")
        status = 2
    except (KeyboardInterrupt, typer.Abort):
        note("interrupted")
        status = INTERRUPTED
    except Exception as error:
        # A defect of nlbench or of a plugin, or nowhere to print to. The traceback is for
        # whoever mends it.
        if os.environ.get("NLBENCH_TRACEBACK"):
            raise
        note(f"{type(error).__name__}: {error} (set NLBENCH_TRACEBACK=1 to see where)")
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
