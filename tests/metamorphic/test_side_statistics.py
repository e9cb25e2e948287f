"""What a network stores about its activations changes no measure of its function."""

import pytest
import torch
from torch import nn

import nlbench

MEASURES = ["density", "regions", "absdev", "length-distortion", "nlc", "pathlength"]


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("counts", torch.zeros(8))
        self.kept = {}
        self.calls = 0

    def store(self, h):
        pass

    def forward(self, x):
        h = self.first(x).relu()
        self.store(h)
        return self.last(self.second(h).relu())


class Calls(Plain):
    def store(self, h):
        self.calls += 1
        self.kept[self.calls] = h


class RunningMean(Plain):
    def store(self, h):
        self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)


class NewMean(Plain):
    def store(self, h):
        self.mean = 0.9 * self.mean + 0.1 * h.mean(0)


class Histogram(Plain):
    def store(self, h):
        self.counts += torch.histc(h.detach(), 8, -3, 3)


class Winners(Plain):
    def store(self, h):
        self.counts.index_add_(0, h.argmax(1), torch.ones(len(h), dtype=self.counts.dtype))


class Probabilities(Plain):
    def store(self, h):
        self.kept["probabilities"] = h.softmax(1)
        self.kept["loss"] = h.pow(2).mean()


class Hooked(Plain):
    def __init__(self):
        super().__init__()
        self.second.register_forward_hook(
            lambda module, args, output: self.kept.update(std=output.std())
        )


def results(model):
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    settings = {"lines.number": 2}
    run = nlbench.evaluate(model, x, MEASURES, settings=settings, errors="none")
    return {record.measure.name: record.result for record in run.records}


STORING = [Calls, RunningMean, NewMean, Histogram, Winners, Probabilities, Hooked]


@pytest.fixture(scope="module")
def plain():
    return results(Plain())


@pytest.mark.parametrize("network", STORING)
def test_stored_statistics_change_no_number(plain, network):
    for name, result in results(network()).items():
        assert (result.status, result.reason) == ("ok", ""), name
        assert result.summary["value"] == pytest.approx(plain[name].summary["value"], rel=1e-9)


class Returned(Plain):
    """Uses what it has stored."""

    def forward(self, x):
        h = self.first(x).relu()
        self.kept["mean"] = h.mean(0)
        return self.last(self.second(h - self.kept["mean"]).relu())


class Overwritten(Plain):
    def forward(self, x):
        h = self.first(x).relu()
        h[:, 0] = h.sin()[:, 0]
        return self.last(self.second(h).relu())


class InPlace(Plain):
    def forward(self, x):
        h = self.first(x).relu()
        self.kept["sine"] = h.sin_()
        return self.last(self.second(h).relu())


class ThroughBuffer(Plain):
    def forward(self, x):
        h = self.first(x).relu()
        self.mean.copy_(h.softmax(1)[0])
        return self.last(self.second(h + self.mean).relu())


class ReadBefore(Plain):
    def forward(self, x):
        h = self.first(x).relu() - self.mean
        self.mean.copy_(h.mean(0))
        return self.last(self.second(h).relu())


class Decides(Plain):
    def forward(self, x):
        h = self.first(x).relu()
        if h.sin().sum() > 0:
            h = 2 * h
        return self.last(self.second(h).relu())


class Counts(Plain):
    def forward(self, x):
        h = self.first(x).relu()
        return self.last(self.second(h).relu()) * len(h[h.sin() > 0.1])


@pytest.mark.parametrize(
    "network", [Returned, Overwritten, InPlace, ThroughBuffer, ReadBefore, Decides, Counts]
)
def test_stored_values_that_are_used_have_no_regions(network):
    assert results(network())["density"].status == "undefined"
