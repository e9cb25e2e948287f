"""What docs/plugins.md shows runs as it stands there."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import nlbench
from nlbench.conformance import check_measure
from nlbench.probes import ProbePass

PAGE = Path(__file__).parents[1] / "docs" / "plugins.md"
BLOCKS = [
    block
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    if block.startswith("import nlbench")
]


@pytest.fixture
def names():
    found = {"__name__": "page"}
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), found)
    return found


def test_pooled_example_keeps_the_contract(names):
    x = torch.tensor([[1.0, -1.0], [-2.0, 2.0]])
    run = nlbench.evaluate(nn.ReLU(), x, [names["Energy"]])
    assert run["energy"].summary["value"] == 0.5
    assert [c for c in check_measure(names["Energy"]) if c.outcome == "broken"] == []


def test_sharing_example_keeps_the_contract(names):
    run = nlbench.evaluate(nn.ReLU(), torch.tensor([[1.0], [-2.0]]), [names["LargestChange"]])
    assert run["largestchange"].summary["value"] == 2.0
    assert [c for c in check_measure(names["LargestChange"]) if c.outcome == "broken"] == []


def test_the_probe_shows_each_parameter(names):
    probe, shown = names["PARAMETERS"], []

    class Listener:
        def update(self, observation):
            shown.append(observation[0])

    probe.observe(ProbePass(nn.Linear(2, 3), None, {}, [Listener()], None))
    assert shown == ["weight", "bias"]
