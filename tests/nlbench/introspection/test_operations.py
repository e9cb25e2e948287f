"""The registry of operations, and what plugins add."""

import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import nlbench
from nlbench.errors import PluginError, RequestError
from nlbench.introspection import operations as ops
from nlbench.introspection.operations import registry
from nlbench.introspection.operations.listing import page, supported
from nlbench.probes.sites import list_sites

_numbers = itertools.count()


def fresh(prefix):
    """Return a name that no other test registers."""
    return f"{prefix}{next(_numbers)}"


def custom_op(function):
    """Define an operation of torch.library that computes a function of one tensor."""
    name = fresh("op")

    @torch.library.custom_op(f"nlbench_tests::{name}", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return function(x)

    return op, name


def autograd_function(function):
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return function(x)

        @staticmethod
        def backward(ctx, gradient):
            return 3 * gradient

    Own.__qualname__ = fresh("Own")
    return Own


class Watching(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(ops.qualified_name(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("func", "name"),
    [
        (torch.relu, "relu"),
        (torch.Tensor.relu_, "relu"),
        (nn.functional.relu, "relu"),
        (torch.ops.aten.relu_.default, "relu"),
        (torch.ops.aten.relu, "relu"),
        (torch.Tensor.__rsub__, "rsub"),
        (torch.ops.aten._softmax.default, "_softmax"),
    ],
)
def test_an_operation_has_one_name(func, name):
    assert ops.qualified_name(func) == name


def test_an_operation_of_another_library_is_another_one():
    @torch.library.custom_op("nlbench_tests::relu", mutates_args=())
    def relu(x: torch.Tensor) -> torch.Tensor:
        return -x

    assert ops.qualified_name(relu._opoverload) == "nlbench_tests::relu"
    assert not ops.operation(torch.ops.nlbench_tests.relu).sources
    assert ops.operation(torch.relu).kind == "relu"


def test_second_rule_is_refused_and_both_are_named():
    name = fresh("rule")

    @ops.line_rule(name)
    def first(call):
        return None

    with pytest.raises(PluginError):

        @ops.line_rule(name)
        def second(call):
            return None

    ops.graph_rule(name)(first)
    with pytest.raises(PluginError):
        ops.graph_rule(name)(len)


def test_the_same_registration_is_accepted_twice():
    op, _ = custom_op(torch.abs)
    first = nlbench.register_op(op, kind="hat", kinks=(0,))
    assert nlbench.register_op(op, kind="hat", kinks=[0.0]) is first
    with pytest.raises(PluginError):
        nlbench.register_op(op, kinks=(0, 1))
    with pytest.raises(PluginError):
        nlbench.register_op(op, kind="cap")


def test_an_operation_has_one_entry():
    op, name = custom_op(torch.abs)
    ops.graph_rule(f"nlbench_tests::{name}", caveat="of images only")(len)
    found = nlbench.register_op(op, kind="hat", kinks=(0,))
    assert found is ops.operation(getattr(torch.ops.nlbench_tests, name))
    assert (found.kind, found.kinks, found.graph) == ("hat", (0.0,), len)
    row = next(row for row in supported() if row["operation"] == found.name)
    assert (row["kind"], row["lines"], row["graph"]) == ("hat", "bends at 0", "followed")
    assert row["caveats"] == "graph: of images only"
    assert f"register_op(nlbench_tests::{name})" in row["from"]


@pytest.mark.parametrize("style", ["before", "after"])
def test_an_autograd_function_is_one_call(style):
    Own = autograd_function(torch.abs)
    apply = Own.apply if style == "before" else None
    nlbench.register_op(Own, kind="hat", kinks=(0,))
    nlbench.register_op(Own, kind="hat", kinks=(0,))
    x = torch.tensor([-2.0])
    with Watching() as watching:
        y = (apply or Own.apply)(x)
    assert y.item() == 2
    assert watching.seen == [ops.qualified_name(Own)]
    assert ops.known(watching.seen[0]).kind == "hat"


def test_registration_leaves_values_and_derivatives():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(x, factor=2.0):
            return x * factor

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.factor = inputs[1]

        @staticmethod
        def backward(ctx, gradient):
            return 10 * ctx.factor * gradient, None

    for function in (autograd_function(torch.abs), Scaled):
        x = torch.tensor([-2.0], requires_grad=True)
        before = function.apply(x)
        (slope,) = torch.autograd.grad(before, x)
        nlbench.register_op(function, kinks=())
        after = function.apply(x)
        assert torch.equal(before, after)
        assert torch.equal(torch.autograd.grad(after, x)[0], slope)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kinks": ("a",)}, "has kinks ('a',), expected numbers"),
        ({"kinks": 3}, "has kinks 3, expected numbers"),
        ({"kinks": (float("nan"),)}, "expected finite numbers"),
        ({"kinks": (0,), "line": len}, "both kinks and a line rule given"),
        ({"acts": "turns"}, "has acts='turns', expected one of keeps, affine, sums, bends"),
        ({"speed": "high"}, "has no 'speed', expected one of acts, arranges"),
    ],
)
def test_a_bad_registration_is_refused_in_one_line(arguments, message):
    op, _ = custom_op(torch.abs)
    with pytest.raises(RequestError) as caught:
        nlbench.register_op(op, **arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize("function", [len, lambda x: x, nn.ReLU, 3])
def test_unsupported_registration_is_refused(function):
    with pytest.raises(RequestError):
        nlbench.register_op(function, kind="hat")


def test_a_plugin_that_fails_to_load_is_reported(monkeypatch):
    class Point:
        name, value, dist = "mine", "mine.ops", None

        def load(self):
            raise ImportError("no module named mine")

    monkeypatch.setattr(registry, "_PLUGINS", registry._PluginLoader())
    monkeypatch.setattr(registry, "entry_points", lambda group: [Point()])
    assert ops.known("relu").kind == "relu"
    assert ops.load_errors() == (
        "operations 'mine' of mine.ops are missing: ImportError: no module named mine",
    )


def test_a_plugin_may_name_a_function_that_registers(monkeypatch):
    name = fresh("plugged")

    class Point:
        name, value, dist = "mine", "mine:register", None

        def load(self):
            return lambda: ops.activation("hat", "plugged_by_a_function", modules=(nn.Fold,))

    monkeypatch.setattr(registry, "_OPERATIONS", dict(registry._OPERATIONS))
    monkeypatch.setattr(registry, "_PLUGINS", registry._PluginLoader())
    monkeypatch.setattr(registry, "entry_points", lambda group: [Point()])
    assert ops.known("plugged_by_a_function").kind == "hat"
    assert nn.Fold in ops.named_modules()
    assert not ops.known(name).sources


def test_each_fact_registers_once():
    op, _ = custom_op(torch.abs)
    facts = {aspect: next(iter(values)) for aspect, values in registry.FACTS.items()}
    entry = nlbench.register_op(op, kind="hat", gates=True, **facts)
    assert entry.gates
    assert {aspect: getattr(entry, aspect) for aspect in facts} == facts
    with pytest.raises(PluginError):
        nlbench.register_op(op, takes="number")


def test_registered_product_makes_a_gate():
    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return x * y

    nlbench.register_op(Times, combines="product")

    class Network(nn.Module):
        def forward(self, x):
            return Times.apply(torch.sigmoid(F.linear(x, torch.ones(2, 2))), x)

    (site,) = list_sites(Network(), torch.randn(3, 2))
    assert site.role == "gate"


def test_the_page_of_the_documentation_is_current():
    path = Path(__file__).parents[3] / "docs" / "operations.md"
    assert path.read_text(encoding="utf-8") == page(), (
        "write it: python -m nlbench.introspection.operations.listing > docs/operations.md"
    )


def test_the_listing_agrees_with_the_registry():
    rows = {row["operation"]: row["lines"] for row in supported()}
    assert rows["relu"] == "bends at 0"
    assert rows["linear"] == "affine"
    assert rows["exp"] == "refused: not piecewise affine"
    for name, lines in rows.items():
        says_so = lines.startswith("bends") or lines == "affine"
        assert ops.known(name).traced == says_so


def test_axes_of_a_registered_operation_are_followed():
    class Turned(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.permute(0, 3, 1, 2).clone()

    nlbench.register_op(Turned, axes=lambda args, kwargs, source, output: [0, 2, 3, 1])

    class Network(nn.Module):
        def forward(self, x):
            return F.relu(Turned.apply(F.linear(x, torch.ones(5, 2))))

    (site,) = list_sites(Network(), torch.randn(3, 4, 6, 2))
    assert (site.shape, site.channel_axis, site.assumed) == ((5, 4, 6), 1, False)
