"""Where functional calls stand in the code."""

import inspect
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import nlbench
from nlbench.probes.sites import list_sites


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.act = nn.Linear(4, 4), nn.Tanh()

    def forward(self, x):
        return self.act(functional.gelu(self.layer(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), nn.Linear(4, 2)

    def forward(self, x):
        x = torch.relu(x)
        x = torch.relu(self.block(x))
        return self.head(x)


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    (offset,) = (number for number, line in enumerate(lines) if text in line)
    return f"{Path(__file__).name}:{first + offset}"


def test_functional_calls_have_line_and_module_before():
    where = {site.name: site.where for site in list_sites(Net(), torch.randn(3, 4))}
    assert where == {
        "relu": line_of(Net.forward, "relu(x)"),
        "block/gelu": line_of(Block.forward, "gelu") + ", after block.layer",
        "block.act": "",
        "relu:1": line_of(Net.forward, "self.block(x)") + ", after block",
    }


def test_records_hold_lines_of_functional_calls():
    run = nlbench.evaluate(Net(), torch.randn(30, 4), ["r2"])
    where = run.records[0].probe.facts["where"]
    assert where["relu:1"].endswith("after block")
    assert set(where) == {"relu", "block/gelu", "relu:1"}


def test_calls_in_modules_of_pytorch_have_no_line():
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    assert {site.where for site in list_sites(nn.Sequential(layer), torch.randn(3, 5, 8))} == {""}
