"""Commands and scripts in processes forked from one with all libraries imported.

Importing PyTorch and the other libraries takes seconds. Here they are imported once, in a process
that only forks.
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
def running(*arguments, cwd, out, error, paths=(), environment=None, script=None):
    """Run ``nlbench ARGUMENTS`` during the block, with output to the files ``out`` and ``error``.

    With ``script``, that Python file runs instead. The process leads its own process group.
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
    """Run ``nlbench ARGUMENTS`` like `subprocess.run`, with the options of `running`."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "out"), Path(folder, "error")
        with running(*arguments, cwd=cwd, out=files[0], error=files[1], **options) as process:
            process.join()
        out, error = (file.read_text(encoding="utf-8") for file in files)
        return subprocess.CompletedProcess(arguments, process.exitcode, out, error)
