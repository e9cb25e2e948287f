"""Rounding of bfloat16 and float16 is no direction of the inputs."""

import pytest
import torch
from torch import nn

import nlbench


class Averaged(nn.Module):
    """64 inputs of a GELU that depend on 8 numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.act, self.out = nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 4)

    def forward(self, x):
        return self.out(self.act(self.wide(x)).mean(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("measure", ["r2", "linearity"])
def test_a_short_type_has_the_value_of_float64(dtype, measure):
    x = torch.randn(256, 20, 8, generator=torch.Generator().manual_seed(0))
    value, exact = (
        nlbench.evaluate(Averaged().to(kind), x.to(kind), [measure])[measure].summary["value"]
        for kind in (dtype, torch.float64)
    )
    assert value == pytest.approx(exact, abs=1e-3)
