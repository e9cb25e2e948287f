"""A network that keeps a feature in an attribute computes what one that passes it on does."""

import pytest
import torch
from torch import nn

import nlbench
from nlbench.registry import expand


class Keeper(nn.Linear):
    def forward(self, x):
        self.kept = super().forward(x)
        return self.kept


class Kept(nn.Module):
    """A ReLU network whose last sum also reads the output of an earlier layer."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        linear = Keeper if way == "attribute" else nn.Linear
        self.layers = nn.ModuleList([nn.Linear(4, 4), linear(4, 4), nn.Linear(4, 4)])
        self.relus = nn.ModuleList(nn.ReLU() for _ in range(3))
        generator = torch.Generator().manual_seed(0)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator)
        if way == "hook":
            self.relus[1].register_forward_pre_hook(self._keep)

    def _keep(self, module, args):
        self.kept = args[0]

    def forward(self, x):
        g = self.layers[1](self.relus[0](self.layers[0](x)))
        h = self.layers[2](self.relus[1](g))
        if self.way == "attribute":
            g = self.layers[1].kept
        elif self.way == "hook":
            g = self.kept
        return h + self.relus[2](g)


MEASURES = expand("measures", ["*"])


def results(way):
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    settings = {"lines.number": 1}
    run = nlbench.evaluate(
        Kept(way).eval(), x, MEASURES, labels=torch.arange(32) % 4, settings=settings, errors="none"
    )
    return {record.measure.name: record.result for record in run.records}


def test_kept_features_change_no_measure():
    expected = results("passed")
    assert sum(result.status == "ok" for result in expected.values()) > 20
    for way in ("attribute", "hook"):
        for name, result in results(way).items():
            plain = expected[name]
            assert result.status == plain.status, (way, name, result.reason)
            assert result.summary == pytest.approx(plain.summary, rel=1e-4, abs=1e-7), (way, name)
            for value, other in zip(result.values, plain.values, strict=True):
                assert value.place == other.place
                assert value.numbers == pytest.approx(other.numbers, rel=1e-4, abs=1e-7), name
