import contextlib
import os
import signal
import threading

import pytest

from nlbench.signals import (
    check_interruption,
    ignore_interruptions,
    interruptible,
    interruptions_first,
    uninterrupted,
)

ASKED = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def send(number):
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.getsignal(number) for number in ASKED}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ASKED)
def test_termination_signals_interrupt_only_the_block(number, handlers):
    with pytest.raises(KeyboardInterrupt), interruptible():
        send(number)
    assert {n: signal.getsignal(n) for n in ASKED} == handlers


def test_interruption_waits_for_uninterruptible_blocks(handlers):
    done = []

    def work():
        with uninterrupted():
            with uninterrupted():
                send(signal.SIGTERM)
                send(signal.SIGTERM)
                done.append("inner")
            done.append("outer")
        done.append("after")

    with pytest.raises(KeyboardInterrupt), interruptible():
        work()
    assert done == ["inner", "outer"]
    assert {n: signal.getsignal(n) for n in ASKED} == handlers


def test_no_signal_raises_no_interruption():
    with interruptible(), uninterrupted():
        check_interruption()


def swallow(number):
    with contextlib.suppress(BaseException):
        send(number)


@pytest.mark.parametrize("number", ASKED)
def test_a_swallowed_interruption_is_raised_again(number, handlers):
    with pytest.raises(KeyboardInterrupt), interruptible():
        swallow(number)
    assert {n: signal.getsignal(n) for n in ASKED} == handlers
    with interruptible():
        swallow(number)
        with pytest.raises(KeyboardInterrupt):
            check_interruption()
        raise_other = pytest.raises(RuntimeError)
        with raise_other, interruptible():
            raise RuntimeError
        ignore_interruptions()


@pytest.mark.parametrize("error", [ImportError("half imported"), SystemExit(1)])
@pytest.mark.parametrize("is_interrupted", [True, False])
def test_interruption_comes_before_the_error_that_follows_it(error, is_interrupted):
    def fail():
        with interruptible(), interruptions_first():
            if is_interrupted:
                swallow(signal.SIGINT)
            raise error

    with pytest.raises(KeyboardInterrupt if is_interrupted else type(error)):
        fail()


def test_custom_signal_handlers_stay():
    heard = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append("theirs"))
    with interruptible(), uninterrupted():
        send(signal.SIGTERM)
        assert heard == ["theirs"]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interruptible():
        send(signal.SIGHUP)


def test_ending_process_ignores_signals():
    with interruptible():
        ignore_interruptions()
        send(signal.SIGTERM)
    send(signal.SIGTERM)


def test_other_threads_may_use_interruptible_blocks():
    failed = []

    def work():
        try:
            with interruptible(), uninterrupted():
                ignore_interruptions()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed
