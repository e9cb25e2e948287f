import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nlbench.probes.sites.sites_observation import list_sites, observe_sites


class Written(nn.Module):
    """A module without children whose forward is a function of its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.slope = nn.Parameter(torch.full((6,), 1.5))

    def forward(self, x):
        return self.function(self, x)


def model_of(function, name="Gadget"):
    kind = type(name, (Written,), {})
    return nn.Sequential(nn.Linear(4, 6), kind(function), nn.Linear(6, 2))


ONE_SITE = {
    "a SiLU": (lambda m, x: x * torch.sigmoid(x), "gadget"),
    "a SiLU in place": (lambda m, x: x.mul_(x.sigmoid()), "gadget"),
    "QuickGELU": (lambda m, x: x * torch.sigmoid(1.702 * x), "gadget"),
    "the tanh approximation of GELU": (
        lambda m, x: 0.5 * x * (1 + torch.tanh(0.797885 * (x + 0.044715 * torch.pow(x, 3)))),
        "gadget",
    ),
    "GELU by erf": (lambda m, x: 0.5 * x * (1 + torch.erf(x / 2**0.5)), "gadget"),
    "Mish": (lambda m, x: x * torch.tanh(F.softplus(x)), "gadget"),
    "hard swish": (lambda m, x: x * F.relu6(x + 3) / 6, "gadget"),
    "a leaky ReLU by where": (lambda m, x: torch.where(x > 0, x, 0.1 * x), "gadget"),
    "a ReLU by clamp": (lambda m, x: x.clamp(min=0), "gadget"),
    "a squared ReLU": (lambda m, x: torch.square(F.relu(x)), "gadget"),
    "a slope a channel": (lambda m, x: x * torch.sigmoid(m.slope * x), "gadget"),
    "a sine": (lambda m, x: torch.sin(30 * x), "sin"),
    "a wrapped function": (lambda m, x: F.silu(x), "silu"),
    "a scaled function": (lambda m, x: F.gelu(x).mul_(1.7), "gelu"),
    "a function of a copy in another type": (lambda m, x: F.elu(x.double()).float(), "elu"),
}


@pytest.mark.parametrize(("function", "kind"), ONE_SITE.values(), ids=ONE_SITE)
def test_handwritten_activation_is_one_site(function, kind):
    model, x = model_of(function), torch.randn(8, 4)
    observations = []
    observe_sites(model, [x], observations.append)
    assert [(observation.place, observation.site.kind) for observation in observations] == [
        ("1", kind)
    ]
    with torch.no_grad():
        given = model[0](x)
        expected = model[1](given.clone())
    torch.testing.assert_close(observations[0].x, given, rtol=0, atol=0)
    torch.testing.assert_close(observations[0].y, expected, rtol=0, atol=0)


NO_SITE = {
    "a scale": lambda m, x: x * m.slope,
    "a scale in place": lambda m, x: x.mul_(m.slope).add_(1),
    "an affine map by addcmul": lambda m, x: torch.addcmul(m.slope, m.slope, x),
    "the input twice": lambda m, x: x + x,
    "a normalisation": lambda m, x: F.layer_norm(x, (6,)),
    "a standardisation by hand": lambda m, x: (x - x.mean(1, keepdim=True)) / x.std(),
    "an attention to channels": lambda m, x: x * x.mean(1, keepdim=True),
    "a norm": lambda m, x: x / x.norm(dim=1, keepdim=True),
    "nothing": lambda m, x: x,
}


@pytest.mark.parametrize("function", NO_SITE.values(), ids=NO_SITE)
def test_affine_or_mixing_module_is_not_a_site(function):
    assert list_sites(model_of(function), torch.randn(8, 4)) == []


def test_calls_in_a_mixing_module_are_separate_sites():
    model = model_of(lambda m, x: torch.tanh(x) + F.softmax(x, 1) * torch.sigmoid(x))
    assert [site.name for site in list_sites(model, torch.randn(8, 4))] == ["1/tanh", "1/sigmoid"]


def test_module_with_children_is_not_handwritten_activation():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return x * torch.sigmoid(x)

    model = nn.Sequential(Gated())
    assert [site.name for site in list_sites(model, torch.randn(8, 4))] == ["0/sigmoid"]


def test_the_model_itself_is_not_one_activation():
    model = Written(lambda m, x: torch.tanh(torch.relu(x)))
    assert [site.name for site in list_sites(model, torch.randn(8, 6))] == ["relu", "tanh"]


def test_handwritten_activation_called_twice_is_two_sites():
    gadget = type("Swish", (Written,), {})(lambda m, x: x * torch.sigmoid(x))
    model = nn.Sequential(nn.Linear(4, 6), gadget, nn.Linear(6, 6), gadget)
    observations = []
    observe_sites(model, [torch.randn(8, 4)] * 2, observations.append)
    assert [observation.place for observation in observations] == ["1", "1:1"] * 2
    assert [observation.site.index for observation in observations] == [0, 1] * 2


def test_the_channels_behind_a_handwritten_activation_are_known():
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * torch.sigmoid(x)

    class Swish(nn.Module):
        def forward(self, x):
            return Function.apply(x)

    model = nn.Sequential(nn.Conv1d(3, 5, 1), Swish(), nn.ReLU())
    sites = list_sites(model, torch.randn(4, 3, 9))
    assert [(site.kind, site.channel_axis, site.assumed) for site in sites] == [
        ("silu", 1, False),
        ("relu", 1, False),
    ]


def test_module_reading_attribute_data_is_not_a_site():
    class Modulated(nn.Module):
        def forward(self, x):
            return x * self.scale + self.shift

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other, self.film = nn.Linear(4, 6), nn.Linear(4, 12), Modulated()

        def forward(self, x):
            self.film.scale, self.film.shift = self.other(x).chunk(2, 1)
            return torch.relu(self.film(self.one(x)))

    assert [site.name for site in list_sites(Model(), torch.randn(8, 4))] == ["relu"]


def test_activation_may_inspect_its_input():
    def asking(module, x):
        assert x.dim() == 2
        zeros = torch.zeros(x.shape[-1:], dtype=x.dtype, device=x.device)
        return torch.where(x > 0, x, zeros)

    assert [site.name for site in list_sites(model_of(asking), torch.randn(8, 4))] == ["1"]


def test_entry_assignment_is_not_handwritten_activation():
    def assigning(module, x):
        x[:, 0] = 0
        return torch.square(x)

    assert list_sites(model_of(assigning), torch.randn(8, 4)) == []


def test_calls_on_constants_do_not_affect_later_calls():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = type("Swish", (Written,), {})(lambda m, x: x * torch.sigmoid(x))
            self.table = nn.Parameter(torch.randn(6))

        def forward(self, x):
            return x * self.act(self.table) + self.act(x)

    names = [site.name for site in list_sites(Model(), torch.randn(8, 6))]
    assert names == ["act"]
