"""A GPU gives what the CPU gives, to the precision of its own forward pass."""

import copy

import pytest
import torch
from torch import nn

import nlbench
from nlbench.probes.lines.lines import trace_segment

pytestmark = pytest.mark.gpu


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(4),
        nn.Flatten(),
        nn.Linear(8 * 64, 40),
        nn.ReLU(),
        nn.Linear(40, 5),
    )


def test_every_measure_agrees_with_the_cpu():
    model, inputs = network(), torch.rand(256, 3, 32, 32)
    measures = ["affinity", "r2", "cka", "absdev", "density"]
    settings = {"lines.number": 1}
    here = nlbench.evaluate(model, inputs, measures, settings=settings)
    there = nlbench.evaluate(
        copy.deepcopy(model).cuda(), inputs.cuda(), measures, settings=settings
    )
    assert {r.machine.device for r in there.records} == {"cuda:0"}
    for measure in measures:
        expected = here[measure].summary["value"]
        assert there[measure].summary["value"] == pytest.approx(expected, rel=1e-4)


def test_a_traced_segment_is_the_same_to_the_last_digits():
    model, (start, end) = network(), torch.rand(2, 3, 32, 32)
    here = trace_segment(model, start, end)
    there = trace_segment(copy.deepcopy(model).cuda(), start.cuda(), end.cuda())
    assert there.values.is_cuda
    assert there.regions == here.regions
    torch.testing.assert_close(there.t.cpu(), here.t, rtol=0, atol=1e-10)
    torch.testing.assert_close(there.values.cpu(), here.values, rtol=1e-9, atol=1e-9)


class Attention(nn.Module):
    """A transformer's layer on the rows of an image."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(24, 4, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(24, 5)

    def forward(self, x):
        return self.head(self.layer(x.transpose(1, 2).flatten(2)).mean(1))


class Recurrent(nn.Module):
    """An LSTM over the rows of an image."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(24, 10, batch_first=True), nn.Linear(10, 5)

    def forward(self, x):
        return self.head(self.layer(x.transpose(1, 2).flatten(2))[0][:, -1])


def smooth():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 16, 5),
    )


def pooled():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 5)
    )


EVERY = ["affinity", "r2", "cka", "norm", "sparsity", "entropy", "nlc", "pathlength", "density"]


@pytest.mark.parametrize("build", [pooled, smooth, Attention, Recurrent])
def test_pooling_attention_and_recurrent_layers_agree_with_the_cpu(build):
    torch.manual_seed(0)
    model, inputs = build().eval(), torch.rand(160, 3, 8, 8)
    settings = {"lines.number": 1, "lines.anchors": 2, "lines.radius": 0.05}
    here = nlbench.evaluate(model, inputs, EVERY, settings=settings)
    there = nlbench.evaluate(
        copy.deepcopy(model).to("cuda"), inputs.to("cuda"), EVERY, settings=settings
    )
    for name in EVERY:
        assert there[name].status == here[name].status, f"{name}: {there[name].reason}"
        assert there[name].summary == pytest.approx(here[name].summary, rel=1e-3), name


def test_a_network_in_bfloat16_agrees_with_the_cpu_to_its_digits():
    torch.manual_seed(0)
    model, inputs = pooled().eval().bfloat16(), torch.rand(160, 3, 8, 8).bfloat16()
    here = nlbench.evaluate(model, inputs, ["affinity", "norm"])
    there = nlbench.evaluate(
        copy.deepcopy(model).to("cuda"), inputs.to("cuda"), ["affinity", "norm"]
    )
    for name in ("affinity", "norm"):
        assert there[name].summary["value"] == pytest.approx(here[name].summary["value"], rel=0.02)
