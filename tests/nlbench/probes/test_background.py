import random
import signal
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nlbench.probes.background import Background, rng_state


def put_all(background, done, keys, size=1):
    """Leave a numbered piece for each key."""
    for number, key in enumerate(keys):
        background.put({key: lambda number=number, key=key: done.append((key, number))}, size)


def none_is_left():
    return not any(thread.name == "measures" for thread in threading.enumerate())


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True), max_size=30),
    st.integers(1, 7),
    st.integers(1, 7),
    st.integers(0, 20),
    st.integers(1, 9),
)
def test_each_key_is_worked_off_in_order_one_at_a_time(items, threads, beside, most, size):
    done, at_work, clashes = {key: [] for key in "abc"}, set(), []

    def work(key, number):
        if key in at_work:
            clashes.append(number)
        at_work.add(key)
        done[key].append(number)
        at_work.discard(key)

    with Background(most, threads=threads, beside=beside) as background:
        for number, keys in enumerate(items):
            pieces = {key: lambda key=key, number=number: work(key, number) for key in keys}
            background.put(pieces, size)
    assert not clashes
    for key, numbers in done.items():
        assert numbers == [number for number, keys in enumerate(items) if key in keys]


def test_pieces_of_different_keys_run_at_once():
    meeting = threading.Barrier(3, timeout=20)
    with Background(10, threads=3) as background:
        background.put(dict.fromkeys("abc", meeting.wait), 1)
    assert not meeting.broken


def test_beside_a_caller_that_computes_fewer_work_than_while_it_waits():
    free, counts, both = threading.Event(), [], threading.Barrier(2, timeout=20)

    def first():
        counts.append("first")
        free.wait()
        both.wait()

    def second():
        counts.append("second")
        both.wait()

    with Background(10, threads=2, beside=1) as background:
        background.put({"a": first}, 1)
        while not counts:
            time.sleep(0.001)
        background.put({"b": second}, 1)
        assert counts == ["first"]
        free.set()
        # They meet once the caller waits.
        background.wait()
    assert counts == ["first", "second"]


def test_the_caller_waits_where_too_much_is_waiting():
    begun, most = [], 0
    free = threading.Event()

    def work():
        begun.append(1)
        free.wait()

    threading.Timer(0.05, free.set).start()
    with Background(10) as background:
        for number in range(20):
            background.put({"a": work}, 4)
            most = max(most, number + 1 - len(begun))
    # Two that wait.
    assert most <= 2


@pytest.mark.parametrize("threads", [1, 4])
def test_what_is_at_work_holds_no_more_than_what_may_wait(threads):
    held, most, lock = 0, [], threading.Lock()

    def work():
        nonlocal held
        with lock:
            held += 4
            most.append(held)
        time.sleep(0.001)
        with lock:
            held -= 4

    with Background(10, threads=threads) as background:
        for number in range(40):
            background.put({number: work}, 4)
    assert max(most) <= 8


def test_an_item_larger_than_what_may_wait_is_taken_alone():
    done = []
    with Background(10, threads=3) as background:
        put_all(background, done, "abc", size=1000)
    assert len(done) == 3


def test_one_can_wait_for_the_work_of_one_key():
    done, free = [], threading.Event()
    with Background(10, threads=2) as background:
        background.put({"slow": free.wait, "quick": lambda: done.append(1)}, 1)
        background.wait("quick")
        assert done == [1]
        free.set()
        background.wait()


@pytest.mark.parametrize("threads", [1, 3])
def test_what_the_work_raises_is_raised_in_the_caller(threads):
    def fail():
        raise KeyError("two")

    def put_many():
        with Background(10, threads=threads) as background:
            put_all(background, [], "abc")
            background.put({"a": fail}, 1)
            for _ in range(1000):
                put_all(background, [], "abc")

    with pytest.raises(KeyError, match="two"):
        put_many()
    assert none_is_left()


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_of_the_caller_ends_the_threads_and_drops_what_waits(threads):
    done = []

    def put_and_fail():
        with Background(1000, threads=threads) as background:
            for number in range(100):
                background.put({number: lambda: (time.sleep(0.01), done.append(1))}, 1)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        put_and_fail()
    assert len(done) < 100
    assert none_is_left()


def test_the_threads_compute_by_themselves_and_leave_the_number_of_threads():
    before, seen = torch.get_num_threads(), []
    with Background(10, threads=2) as background:
        for key in "ab":
            background.put({key: lambda: seen.append(torch.get_num_threads())}, 1)
    later = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert (seen, later, torch.get_num_threads()) == ([1, 1], [before], before)


def test_no_gradient_is_followed_in_the_threads():
    seen = []
    with Background(10) as background:
        background.put({"a": lambda: seen.append(torch.is_grad_enabled())}, 1)
    assert seen == [False]


@pytest.mark.parametrize("threads", [1, 3])
def test_an_interruption_while_the_rest_is_worked_off_drops_it_and_ends_the_threads(threads):
    done = []

    def work():
        # By then the caller waits for the end.
        time.sleep(0.05)
        if not done:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        done.append(1)

    def put_many():
        with Background(1000, threads=threads) as background:
            for _ in range(100):
                background.put({"a": work, "b": lambda: None}, 1)

    with pytest.raises(KeyboardInterrupt):
        put_many()
    assert len(done) < 10
    assert none_is_left()


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(1)])
def test_a_draw_from_any_global_generator_shows(draw):
    before = rng_state(torch.device("cpu"))
    assert rng_state(torch.device("cpu")) == before
    draw()
    assert rng_state(torch.device("cpu")) != before


def test_the_number_of_threads_is_put_back_when_the_last_of_several_ends():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first, second = (Background(1) for _ in range(2))
        first.__enter__()
        first.put({"a": lambda: None}, 1)

        def other():
            with second:
                second.put({"a": lambda: None}, 1)
                first.__exit__(None, None, None)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        found = []
        later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert found == [2]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_a_pass_on_the_cpu_leaves_a_gpu_alone(monkeypatch, kind):
    # To ask which CUDA device is the current one takes it into use; a Mac's can't be asked.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: kind == "cuda")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: kind == "mps")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("it was asked for"))
    done = []
    with Background(10, torch.device("cpu")) as background:
        background.put({"one": lambda: done.append(1)}, size=1)
    assert done == [1]
