"""Formulas that docs/regularizer.md calls differentiable have gradients, checked numerically."""

from pathlib import Path

import pytest
import torch

from nlbench.measures.cka import linear_cka
from nlbench.measures.norm import change_norm

PAGE = Path(__file__).parents[2] / "docs" / "regularizer.md"


@pytest.mark.parametrize("formula", [linear_cka, change_norm])
def test_formula_has_the_gradient_of_its_value(formula):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 12, 3, dtype=torch.float64, generator=generator)
    assert torch.autograd.gradcheck(formula, (x.requires_grad_(), y.requires_grad_()))
    assert f"`{formula.__name__}`" in PAGE.read_text(encoding="utf-8")
