import _thread
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs import record_checked_program, trace_program

from nlbench.introspection.model_copy import double_copy
from nlbench.introspection.threads import torch_threads
from nlbench.probes.lines import trace_segments
from nlbench.probes.lines.exact.tasks import run_tasks


@pytest.fixture
def threads_before():
    """Return the running threads, which may include some of other tests, such as a cluster's."""
    return set(threading.enumerate())


def split(limit, finished=None):
    def work(interval):
        a, b = interval
        if b - a > limit:
            middle = (a + b) // 2
            return [(a, middle), (middle, b)]
        if finished is not None:
            finished.append(interval)
        return []

    return work


def run(first, work, threads, stopped=None):
    run_tasks(first, work, threads, lambda task: 0, stopped or threading.Event())


@given(st.integers(1, 400), st.integers(1, 9), st.integers(1, 4))
def test_each_task_runs_once(size, limit, threads):
    intervals = []
    run([(0, size)], split(limit, intervals), threads)
    intervals.sort()
    assert [a for a, _ in intervals] == [0, *(b for _, b in intervals[:-1])]
    assert intervals[-1][1] == size


def test_the_latest_task_runs_first():
    order = []

    def work(interval):
        order.append(interval)
        return split(1)(interval)

    run([(0, 4)], work, 1)
    assert order == [(0, 4), (0, 2), (0, 1), (1, 2), (2, 4), (2, 3), (3, 4)]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_errors_in_a_task_end_the_others(threads, threads_before):
    def work(interval):
        if interval == (96, 97):
            raise KeyError("here")
        return split(1)(interval)

    with pytest.raises(KeyError):
        run([(0, 1000)], work, threads)
    assert set(threading.enumerate()) <= threads_before


def test_an_error_stops_long_tasks(threads_before):
    stopped, both = threading.Event(), threading.Barrier(2)

    def work(number):
        both.wait(60)
        if number == 0:
            raise KeyError("here")
        assert stopped.wait(60)
        return [2, 3]

    with pytest.raises(KeyError):
        run([0, 1], work, 2, stopped)
    assert set(threading.enumerate()) <= threads_before


def test_an_interrupt_of_the_caller_ends_all_threads(two_threads, threads_before):
    stopped, ended = threading.Event(), []

    def work(number):
        if number == 0:
            _thread.interrupt_main()
        assert stopped.wait(60)
        ended.append(number)
        return [2, 3]

    with pytest.raises(KeyboardInterrupt):
        run([0, 1], work, 2, stopped)
    assert set(ended) <= {0, 1}
    assert set(threading.enumerate()) <= threads_before
    assert torch.get_num_threads() == two_threads


@pytest.mark.parametrize("threads", [1, 2])
def test_an_interrupt_in_a_task_is_raised(threads, threads_before):
    def work(number):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([0, 1], work, threads)
    assert set(threading.enumerate()) <= threads_before


def test_a_stopped_trace_leaves_no_thread(two_threads, threads_before):
    torch.manual_seed(0)
    net = double_copy(torch.nn.Sequential(torch.nn.Linear(3, 50), torch.nn.ReLU()))
    ends = torch.randn(20, 2, 3, dtype=torch.float64)
    traces = trace_segments(net, *ends.unbind(1))
    assert next(traces).regions > 4
    traces.close()
    assert set(threading.enumerate()) <= threads_before
    assert torch.get_num_threads() == two_threads


def test_torch_threads_are_restored_on_error(two_threads):
    def fail():
        with torch_threads(1):
            assert torch.get_num_threads() == 1
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.get_num_threads() == two_threads


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 3])
def test_torch_threads_are_restored(threads, two_threads):
    seen = []

    def work(interval):
        seen.append(torch.get_num_threads())
        return split(1)(interval)

    run([(0, 50)], work, threads)
    assert torch.get_num_threads() == two_threads
    assert set(seen) == ({two_threads} if threads == 1 else {1})
    fresh = []
    thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert fresh == [two_threads]


def test_threads_change_no_bit_of_traces():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.AvgPool2d(2),
        torch.nn.Conv2d(8, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 64, 10),
    )
    start, end = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    program = record_checked_program(double_copy(model), torch.stack([start, end]))
    before = torch.get_num_threads()
    try:
        traces = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            traces.append(trace_program(program, start, end, limit=20))
    finally:
        torch.set_num_threads(before)
    assert traces[0].regions > 200
    for trace in traces[1:]:
        assert torch.equal(trace.t, traces[0].t)
        assert torch.equal(trace.values, traces[0].values)
        assert torch.equal(trace.origins, traces[0].origins)
