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
    assert {r.machine["device"] for r in there.records} == {"cuda:0"}
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
