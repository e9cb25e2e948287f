"""Masked ReLUs of the comparison with learned masks."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

FILE = Path(__file__).parents[2] / "benchmarks" / "fewer_relus.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("fewer_relus", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.ReLU())


def test_open_masks_keep_the_function(script):
    model, x = network(), torch.randn(5, 3, 8, 8)
    masked, relus = script.masked_copy(model, x)
    assert torch.equal(masked(x), model(x))
    assert {name: relu.kept for name, relu in relus.items()} == {"1": 4 * 36, "3": 2 * 16}


def test_closed_mask_is_best_map_per_channel(script):
    relu = script.MaskedReLU(torch.Size([2, 3, 3]))
    relu.mask.data.zero_()
    relu.fits = True
    x = torch.randn(50, 2, 3, 3)
    y = relu(x)
    for channel in range(2):
        columns = torch.stack([x[:, channel].flatten(), torch.ones(450)], 1)
        target = x[:, channel].relu().flatten()
        expected = columns @ torch.linalg.lstsq(columns, target).solution
        assert torch.allclose(y[:, channel].flatten(), expected, atol=1e-5)


def test_smallest_masks_are_closed(script):
    relus = [script.MaskedReLU(torch.Size([2, 3, 3])) for _ in range(2)]
    for relu in relus:
        relu.mask.data = torch.rand(relu.size)
    values = torch.cat([relu.mask.flatten() for relu in relus])
    script.close_smallest(relus, 10)
    closed = torch.cat([relu.mask.flatten() for relu in relus])
    assert closed.sum() == 10
    assert values[closed == 1].min() > values[closed == 0].max()


def test_penalty_closes_masks_to_the_budget(script):
    model, relus = script.masked_copy(
        nn.Sequential(*network(), nn.Flatten(), nn.Linear(32, 3)), torch.randn(1, 3, 8, 8)
    )
    x, y = torch.randn(640, 3, 8, 8), torch.randint(3, (640,))
    steps = script.learn_masks(model, list(relus.values()), x, y, 80, epochs=20)
    assert 0 < steps < 190
    assert sum(relu.kept for relu in relus.values()) <= 80
