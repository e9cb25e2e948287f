import signal
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nlbench.introspection.threads import BackgroundWorkers


def size(item):
    return item[1]


def no_thread_is_left():
    return not any(thread.name.startswith("measures") for thread in threading.enumerate())


@pytest.mark.parametrize("most", [0, 1, 100])
def test_single_thread_processes_items_in_order(most):
    done = []

    def work(item):
        done.append((item[0], threading.current_thread().name.startswith("measures")))

    with BackgroundWorkers(work, size, most) as workers:
        for number in range(50):
            workers.put((number, 3))
    assert done == [(number, True) for number in range(50)]


def test_the_caller_waits_while_the_queue_is_full():
    waiting, most = [], 0
    free = threading.Event()

    def work(item):
        if item[0]:
            free.wait()
        waiting.remove(item)

    def release():
        time.sleep(0.05)
        free.set()

    threading.Thread(target=release).start()
    with BackgroundWorkers(work, size, 10) as workers:
        for number in range(20):
            waiting.append((number, 4))
            workers.put((number, 4))
            most = max(most, len(waiting))
    # Two that wait, one at work and the one that is just being put.
    assert most <= 4


def test_an_item_larger_than_the_limit_waits_alone():
    done = []
    with BackgroundWorkers(done.append, size, 10) as workers:
        for number in range(3):
            workers.put((number, 1000))
    assert len(done) == 3


def test_limit_0_makes_caller_wait_for_each_item():
    done = []
    with BackgroundWorkers(done.append, size, 0) as workers:
        for number in range(10):
            workers.put((number, 1))
            assert len(done) == number + 1


@pytest.mark.parametrize("most", [0, 100])
def test_error_of_work_is_raised_in_caller(most):
    def work(item):
        if item[0] == 2:
            raise KeyError("two")

    def put_many():
        with BackgroundWorkers(work, size, most) as workers:
            for number in range(1000):
                workers.put((number, 1))

    with pytest.raises(KeyError):
        put_many()


def test_an_error_of_the_caller_drops_the_queue():
    done, failed = [], threading.Event()

    def work(item):
        if item[0]:
            assert failed.wait(60)
            time.sleep(0.05)
        done.append(item)

    def put_and_fail():
        with BackgroundWorkers(work, size, 1000) as workers:
            for number in range(100):
                workers.put((number, 1))
            failed.set()
            raise KeyError

    with pytest.raises(KeyError):
        put_and_fail()
    assert len(done) <= 2
    assert no_thread_is_left()


def test_workers_use_one_torch_thread_and_restore_number():
    before, seen = torch.get_num_threads(), []
    with BackgroundWorkers(lambda item: seen.append(torch.get_num_threads()), size, 10) as workers:
        workers.put((0, 1))
    later = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert (seen, later, torch.get_num_threads()) == ([1], [before], before)


def test_workers_record_no_gradients():
    seen = []
    with BackgroundWorkers(lambda item: seen.append(torch.is_grad_enabled()), size, 10) as workers:
        workers.put((0, 1))
    assert seen == [False]


def test_interruption_drops_the_queue_and_ends_the_thread():
    done = []

    def work(item):
        if item[0] == 1:
            # By then the caller waits for the end.
            time.sleep(0.05)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.05)
        done.append(item)

    def put_many():
        with BackgroundWorkers(work, size, 1000) as workers:
            for number in range(100):
                workers.put((number, 1))
            workers.put((100, 1000))

    with pytest.raises(KeyboardInterrupt):
        put_many()
    assert len(done) <= 3
    assert no_thread_is_left()


def test_a_raised_limit_lets_the_caller_continue():
    free, done = threading.Event(), []

    def work(item):
        if item[0]:
            free.wait()
        done.append(item[0])

    with BackgroundWorkers(work, size, 0) as workers:
        workers.put((0, 1))
        workers.set_limit(10)
        workers.put((1, 1))
        workers.put((2, 1))
        assert done == [0]
        free.set()
    assert done == [0, 1, 2]


def by_lane(items):
    lanes = {}
    for lane, number in items:
        lanes.setdefault(lane, []).append((lane, number))
    return lanes


@given(st.lists(st.sampled_from("abcd"), max_size=40), st.integers(1, 4))
def test_lanes_keep_the_order_of_submission(lanes, threads):
    begun, at_work, overlaps = [], set(), []

    def work(item):
        lane, number = item
        if lane in at_work or (number in firsts and at_work):
            overlaps.append(item)
        at_work.add(lane)
        begun.append(item)
        at_work.discard(lane)

    items = [(lane, number) for number, lane in enumerate(lanes)]
    firsts = {of_lane[0][1] for of_lane in by_lane(items).values()}
    how = {"lane": lambda item: item[0], "threads": threads}
    with BackgroundWorkers(work, lambda item: 1, 100, **how) as workers:
        for item in items:
            workers.put(item)
    assert not overlaps
    assert by_lane(begun) == by_lane(items)
    assert list(by_lane(begun)) == list(by_lane(items))
    # What was given before the first item of a lane is done before it.
    for number in firsts:
        assert {other for _, other in begun[: [n for _, n in begun].index(number)]} >= set(
            range(number)
        )


def test_lanes_run_concurrently():
    together = threading.Barrier(3, timeout=60)
    how = {"lane": lambda item: item[0], "threads": 3}
    done = []

    def work(item):
        if item[1]:
            together.wait()
        done.append(item)

    with BackgroundWorkers(work, size, 1000, **how) as workers:
        for item in [(lane, number) for number in range(3) for lane in range(3)]:
            workers.put(item)
    assert len(done) == 9


def test_the_error_of_the_first_item_is_raised():
    together = threading.Barrier(3, timeout=60)
    how = {"lane": lambda item: item[0], "threads": 3}
    ended = [threading.Event() for _ in range(3)]

    def work(item):
        lane, is_failing = item
        if is_failing:
            together.wait()
            if lane < 2:
                # The last one fails first.
                assert ended[lane + 1].wait(60)
            ended[lane].set()
            raise KeyError(lane)

    def put_many():
        with BackgroundWorkers(work, size, 1000, **how) as workers:
            for item in [(lane, is_failing) for is_failing in (0, 1) for lane in range(3)]:
                workers.put(item)

    with pytest.raises(KeyError, match="0"):
        put_many()
    assert no_thread_is_left()


@pytest.mark.parametrize("there", [0, 2])
def test_thread_that_fails_to_start_leaves_no_state(monkeypatch, there):
    start, started = threading.Thread.start, []

    def refused(self):
        if len(started) == there:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    def put_one_a_lane():
        how = {"lane": lambda item: item[0], "threads": 3}
        with BackgroundWorkers(lambda item: None, size, 10, **how) as workers:
            for lane in range(3):
                workers.put((lane, 1))

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="start new thread"):
            put_one_a_lane()
    assert not any(thread.is_alive() for thread in started)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with BackgroundWorkers(lambda item: None, size, 10):
            pass
        found = []
        later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert found == [2]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_pass_on_the_cpu_leaves_a_gpu_alone(monkeypatch, kind):
    # To ask which CUDA device is the current one takes it into use; a Mac's can't be asked.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: kind == "cuda")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: kind == "mps")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("it was asked for"))
    done = []
    with BackgroundWorkers(done.append, lambda item: 1, 10, torch.device("cpu")) as workers:
        workers.put(0)
    assert done == [0]
