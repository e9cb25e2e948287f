import logging
import signal
import subprocess
import sys
import threading
import warnings

import pytest

from nlbench.execution.supervisor import deaf_processes, quiet_ending, quiet_loop


def test_a_process_started_meanwhile_does_not_hear_an_interruption():
    with deaf_processes():
        process = subprocess.Popen(
            [sys.executable, "-c", "print(1, flush=True); input(); print(2, flush=True)"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
    assert process.stdout.readline() == b"1\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(b"\n", timeout=60)[0] == b"2\n"
    assert process.returncode == 0


def test_an_interruption_that_comes_meanwhile_is_heard_afterwards():
    done = []

    def interrupted():
        with deaf_processes():
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


class _ExecutorManagerThread(threading.Thread):
    def run(self):
        raise KeyError(7)


def stumble():
    warnings.warn(
        "6 tasks which were still being processed by the workers have been cancelled. You could "
        "benefit from adjusting the input task iterator to limit unnecessary computation time.",
        stacklevel=1,
    )
    thread = _ExecutorManagerThread()
    thread.start()
    thread.join()


def test_tasks_that_are_called_off_are_nothing_to_tell(monkeypatch):
    told = []
    monkeypatch.setattr(threading, "excepthook", told.append)

    def interrupted():
        with quiet_ending():
            stumble()
            raise KeyboardInterrupt

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    assert not told
    assert not warned


def test_what_dasks_loop_logs_is_kept_back_only_meanwhile(caplog):
    loop = logging.getLogger("tornado.application")
    with quiet_loop():
        loop.setLevel(logging.ERROR)  # as importing Dask does
        loop.error("meanwhile")
    loop.error("afterwards")
    assert caplog.messages == ["afterwards"]


@pytest.mark.parametrize("error", [None, ValueError])
def test_an_error_of_the_thread_is_told_where_nobody_interrupted(monkeypatch, error):
    told = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    try:
        with quiet_ending():
            stumble()
            if error:
                raise error
    except ValueError:
        pass
    assert [one.exc_type for one in told] == [KeyError]
