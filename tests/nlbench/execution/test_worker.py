import threading
from types import SimpleNamespace

import pytest

from nlbench.execution import worker
from nlbench.execution.worker import CellTimeout, Messenger


class Wire:
    """What a supervisor would be sent."""

    def __init__(self):
        self.messages = []

    def send_bytes(self, message):
        self.messages.append(worker.json.loads(message))


@pytest.fixture
def now(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def new_messenger(wire, timeout):
    sites = SimpleNamespace(name="sites")
    cells = [SimpleNamespace(measure=SimpleNamespace(name=n), probe=sites) for n in ("a", "b")]
    messenger = Messenger(wire, SimpleNamespace(cells=cells), timeout)
    messenger.observing("sites")
    wire.messages.clear()
    return messenger


class Hand(threading.Thread):
    """A thread that does what it is messenger, one thing at a time."""

    def __init__(self):
        super().__init__(daemon=True)
        self._orders, self._answers = worker.queue.SimpleQueue(), worker.queue.SimpleQueue()
        self.start()

    def run(self):
        while True:
            order, args = self._orders.get()
            try:
                self._answers.put(order(*args))
            except CellTimeout as error:
                self._answers.put(error)

    def __call__(self, order, *args):
        self._orders.put((order, args))
        return self._answers.get(timeout=60)


def test_concurrent_threads_are_charged_once(now):
    wire = Wire()
    messenger, first, second = new_messenger(wire, 100.0), Hand(), Hand()
    now[0] += 3  # the network
    first(messenger.enter, "a")
    now[0] += 1
    second(messenger.enter, "a")
    now[0] += 10
    first(messenger.leave)
    first(messenger.enter, "b")
    now[0] += 20
    second(messenger.leave)
    now[0] += 5
    first(messenger.leave)
    phases = [(one["phase"], one["measure"], one["spent"]) for one in wire.messages]
    assert phases == [
        ("measuring", "a", 3),
        ("measuring", "a", 4),
        ("measuring", "a", 14),
        # Of both that are at work the one that has taken longer.
        ("measuring", "a", 14),
        ("measuring", "b", 23),
        ("observing", "", 3),
    ]


def test_timeout_is_raised_in_the_measures_thread(now):
    messenger, first, second = new_messenger(Wire(), 5.0), Hand(), Hand()
    first(messenger.enter, "a")
    now[0] += 4
    second(messenger.enter, "b")
    now[0] += 2
    assert isinstance(first(messenger.leave), CellTimeout)
    assert second(messenger.leave) is None
