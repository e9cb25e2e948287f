"""Commands and scripts in processes forked from one with all libraries imported.

Importing PyTorch and its company takes seconds of each process; here they are imported once, by
a process that computes nothing and only forks.
"""

import contextlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
LIBRARIES = ["torch", "torchvision", "pandas", "scipy.stats", "sklearn.datasets"]
FORKS.set_forkserver_preload([*LIBRARIES, "matplotlib.figure", "nlbench.execution.unit_runner"])


def _run(arguments, cwd, environment, paths, out, error, script):
    os.setsid()
    for path, handle in ((out, 1), (error, 2)):
        with Path(path).open("wb") as file:
            os.dup2(file.fileno(), handle)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout.reconfigure(encoding=environment.get("PYTHONIOENCODING", "utf-8"))
    sys.path[:0] = map(str, paths)
    sys.argv = [script or "nlbench", *arguments]
    if script:
        runpy.run_path(script, run_name="__main__")
        return
    from nlbench.cli import main

    main()


@contextlib.contextmanager
def started(*arguments, cwd, out, error, paths=(), environment=None, script=None):
    """Run ``nlbench ARGUMENTS`` during the block, with output to the files ``out`` and ``error``.

    With ``script`` it is that file of Python which runs. The process leads a group of its own.
    """
    environment = {**os.environ, "NO_COLOR": "1", **(environment or {})}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, [*paths, *sys.path]))
    arguments = [str(argument) for argument in arguments]
    process = FORKS.Process(
        target=_run,
        args=(arguments, str(cwd), environment, paths, str(out), str(error), script),
    )
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def call(*arguments, cwd, **options):
    """Run ``nlbench ARGUMENTS`` to its end, as `subprocess.run` does; options of `started`."""
    with tempfile.TemporaryDirectory() as place:
        said = Path(place, "out"), Path(place, "error")
        with started(*arguments, cwd=cwd, out=said[0], error=said[1], **options) as process:
            process.join()
        out, error = (file.read_text(encoding="utf-8") for file in said)
        return subprocess.CompletedProcess(arguments, process.exitcode, out, error)
