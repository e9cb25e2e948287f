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
LIBRARIES = [
    "torch", "torchvision", "torch._decomp.decompositions_for_jvp", "safetensors.torch", "pandas",
    "scipy.stats", "sklearn.datasets", "matplotlib.figure", "jinja2", "typer", "tomli_w",
]  # fmt: skip
FORKS.set_forkserver_preload([*LIBRARIES, "nlbench.execution.unit_runner"])


def _pipe_without_reader():
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "wb")


def _run(arguments, cwd, environment, paths, out, error, script):
    os.setsid()
    for path, handle in ((out, 1), (error, 2)):
        with Path(path).open("wb") if path else _pipe_without_reader() as file:
            os.dup2(file.fileno(), handle)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    encoding = environment.get("PYTHONIOENCODING", "utf-8")
    sys.stdout = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
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

    If ``out`` is None, standard output is a pipe that nobody reads. With ``script``, that Python
    file runs instead. The process leads its own process group.
    """
    environment = {**os.environ, "NO_COLOR": "1", **(environment or {})}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, [*paths, *sys.path]))
    arguments = [str(argument) for argument in arguments]
    process = FORKS.Process(
        target=_run,
        args=(arguments, str(cwd), environment, paths, out and str(out), str(error), script),
    )
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def call(*arguments, cwd, is_read=True, **options):
    """Run ``nlbench ARGUMENTS`` like `subprocess.run`, with the options of `running`.

    Unless ``is_read``, nobody reads its standard output.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, error = Path(folder, "out"), Path(folder, "error")
        out.touch()
        options |= {"out": out if is_read else None, "error": error}
        with running(*arguments, cwd=cwd, **options) as process:
            process.join()
        texts = (file.read_text(encoding="utf-8") for file in (out, error))
        return subprocess.CompletedProcess(arguments, process.exitcode, *texts)
