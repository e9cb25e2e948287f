import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from nlbench.introspection.operations import named_modules
from nlbench.probes.sites.sites_observation import channel_note, list_sites, observe_sites


def looks_of(model, *batches, **options):
    observations = []
    observe_sites(model, batches, observations.append, **options)
    return observations


def names_of(model, example):
    return [site.name for site in list_sites(model, example)]


class Net(nn.Module):
    """Activations called in every way there is."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.relu = nn.ReLU(inplace=True)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.SiLU(inplace=True))

    def forward(self, x):
        x = self.relu(self.first(x))
        x = self.block(x)
        x = F.gelu(self.block[0](x))
        x = self.relu(x - 0.1)
        x = x.tanh_()
        x = torch.sigmoid(x - 0.2)
        return F.relu(input=x - 0.5, inplace=True)


def test_every_calling_style_is_one_site_in_order():
    sites = list_sites(Net(), torch.randn(5, 4))
    assert [(site.name, site.kind) for site in sites] == [
        ("relu", "relu"),
        ("block.1", "silu"),
        ("gelu", "gelu"),
        ("relu:1", "relu"),
        ("tanh", "tanh"),
        ("sigmoid", "sigmoid"),
        ("relu:2", "relu"),
    ]
    assert [site.index for site in sites] == list(range(7))


def test_functional_call_in_submodule_is_named_after_it():
    class Basic(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return F.relu(self.fc(x), inplace=True)

    model = nn.Sequential()
    model.add_module("branch", Basic())
    assert names_of(model, torch.randn(2, 4)) == ["branch/relu"]


def test_the_model_itself_may_be_an_activation():
    assert names_of(nn.GELU(), torch.randn(2, 4)) == ["gelu"]


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in named_modules()
        if kind.__module__.startswith("torch.") and kind not in (nn.GLU, nn.Softmax)
    ],
    ids=lambda kind: kind.__name__,
)
def test_each_activation_module_is_one_site(kind):
    arguments = (0.0, 0.0) if kind is nn.Threshold else ()
    module, x = kind(*arguments), torch.randn(6, 3)
    (observation,) = looks_of(nn.Sequential(module), x)
    with torch.no_grad():
        expected = module.eval()(x)
    assert observation.place == "0"
    torch.testing.assert_close(observation.x, x)
    torch.testing.assert_close(observation.y, expected)


def test_relu6_is_one_site_of_its_own_kind():
    (site,) = list_sites(nn.Sequential(nn.ReLU6()), torch.randn(2, 3))
    assert site.kind == "relu6"


@pytest.mark.parametrize("kind", [nn.ReLU, nn.SiLU, nn.Hardswish, nn.LeakyReLU, nn.ELU])
def test_in_place_activation_is_applied_once(kind):
    model = nn.Sequential(nn.Linear(4, 8), kind(inplace=True), nn.Linear(8, 3))
    x = torch.randn(16, 4)
    with torch.no_grad():
        before = model(x)
        pre_activation = model[0](x)
        seen = []
        outputs = []
        hook = model.register_forward_hook(lambda module, args, output: outputs.append(output))
        observe_sites(model, [x], seen.append)
        hook.remove()
    torch.testing.assert_close(seen[0].x, pre_activation, rtol=0, atol=0)
    torch.testing.assert_close(outputs[0], before, rtol=0, atol=0)


def test_transformer_is_bit_equal_to_its_slow_path():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(3, 5, 8)
    outputs, was_on = [], []
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad():
        expected = model(x)
    torch.backends.mha.set_fastpath_enabled(True)

    def note(module, args, output):
        outputs.append(output)
        was_on.append(torch.backends.mha.get_fastpath_enabled())

    hook = model.register_forward_hook(note)
    observe_sites(model, [x], lambda observation: None)
    hook.remove()
    assert torch.equal(outputs[0], expected)
    assert was_on == [False]
    assert torch.backends.mha.get_fastpath_enabled()


def test_functions_of_parameters_are_not_sites():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 6)
            self.table, self.scale = nn.Parameter(torch.randn(3, 6)), nn.Parameter(torch.ones(()))

        def forward(self, x):
            table = torch.sigmoid(16 * self.table).sum(0)
            return torch.relu(self.layer(x)) * table * torch.tanh(self.scale)

    observations = looks_of(Model(), torch.randn(6, 4))
    assert [(observation.site.kind, len(observation.x)) for observation in observations] == [
        ("relu", 6)
    ]


def test_sine_of_positions_is_not_an_activation():
    class Encoded(nn.Module):
        def forward(self, x):
            positions = torch.sin(torch.arange(4.0)[None] / 10)
            return torch.sin(x + positions)

    (site,) = list_sites(Encoded(), torch.randn(3, 4))
    assert site.name == "sin"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_functional_and_repeated_calls_follow_naming_scheme():
    resnet = torchvision.models.resnet18(weights=None)
    assert names_of(resnet, torch.randn(1, 3, 32, 32))[:4] == [
        "relu",
        "layer1.0.relu",
        "layer1.0.relu:1",
        "layer1.1.relu",
    ]
    inception = torchvision.models.inception_v3(weights=None, init_weights=False)
    assert "Mixed_5b.branch1x1/relu" in names_of(inception, torch.randn(1, 3, 80, 80))


def test_transformer_activations_are_observed_in_evaluation():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu").eval()
    (site,) = list_sites(layer, torch.randn(2, 5, 8))
    assert (site.kind, site.shape, site.channel_axis) == ("gelu", (5, 16), 2)


def test_in_place_first_layer_keeps_the_input():
    x = torch.randn(4, 3)
    before = x.clone()
    observations = looks_of(nn.Sequential(nn.Identity(), nn.ReLU(inplace=True)), x)
    torch.testing.assert_close(observations[0].x, before, rtol=0, atol=0)
    torch.testing.assert_close(x, before, rtol=0, atol=0)


def test_batches_are_numbered_and_samples_counted():
    observations = []
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    batches = [torch.randn(5, 3), torch.randn(2, 3)]
    assert observe_sites(model, batches, observations.append) == 7
    assert [(observation.batch, len(observation.x)) for observation in observations] == [
        (0, 5),
        (1, 2),
    ]


def test_full_activations_are_not_kept():
    """What the listener gets of a spatial activation is small and refers to no big storage."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    (observation,) = looks_of(model, torch.randn(4, 3, 32, 32))
    for side in (observation.x, observation.y):
        assert side.untyped_storage().nbytes() == 4 * 8 * 4


def test_half_precision_activations_are_reduced_in_single():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).bfloat16()
    (observation,) = looks_of(model, torch.randn(4, 3, 8, 8, dtype=torch.bfloat16))
    assert observation.x.dtype == torch.float32


def test_assumed_channel_axis_has_a_remark():
    model = nn.Sequential(nn.ReLU(), nn.Conv2d(3, 4, 1), nn.ReLU())
    sites = list_sites(model, torch.randn(2, 3, 5, 5))
    assert [site.assumed for site in sites] == [True, False]
    assert channel_note(sites) == "channel axis unknown, assumed: 0 (axis 1)"
    assert channel_note(sites[1:]) == ""


def test_copy_of_a_model_has_the_same_sites():
    model = Net()
    assert names_of(copy.deepcopy(model), torch.randn(2, 4)) == names_of(model, torch.randn(2, 4))


def test_raising_hook_does_not_shift_names():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.broken, self.act = nn.Identity(), nn.ReLU()
            self.broken.register_forward_pre_hook(self.fail)

        @staticmethod
        def fail(module, args):
            raise ValueError("not today")

        def forward(self, x):
            with contextlib.suppress(ValueError):
                x = self.broken(x)
            return torch.tanh(self.act(x))

    outer = nn.Sequential(Model())
    assert [site.name for site in list_sites(outer, torch.zeros(2, 3))] == ["0.act", "0/tanh"]
