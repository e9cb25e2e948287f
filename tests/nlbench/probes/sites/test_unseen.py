"""Nonlinear operations outside sites are recorded as unseen."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import nlbench
from nlbench.probes.sites.sites_observation import observe_sites


class Inline(nn.Module):
    """An activation written out between two layers, in the same forward."""

    def __init__(self, function, outputs=2):
        super().__init__()
        self.first, self.second, self.function = nn.Linear(4, 6), nn.Linear(6, outputs), function

    def forward(self, x):
        return self.second(self.function(self.first(x)))


def unseen(model, x=None):
    found = {}
    given = torch.randn(5, 4) if x is None else x
    observe_sites(
        nn.Sequential(model), [given] * 2, lambda observation: None, on_unseen=found.setdefault
    )
    return list(found)


def assigned(h, mask):
    h = h.clone()
    h[mask] = 0
    return h


BEND = {
    "SiLU": (lambda h: h * torch.sigmoid(h), "mul of 0"),
    "squared ReLU": (lambda h: F.relu(h) ** 2, "pow of 0"),
    "ReLU by clamp": (lambda h: h.clamp(min=0), "clamp of 0"),
    "ReLU by clamp in place": (lambda h: h.clamp_(min=0), "clamp of 0"),
    "leaky ReLU by where": (lambda h: torch.where(h > 0, h, 0.1 * h), "where of 0"),
    "ReLU by a mask": (lambda h: h * (h > 0), "mul of 0"),
    "ReLU by maximum": (lambda h: torch.maximum(h, torch.zeros(6)), "maximum of 0"),
    "maxout": (lambda h: torch.maximum(h[:, :3], h[:, 3:]).repeat(1, 2), "maximum of 0"),
    "a square": (lambda h: h * h, "mul of 0"),
    "GELU": (lambda h: 0.5 * h * (1 + torch.erf(h / 2**0.5)), "erf and mul of 0"),
    "Mish": (lambda h: h * torch.tanh(F.softplus(h)), "mul of 0"),
    "absolute values": (lambda h: h.abs(), "abs of 0"),
    "a square by einsum": (lambda h: torch.einsum("bi,bi->bi", h, h), "einsum of 0"),
    "ReLU by assignment": (lambda h: assigned(h, h < 0), "setitem of 0"),
}


@pytest.mark.parametrize("outputs", [2, 9])
@pytest.mark.parametrize(("function", "what"), BEND.values(), ids=BEND)
def test_inline_activation_has_a_remark(function, what, outputs):
    assert unseen(Inline(function, outputs)) == [what]


def rms(h):
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)


def layer_norm(h):
    return (h - h.mean(1, keepdim=True)) / torch.sqrt(h.var(1, keepdim=True) + 1e-5)


AFFINE = {
    "a residual": lambda h: h + torch.tanh(h),
    "a scaled activation": lambda h: 1.7 * torch.tanh(0.6 * h) + 1,
    "a gate": lambda h: h * torch.sigmoid(h.mean(1, keepdim=True)),
    "a gated half": lambda h: (F.silu(h[:, :3]) * h[:, 3:]).repeat(1, 2),
    "one of two chunks": lambda h: next(F.silu(a) * b for a, b in [h.chunk(2, 1)]).repeat(1, 2),
    "a root mean square": rms,
    "a normalisation": layer_norm,
    "a norm": lambda h: h / h.norm(dim=1, keepdim=True),
    "a mask of constants": lambda h: torch.where(torch.arange(6) > 2, h, torch.zeros(6)),
    "a bias": lambda h: h - torch.arange(6.0).exp(),
    "a question": lambda h: h if bool((h.abs() < 1e9).all()) else -h,
    "what is dropped": lambda h: [h.exp(), h][1],
    "a product with weights": lambda h: torch.einsum("bi,ij->bj", h, torch.eye(6)),
    "assigned constants": lambda h: assigned(h, (slice(None), 2)),
    "assigned by a constant mask": lambda h: assigned(h, torch.arange(30).reshape(5, 6) % 2 > 0),
}


@pytest.mark.parametrize("outputs", [2, 9])
@pytest.mark.parametrize("function", AFFINE.values(), ids=AFFINE)
def test_normalisation_gates_and_sums_are_not_activations(function, outputs):
    assert unseen(Inline(function, outputs)) == []


class Swish(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


def test_handwritten_activation_site_has_no_remark():
    assert unseen(nn.Sequential(nn.Linear(4, 6), Swish(), nn.Linear(6, 2))) == []


def test_operation_before_a_handwritten_activation_is_remarked_on():
    swish = Swish()
    assert unseen(Inline(lambda h: h.abs())) == ["abs of 0"]
    model = Inline(lambda h: swish(h.abs()))
    model.act = swish
    assert unseen(model) == ["abs of 0"]


def test_output_of_a_network_is_remarked_on_too():
    class Last(nn.Module):
        def forward(self, x):
            return torch.exp(x[:, :2]), x

    assert unseen(Last()) == ["exp of 0"]


@pytest.mark.parametrize(
    "name", ["resnet18", "vit_b_16", "swin_v2_t", "mobilenet_v3_small", "maxvit_t"]
)
def test_networks_of_field_are_seen_as_whole(name):
    with torch.device("meta"):
        model = torchvision.models.get_model(name)
    assert unseen(model, torch.empty(2, 3, 224, 224, device="meta")) == []


def test_unseen_operations_are_recorded_next_to_scores():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.layer = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x):
            h = torch.tanh(self.layer(self.lstm(x)[0]))
            return h * torch.sigmoid(h)

    run = nlbench.evaluate(Network(), torch.randn(20, 3, 4), ["r2"])
    assert run.records[0].probe.facts["unseen"] == ["lstm of lstm (15 calls)", "mul of the model"]
    said = "activations not captured: lstm of lstm (15 calls), mul of the model"
    assert run["r2"].status == "ok"
    assert said in run["r2"].reason
    assert said in run.scores.query("place == ''")["reason"].iloc[0]


class InNumPy(nn.Module):
    """Its last activation is computed by NumPy."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 5), nn.ReLU())

    def forward(self, x):
        return torch.from_numpy(np.tanh(self.first(x).detach().numpy()))


def test_parts_outside_pytorch_are_unseen():
    run = nlbench.evaluate(InNumPy(), torch.randn(40, 4), ["r2", "pathlength"])
    assert [value.place for value in run["r2"].values] == ["first.1"]
    assert "activations not captured: whatever computes the output" in run["r2"].reason
    assert run["pathlength"].status == "undefined"
    assert "is not followed" in run["pathlength"].reason


class Tagged(torch.Tensor):
    """A tensor with a type of its own."""


def test_tensor_subclass_is_named():
    model = Inline(lambda h: h.as_subclass(Tagged).relu().as_subclass(torch.Tensor))
    (description,) = unseen(model)
    assert "tensor subclass Tagged" in description
