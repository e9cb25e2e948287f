"""Networks that call activations inside `torch.vmap`."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from nlbench import evaluate


def perceptron():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


class StackedState(nn.Module):
    """An ensemble whose members' weights are stacked, as in PyTorch's tutorial on ensembles."""

    def __init__(self):
        super().__init__()
        self.member = perceptron()
        weights, _ = stack_module_state([perceptron() for _ in range(3)])
        self.names = list(weights)
        self.weights = nn.ParameterList(weights.values())

    def forward(self, x):
        def run_member(weights):
            return functional_call(self.member, weights, (x,))

        return vmap(run_member)(dict(zip(self.names, self.weights, strict=True))).mean(0)


class MappedRows(nn.Module):
    """A network written for one sample."""

    def __init__(self):
        super().__init__()
        self.network = perceptron()

    def forward(self, x):
        return vmap(self.network)(x)


class MappedSquare(nn.Module):
    """As many channels as samples: their axis could be taken for the batch."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.after(vmap(torch.relu)(self.before(x)))


class MappedTable(nn.Module):
    """A mask made by `vmap` outside the data's path, as in attention masks."""

    def __init__(self):
        super().__init__()
        self.network = perceptron()

    def forward(self, x):
        steps = torch.arange(6)
        mask = vmap(lambda step: step >= 0)(steps)
        return self.network(x * mask)


@pytest.mark.parametrize("network", [StackedState, MappedRows, MappedSquare])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"sites.of": "modules:*"},
        {"sites.attention": True},
        {"replacement.of": "activations"},
        {"replacement.of": "modules:*"},
    ],
)
def test_activations_inside_vmap_are_undefined(network, settings):
    torch.manual_seed(0)
    site_measures = "r2,sparsity,naswot,linearity,length-distortion,local-complexity"
    measures = "substitution" if "replacement.of" in settings else site_measures
    if "sites.of" in settings:
        measures = "r2,linearity"
    labels = torch.arange(16) % 3
    run = evaluate(network(), torch.randn(16, 6), measures, labels=labels, settings=settings)
    has_modules_outside = network is MappedSquare and "modules:*" in settings.values()
    for record in run.records:
        if not has_modules_outside:
            assert record.result.status == "undefined"
            assert "torch.vmap" in record.result.reason or "batch axis" in record.result.reason
        assert record.result.status != "failed", record.result.reason


def test_vmapped_mask_changes_no_value():
    torch.manual_seed(0)
    model, x = MappedTable(), torch.randn(16, 6)
    masked, plain = (evaluate(m, x, "r2,sparsity").records for m in (model, model.network))
    assert [r.result.summary for r in masked] == [r.result.summary for r in plain]
