"""The container in which a model keeps its constants changes no number, and is left as it was."""

import copy
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from types import MappingProxyType, SimpleNamespace

import pandas as pd
import pytest
import torch
from torch import nn

import nlbench
from nlbench.introspection.model_state import preserve_attributes
from nlbench.registry import expand

MEASURES = expand("measures", ["*"])
CONSTANTS = {"width": 6, "slope": 0.5}


class Frozen(OrderedDict):
    """Refuses every change after it was built, as configurations of transformers' kind do."""

    def __init__(self, items):
        super().__init__(items)
        self._is_frozen = True

    def _refuse(self, *args, **kwargs):
        raise TypeError("this mapping is read-only")

    def __setitem__(self, key, value):
        if getattr(self, "_is_frozen", False):
            self._refuse()
        super().__setitem__(key, value)

    __delitem__ = pop = popitem = setdefault = update = clear = _refuse


class FrozenDict(dict):
    def _refuse(self, *args, **kwargs):
        raise TypeError("this mapping is read-only")

    __setitem__ = __delitem__ = pop = popitem = setdefault = update = clear = _refuse


class FrozenList(list):
    def _refuse(self, *args, **kwargs):
        raise TypeError("this list is read-only")

    append = extend = insert = pop = remove = clear = __setitem__ = __delitem__ = _refuse


class Lower(dict):
    """Converts its keys, so that a refill by its own methods would change it."""

    def __setitem__(self, key, value):
        super().__setitem__(key + "!", value)


CONTAINERS = {
    "dict": dict(CONSTANTS),
    "ordered": OrderedDict(CONSTANTS),
    "frozen ordered": Frozen(CONSTANTS),
    "frozen": FrozenDict(CONSTANTS),
    "converting": Lower(CONSTANTS),
    "default": defaultdict(int, CONSTANTS),
    "counter": Counter(CONSTANTS),
    "proxy": MappingProxyType(CONSTANTS),
    "user": UserDict(CONSTANTS),
    "list": list(CONSTANTS.values()),
    "frozen list": FrozenList(CONSTANTS.values()),
    "tuple": tuple(CONSTANTS.values()),
    "deque": deque(CONSTANTS.values(), maxlen=2),
    "set": {6, 0.5},
    "frozenset": frozenset({6, 0.5}),
    "namespace": SimpleNamespace(**CONSTANTS),
}


class Net(nn.Module):
    def __init__(self, config):
        super().__init__()
        torch.manual_seed(0)
        self.config = config
        self.first, self.act, self.last = nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)

    def forward(self, x):
        return self.last(self.act(self.first(x)))


def scores(model):
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    settings = {"lines.paths": "pairs", "lines.number": 1}
    labels = torch.arange(32) % 2
    run = nlbench.evaluate(model, inputs, MEASURES, labels=labels, settings=settings, errors="none")
    return run.scores[["measure", "place", "statistic", "value", "status", "reason"]]


def content(container):
    if isinstance(container, SimpleNamespace):
        return vars(container).copy()
    return list(container.items()) if hasattr(container, "items") else list(container)


def test_containers_change_no_measure():
    model = Net(None)
    for kind, container in CONTAINERS.items():
        setattr(model, f"config of {kind}", container)
    before = [(repr(container), content(container)) for container in CONTAINERS.values()]
    pd.testing.assert_frame_equal(scores(model), scores(Net(None)))
    for (kind, container), (text, items) in zip(CONTAINERS.items(), before, strict=True):
        assert getattr(model, f"config of {kind}") is container
        assert (repr(container), content(container)) == (text, items)


@pytest.mark.parametrize("kind", ["dict", "ordered", "default", "list", "deque", "set"])
def test_a_container_that_changes_is_restored(kind):
    container = CONTAINERS[kind].copy()
    before, text = content(container), repr(container)
    model = Net(container)
    with preserve_attributes(model):
        if isinstance(container, dict):
            container["call"] = container.pop("width")
        elif isinstance(container, set):
            container.add(7)
        else:
            container.append(7)
        assert content(container) != before
    assert model.config is container
    assert content(container) == before
    assert repr(container) == text


@pytest.mark.parametrize("kind", ["frozen ordered", "frozen", "converting", "frozen list"])
def test_containers_that_refuse_changes_are_restored(kind):
    container = copy.copy(CONTAINERS[kind]) if kind == "converting" else CONTAINERS[kind]
    before = content(container)
    base = next(b for b in (OrderedDict, dict, list) if isinstance(container, b))
    with preserve_attributes(Net(container)):
        base.clear(container)
    assert content(container) == before
