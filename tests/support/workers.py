"""Workers forked from a process with PyTorch imported, to save each worker the import."""

import contextlib
import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace

from commands import FORKS

from nlbench.execution import supervisor


def _work(connection, threads, environment, paths):
    os.setsid()
    os.dup2(2, 1)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = paths
    from nlbench.execution.worker import main

    main(connection.fileno(), threads)


class ForkedWorker:
    """A forked worker with the part of `subprocess.Popen` that a supervisor uses."""

    def __init__(self, command, *, pass_fds, env, **options):
        connection = Connection(os.dup(pass_fds[0]))
        self._process = FORKS.Process(
            target=_work, args=(connection, int(command[-1]), env, list(sys.path))
        )
        self._process.start()
        connection.close()
        self.pid = self._process.pid
        # A supervisor kills the worker's process group, so wait until it exists.
        with contextlib.suppress(ProcessLookupError):
            while self.poll() is None and os.getpgid(self.pid) != self.pid:
                time.sleep(0.001)

    def poll(self):
        return self._process.exitcode

    def wait(self):
        self._process.join()
        return self._process.exitcode

    def kill(self):
        self._process.kill()


def fork_workers(monkeypatch):
    """Make supervisors fork their workers for the rest of a test."""
    replacement = SimpleNamespace(Popen=ForkedWorker, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(supervisor, "subprocess", replacement)
