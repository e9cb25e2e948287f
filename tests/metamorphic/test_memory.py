"""A network that remembers outputs has the values of one that doesn't, or none."""

from functools import lru_cache, partial

import pytest
import torch
from torch import nn

import nlbench
from nlbench.introspection.batch_independence import RemembersOutputs, check_memory
from nlbench.introspection.model_output import validated_outputs

MEASURES = [
    "affinity", "r2", "accuracy", "substitution", "absdev", "density", "length-distortion", "nlc",
    "affine-residual", "local-linearity",
]  # fmt: skip


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.last = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.act(self.first(x)))


class ByShape(Plain):
    """Keeps its outputs in a dictionary on the module."""

    def __init__(self):
        super().__init__()
        self.memory = {}

    def forward(self, x):
        key = self.key(x)
        if key not in self.memory:
            self.memory[key] = super().forward(x)
        return self.memory[key]

    def key(self, x):
        return x.shape


class ByAddress(ByShape):
    def key(self, x):
        return x.data_ptr()


class ByMean(ByShape):
    def key(self, x):
        return x.shape, round(float(x.mean()), 1)


class ByContent(ByShape):
    """Right, whatever it was asked before."""

    def key(self, x):
        return x.dtype, x.detach().numpy().tobytes()


class ByLastShape(Plain):
    kept = None

    def forward(self, x):
        if self.kept is None or self.kept.shape[:1] != x.shape[:1]:
            self.kept = super().forward(x)
        return self.kept


class ByCachedCall(Plain):
    def __init__(self):
        super().__init__()
        self.recall = lru_cache(lambda shape: [])

    def forward(self, x):
        memory = self.recall((id(self), *x.shape))
        if not memory:
            memory.append(super().forward(x))
        return memory[0]


class FirstLayerOnly(Plain):
    """Remembers a hidden layer in a closure, and adds the input to the output."""

    def __init__(self):
        super().__init__()
        memory = {}

        def recall(x):
            return memory.setdefault((x.shape, x.dtype), self.first(x))

        self.recall = recall

    def forward(self, x):
        return self.last(self.act(self.recall(x))) + x[:, :3]


KINDS = [ByShape, ByAddress, ByMean, ByLastShape, ByCachedCall, FirstLayerOnly]


def _results(model):
    inputs = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    return nlbench.evaluate(
        model,
        inputs,
        MEASURES,
        labels=torch.arange(48) % 3,
        settings={"lines.number": 1},
        errors="none",
    )


@pytest.mark.parametrize(
    ("kind", "is_used"), [(kind, number % 2 == 1) for number, kind in enumerate(KINDS)]
)
def test_a_network_that_remembers_has_no_values(kind, is_used):
    model = kind()
    if is_used:
        model(torch.ones(2, 4))
        model(torch.ones(1, 4))
    results = _results(model)
    for name in MEASURES:
        assert results[name].status == "undefined", name
        assert "the inputs before it" in results[name].reason, name


class ByBuffer(ByShape):
    """Has another batch's output for the first tensor of four samples that it sees."""

    seen = 0

    def key(self, x):
        if len(x) == 4 and not self.seen:
            self.seen = x.data_ptr()
        return "seen" if x.data_ptr() == self.seen else tuple(x.flatten().tolist())


def test_output_kept_for_other_sample_count_is_found():
    model = ByBuffer()
    model.memory["seen"] = torch.zeros(2, 3)
    rows = partial(_output_of, model)
    with pytest.raises(RemembersOutputs):
        check_memory(rows, torch.randn(8, 4))


def _output_of(model, samples):
    return validated_outputs(model(samples), len(samples))


def test_memory_by_content_changes_no_value():
    plain, kept = _results(Plain()), _results(ByContent())
    for name in MEASURES:
        if kept[name].status == "ok":
            expected = plain[name].summary["value"]
            assert kept[name].summary["value"] == pytest.approx(expected, rel=1e-3), name
        assert "the inputs before it" not in kept[name].reason


class Training(Plain):
    """Has a hook that puts a module of the network into training mode."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout()
        self.first.register_forward_pre_hook(self._train)

    def _train(self, module, inputs):
        self.drop.train()

    def forward(self, x):
        return self.drop(super().forward(x))


class Counting(Plain):
    """Adds the number of its calls to the output."""

    calls = []  # noqa: RUF012

    def forward(self, x):
        self.calls.append(len(x))
        return super().forward(x) + len(self.calls)


@pytest.mark.parametrize("kind", [Training, Counting])
def test_changes_from_call_to_call_have_a_remark(kind):
    results = _results(kind())
    for name in MEASURES:
        assert "changes from call to call" in results[name].reason, name


def several_outputs(model):
    """Make a network return tensors of which none is the output."""
    model.register_forward_hook(lambda module, args, output: {"a": output, "b": [output * 2]})
    return model


def test_memory_is_found_in_several_outputs():
    results = _results(several_outputs(ByShape()))
    assert "the inputs before it" in results["r2"].reason


@pytest.mark.parametrize("lists", [False, True])
def test_several_outputs_change_no_value_of_activations(lists):
    model = several_outputs(Plain())
    if lists:
        model.register_forward_hook(lambda module, args, output: [{"one": x} for x in output["a"]])
    expected, results = _results(Plain()), _results(model)
    for name in ("affinity", "r2"):
        assert results[name].summary == expected[name].summary
