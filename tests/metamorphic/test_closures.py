"""A network whose hooks and functions refer to it by a variable has the values of one without."""

import weakref
from functools import partial
from types import MethodType

import pytest
import torch
from torch import nn

import nlbench
from nlbench.introspection.model_copy import double_copy, rebound_copy

MEASURES = ["density", "absdev", "length-distortion", "nlc", "pathlength"]


class Plain(nn.Module):
    kept = None

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.last = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.rand(8))

    def features(self, h):
        return h

    def forward(self, x):
        h = self.act(self.first(x))
        return self.last((h + self.features(h)) * self.scale)


class Keeping(Plain):
    """Reads what a hook has written into its attributes."""

    def features(self, h):
        return self.kept


def by_closure():
    model = Keeping()
    model.act.register_forward_hook(lambda module, args, output: setattr(model, "kept", output))
    return model


def by_list():
    model = Keeping()
    owners = [model]

    def keep(module, args, output):
        owners[0].kept = output

    model.act.register_forward_hook(keep)
    return model


def by_nested_function():
    model = Keeping()

    def write(value):
        model.kept = value

    model.act.register_forward_hook(lambda module, args, output: write(output))
    return model


def by_partial():
    model = Keeping()
    model.act.register_forward_hook(partial(keep_in, model))
    return model


def keep_in(model, module, args, output):
    model.kept = output


NETWORK = None


def by_global():
    global NETWORK
    NETWORK = Keeping()
    NETWORK.act.register_forward_hook(keep_globally)
    return NETWORK


def keep_globally(module, args, output):
    NETWORK.kept = output


def by_method():
    model = Keeping()

    def forward(self, x):
        model.kept = torch.relu(x)
        return model.kept

    model.act.forward = MethodType(forward, model.act)
    return model


def by_function():
    model = Keeping()
    first = model.first.forward

    def forward(x):
        h = first(x)
        model.kept = h.relu()
        return h

    model.first.forward = forward
    return model


class Owner:
    def __init__(self, model):
        self.parts = {"model": [model]}


def by_owner():
    model = Keeping()
    owner = Owner(model)

    def keep(module, args, output):
        owner.parts["model"][0].kept = output

    model.act.register_forward_hook(keep)
    return model


def by_own_owner():
    model = by_owner()
    (hook,) = model.act._forward_hooks.values()
    model.owner = hook.__closure__[0].cell_contents
    return model


def by_weak_reference():
    model = Keeping()
    reference = weakref.ref(model)
    model.act.register_forward_hook(lambda *call: setattr(reference(), "kept", call[2]))
    return model


KINDS = [
    by_closure, by_list, by_nested_function, by_partial, by_global, by_method, by_function,
    by_owner, by_own_owner, by_weak_reference,
]  # fmt: skip


def results(model):
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    settings = {"lines.number": 2}
    run = nlbench.evaluate(model, x, MEASURES, settings=settings, errors="none")
    return {record.measure.name: record.result for record in run.records}


@pytest.fixture(scope="module")
def plain():
    return results(Plain())


@pytest.mark.parametrize(
    ("make", "is_run"),
    # The other kinds are copied in the same way, which the test below compares.
    [(by_closure, False), (by_global, True), (by_method, False), (by_owner, True)],
)
def test_variables_of_hooks_change_no_number(plain, make, is_run):
    model = make().eval()
    if is_run:
        model(torch.randn(1, 4))
    for name, result in results(model).items():
        assert result.status == "ok", (name, result.reason)
        assert result.summary["value"] == pytest.approx(plain[name].summary["value"], rel=1e-6)


@pytest.mark.parametrize("make", KINDS)
def test_a_copy_leaves_the_original_alone(make):
    model = make().eval()
    twin = double_copy(model)
    twin.scale.data.zero_()
    assert twin(torch.ones(1, 4)).equal(twin.last.bias.double()[None])
    assert model.kept is None


def test_functions_that_share_a_variable_still_do():
    model, kept = Plain(), {}
    model.first.register_forward_hook(lambda module, args, output: kept.update(h=output))
    model.act.register_forward_hook(lambda *_: kept["h"] * model.scale)
    x = torch.ones(2, 4)
    assert torch.equal(rebound_copy(model)(x), model(x))


NETWORKS = {}


def by_global_dictionary():
    NETWORKS["one"] = Keeping()
    NETWORKS["one"].act.register_forward_hook(keep_in_dictionary)
    return NETWORKS["one"]


def keep_in_dictionary(module, args, output):
    NETWORKS["one"].kept = output


class Reading(Plain):
    """Reads a feature of the network in a global dictionary, not of its own."""

    def features(self, h):
        self.kept = h
        return NETWORKS["one"].kept


def by_reading():
    NETWORKS["one"] = Reading()
    return NETWORKS["one"]


@pytest.mark.parametrize(("make", "is_run"), [(by_global_dictionary, True), (by_reading, False)])
def test_a_copy_that_computes_otherwise_is_undefined(plain, make, is_run):
    model = make().eval()
    if is_run:
        model(torch.randn(1, 4))
    found = results(model)
    for name in ("density", "absdev", "length-distortion"):
        assert found[name].status == "undefined", (name, found[name].reason)
        assert "copy" in found[name].reason
    assert found["nlc"].summary["value"] == pytest.approx(plain["nlc"].summary["value"], rel=1e-6)
    x = torch.randn(1, 4)
    assert torch.equal(model(x), Plain()(x))
