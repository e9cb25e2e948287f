"""A network whose forward pass takes derivatives has the values of one that doesn't, or none."""

import pytest
import torch
from torch import nn

import nlbench

MEASURES = ["absdev", "density", "length-distortion", "r2", "cka", "substitution", "nlc"]


class Plain(nn.Module):
    """Adds the gradient of an energy to the output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.last = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)

    def gradient(self, x):
        return 2 * self.first(x).relu() @ self.first.weight

    def energy(self, x):
        return self.first(x).relu().square().sum()

    def forward(self, x):
        return self.last(self.act(self.first(x))) + self.gradient(x)


class ByAutograd(Plain):
    def gradient(self, x):
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(leaf), leaf)[0]


class ByTransform(Plain):
    def gradient(self, x):
        return torch.func.grad(self.energy)(x)


class InsideTransform(Plain):
    def forward(self, x):
        return torch.func.jvp(super().forward, (x,), (torch.zeros_like(x),))[0]


def results(model):
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    run = nlbench.evaluate(model, x, MEASURES, settings={"lines.number": 1}, errors="none")
    return {record.measure.name: record.result for record in run.records}


@pytest.fixture(scope="module")
def plain():
    return results(Plain())


@pytest.mark.parametrize("kind", [ByAutograd, ByTransform, InsideTransform])
def test_derivatives_inside_give_equal_values_or_none(plain, kind):
    found = results(kind())
    assert found["absdev"].status == "ok"
    for name in ("absdev", "nlc"):
        if found[name].status == "ok":
            expected = plain[name].summary["value"]
            assert found[name].summary["value"] == pytest.approx(expected, rel=5e-3), name
    assert {result.status for result in found.values()} <= {"ok", "undefined"}
