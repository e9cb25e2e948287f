"""Influence against the formula."""

import pytest
import torch
from torch import nn

import nlbench
from nlbench.measures.influence import block_influence, relative_change


def test_formulas():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 30, 5, generator=generator).double()
    cosines = torch.nn.functional.cosine_similarity(x, y, dim=1)
    assert block_influence(x, y).item() == pytest.approx((1 - cosines).mean().item())
    changes = (y - x).norm(dim=1) / x.norm(dim=1)
    assert relative_change(x, y).item() == pytest.approx(changes.mean().item())


def test_small_turns_keep_their_digits():
    angle = 1e-9
    x = torch.tensor([[1.0, 0.0]]).double()
    y = torch.tensor([[1.0, angle]]).double()
    assert block_influence(x, y).item() == pytest.approx(angle**2 / 2, rel=1e-6)


def test_rows_of_zeros_do_not_count():
    x = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    y = torch.tensor([[1.0, 1.0], [0.0, 2.0]])
    assert block_influence(x, y).item() == pytest.approx(1)
    assert relative_change(x, y).item() == pytest.approx(5**0.5)


def test_a_run_averages_over_all_tokens():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(10, 3, 4)
    settings = {"sites.of": "modules:*", "sites.rows": "tokens", "sites.batch": 4}
    run = nlbench.evaluate(model, x, ["influence"], settings=settings)
    value = run["influence"].values[1]
    before = model[0](x).detach().flatten(0, 1)
    assert value.statistics["value"] == pytest.approx(
        block_influence(before, before.tanh()).item(), rel=1e-6
    )
    expected = relative_change(before, before.tanh()).item()
    assert value.statistics["relative_change"] == pytest.approx(expected, rel=1e-6)
