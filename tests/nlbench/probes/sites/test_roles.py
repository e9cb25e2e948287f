import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.ops import SqueezeExcitation

from nlbench.probes.sites.sites_observation import list_sites, observe_sites


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Conv2d(3, 6, 1), function
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        return self.function(self, self.layer(x))


def roles(function):
    return [(s.kind, s.role) for s in list_sites(Model(function), torch.randn(2, 3, 4, 4))]


def mean(h):
    return h.mean((2, 3), keepdim=True)


GATES = {
    "of channels": lambda m, h: h * torch.sigmoid(mean(h)),
    "on the left": lambda m, h: torch.sigmoid(mean(h)) * h,
    "in place": lambda m, h: h.mul_(torch.sigmoid(mean(h))),
    "by name": lambda m, h: torch.multiply(h, F.sigmoid(mean(h))),
    "arranged": lambda m, h: h * torch.sigmoid(h.mean((2, 3))).view(2, 6, 1, 1).expand_as(h),
    "indexed": lambda m, h: h * torch.sigmoid(h.mean((2, 3)))[:, :, None, None],
    "scaled": lambda m, h: h * (2 * torch.sigmoid(mean(h)) + 1),
    "of two tensors": lambda m, h: [torch.sigmoid(mean(h))] and _twice(torch.sigmoid(mean(h)), h),
}


def _twice(gate, h):
    return h * gate + torch.cos(h) * gate


@pytest.mark.parametrize("function", GATES.values(), ids=GATES)
def test_a_sigmoid_that_only_multiplies_is_a_gate(function):
    assert roles(function)[-1] == ("sigmoid", "gate")


ACTIVATIONS = {
    "the last of all": lambda m, h: torch.sigmoid(h),
    "its own input's": lambda m, h: h * torch.sigmoid(h),
    "one that goes on": lambda m, h: F.conv2d(torch.sigmoid(h), m.weight[:, :, None, None]),
    "a product and more": lambda m, h: _product_and_sum(torch.sigmoid(mean(h)), h),
    "a sum": lambda m, h: h + torch.sigmoid(h),
    "one that is dropped": lambda m, h: [torch.sigmoid(h), h][1],
    "one that is masked": lambda m, h: torch.sigmoid(h) * (h[:, :1] > 0).float(),
}


def _product_and_sum(gate, h):
    return h * gate + gate


@pytest.mark.parametrize("function", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_sigmoid_that_does_something_else_is_an_activation(function):
    assert roles(function) == [("sigmoid", "activation")]


def test_the_gate_of_squeeze_and_excitation_is_labelled():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1), SqueezeExcitation(8, 2, scale_activation=nn.Hardsigmoid)
    )
    sites = list_sites(model, torch.randn(2, 3, 4, 4))
    assert [(site.name, site.kind, site.role) for site in sites] == [
        ("1.activation", "relu", "activation"),
        ("1.scale_activation", "hardsigmoid", "gate"),
    ]


def test_sites_with_late_roles_keep_call_order():
    def function(m, h):
        gate = torch.sigmoid(mean(h))
        h = torch.tanh(torch.relu(h))
        return torch.relu(h * gate)

    sites = list_sites(Model(function), torch.randn(2, 3, 4, 4))
    assert [site.kind for site in sites] == ["sigmoid", "relu", "tanh", "relu"]
    assert [site.index for site in sites] == [0, 1, 2, 3]
    assert sites[0].role == "gate"


@pytest.mark.parametrize("dim", [1, -1])
def test_gated_linear_unit_is_one_gate(dim):
    observations = []
    model = nn.Sequential(nn.Conv1d(3, 8, 1), nn.GLU(dim))
    x = torch.randn(5, 3, 6)
    observe_sites(model, [x], observations.append)
    with torch.no_grad():
        a, b = model[0](x).chunk(2, dim)
    (observation,) = observations
    assert (observation.place, observation.site.kind, observation.site.role) == ("1", "glu", "gate")
    torch.testing.assert_close(observation.x, a.mean(2))
    torch.testing.assert_close(observation.y, (a * torch.sigmoid(b)).mean(2))


def test_sigmoid_that_is_scaled_by_parameter_is_activation():
    assert roles(lambda m, h: torch.sigmoid(h) * m.weight[0, :, None, None] + 1) == [
        ("sigmoid", "activation")
    ]


def test_in_place_product_is_not_its_gates_use():
    def function(m, h):
        gate = torch.sigmoid(mean(h)).repeat(1, 1, *h.shape[2:])
        return torch.tanh(gate.mul_(h))

    assert roles(function) == [("sigmoid", "gate"), ("tanh", "activation")]


def test_gate_that_model_keeps_is_one_all_same():
    def function(m, h):
        m.kept = torch.sigmoid(mean(h))
        return torch.relu(h * m.kept)

    assert roles(function) == [("sigmoid", "gate"), ("relu", "activation")]


class Attention(nn.Module):
    """Attention with a function of its logits, and another of what it gives."""

    def __init__(self, inner, outer=lambda x: x):
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)
        self.inner, self.outer = inner, outer

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = self.inner(q @ k.transpose(1, 2) * 6**-0.5)
        return self.outer(self.out(torch.relu(weights @ v)))


def cap(x, most=30.0):
    return torch.tanh(x / most) * most


CAPPED = {
    "divided and multiplied": cap,
    "multiplied from the left": lambda x: 30.0 * torch.tanh(x * (1 / 30)),
    "with a mask": lambda x: cap(x) + torch.zeros(4, 4),
    "scaled": lambda x: cap(2 * x).masked_fill(torch.eye(4) > 0, -9.0),
}


@pytest.mark.parametrize("inner", CAPPED.values(), ids=CAPPED)
def test_soft_cap_of_attention_is_part_of_attention(inner):
    model = Attention(lambda x: inner(x).softmax(-1), cap)
    sites = list_sites(model, torch.randn(2, 4, 6))
    assert [(site.kind, site.role) for site in sites] == [
        ("tanh", "attention"),
        ("relu", "activation"),
        ("tanh", "softcap"),
    ]


@pytest.mark.parametrize("inner", [torch.relu, torch.sigmoid, lambda x: F.relu(x) / 4])
def test_attention_without_a_softmax_is_attention_too(inner):
    sites = list_sites(Attention(inner), torch.randn(2, 4, 6))
    assert [site.role for site in sites] == ["attention", "activation"]


@pytest.mark.parametrize(
    "function",
    [
        lambda m, h: 1.7159 * torch.tanh(h * (2 / 3)),
        lambda m, h: torch.tanh(h / 30),
        lambda m, h: torch.tanh(h) * 30,
        lambda m, h: torch.tanh(h / 30) * 20,
    ],
)
def test_scaled_tanh_is_not_a_soft_cap(function):
    assert roles(function) == [("tanh", "activation")]


def test_product_with_input_matrix_is_not_attention():
    class Aligned(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix, self.layer = nn.Linear(6, 36), nn.Linear(6, 6)

        def forward(self, x):
            matrix = torch.tanh(self.matrix(x.mean(1))).view(-1, 6, 6)
            return torch.relu(self.layer(torch.relu(x @ matrix)))

    sites = list_sites(Aligned(), torch.randn(2, 4, 6))
    assert [site.role for site in sites] == ["activation"] * 3
