"""Modules are recognised by what they compute."""

import pytest
import torch
from torch import nn

from nlbench.introspection.known_functions import is_root_mean_square_norm, known_kind


class Written(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def _new_gelu(x):
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (_new_gelu, "gelu"),
        (lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)), "gelu"),
        (lambda x: x * torch.sigmoid(x), "silu"),
        (lambda x: x * torch.sigmoid(1.702 * x), ""),
        (lambda x: x.clamp(min=0), "relu"),
        (lambda x: x.clamp(min=0) ** 2, ""),
        (lambda x: x.missing, ""),
        (lambda x: x[:, :3], ""),
    ],
)
def test_functions_are_distinguished(function, kind):
    assert known_kind(Written(function)) == kind


def test_a_module_with_parameters_has_no_known_kind():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.scale * x.relu()

    assert known_kind(Scaled()) == ""


class Norm(nn.Module):
    def __init__(self, offset: float = 0.0, power: float = 0.5):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, device="meta"))
        self.offset, self.power = offset, power

    def forward(self, x):
        x = x.float()
        return (
            (self.offset + self.weight) * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6) ** self.power
        )


def test_norms_are_recognised_for_any_weights():
    assert is_root_mean_square_norm(Norm(), 6)
    assert is_root_mean_square_norm(Norm(offset=1.0), 6)
    assert not is_root_mean_square_norm(Norm(power=1.0), 6)
    assert not is_root_mean_square_norm(Norm(), 7)
    assert not is_root_mean_square_norm(nn.LayerNorm(6), 6)
    assert not is_root_mean_square_norm(nn.Identity(), 6)
