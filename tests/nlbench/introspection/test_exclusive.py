"""One measurement at a time in a process."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import nlbench
from nlbench.introspection.attention import without_fast_path
from nlbench.introspection.model_state import evaluation_mode
from nlbench.introspection.precision import exact_arithmetic, exact_by_default
from nlbench.introspection.process_state import restored_process_state
from nlbench.introspection.threads import measurement_thread, one_measurement
from nlbench.probes.graph.graph_observation import channel_graph
from nlbench.probes.lines import trace_segment
from nlbench.probes.sites.sites_observation import list_sites

X = torch.linspace(-1, 1, 32).reshape(8, 4)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def nothing(context):
    with context:
        pass


DOORS = {
    "evaluate": lambda: nlbench.evaluate(network(), X, ["norm"]),
    "Monitor": lambda: nlbench.Monitor(network(), X, ["norm"], every=1).step(),
    "list_sites": lambda: list_sites(network(), X),
    "channel_graph": lambda: channel_graph(network(), X[:1]),
    "trace_segment": lambda: trace_segment(network(), X[0], X[1]),
    "evaluation_mode": lambda: nothing(evaluation_mode(network())),
    "exact_arithmetic": lambda: nothing(exact_arithmetic()),
    "exact_by_default": lambda: nothing(exact_by_default()),
    "restored_process_state": lambda: nothing(restored_process_state()),
}


@pytest.mark.parametrize("door", DOORS)
def test_second_thread_waits_at_every_entry_point(door):
    is_held = threading.Event()
    order = []

    def enter():
        is_held.wait(60)
        DOORS[door]()
        order.append("second")

    thread = threading.Thread(target=enter)
    thread.start()
    with one_measurement():
        DOORS[door]()  # The same thread does not wait.
        is_held.set()
        thread.join(0.2)
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"]


def test_an_error_releases_other_threads():
    with pytest.raises(KeyError), one_measurement():
        raise KeyError
    with ThreadPoolExecutor(1) as pool:
        pool.submit(DOORS["list_sites"]).result(60)


def test_threads_of_measurement_do_not_wait_for_it():
    done = []
    with one_measurement():
        threads = [measurement_thread(lambda: done.append(DOORS["list_sites"]())) for _ in range(2)]
        for thread in threads:
            thread.start()
            thread.join(60)
    assert len(done) == 2


class Nested(nlbench.Measure):
    """Observes a network of its own, in whichever thread the sites are measured."""

    probe = "sites"
    independent_sites = True

    def reset(self):
        self.count = 0

    def update(self, observation):
        self.count = len(list_sites(network(), X))

    def compute(self):
        return nlbench.Result({"value": float(self.count)}, n=1)


def test_measure_in_worker_thread_may_observe_network():
    run = nlbench.evaluate(network(), X.repeat(8, 1), [Nested], settings={"sites.batch": 16})
    assert run["nested"].summary["value"] == 1.0


def test_settings_of_two_threads_are_restored():
    with ThreadPoolExecutor(4) as pool:
        seen = list(pool.map(lambda _: fast_path_inside(), range(20)))
    assert not any(seen)
    assert torch.backends.mha.get_fastpath_enabled()


def fast_path_inside():
    with one_measurement(), without_fast_path():
        return torch.backends.mha.get_fastpath_enabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_process_ignores_locks_of_lost_threads():
    is_held, is_over = threading.Event(), threading.Event()

    def hold():
        with one_measurement():
            is_held.set()
            is_over.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait(60)
    child = os.fork()
    if child == 0:
        entered = threading.Thread(target=lambda: nothing(one_measurement()), daemon=True)
        entered.start()
        entered.join(10)
        os._exit(int(entered.is_alive()))
    _, status = os.waitpid(child, 0)
    is_over.set()
    thread.join()
    assert status == 0
