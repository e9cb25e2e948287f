import copy

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nlbench.errors import RequestError
from nlbench.probes.sites import (
    ACTIVATION_MODULES,
    list_sites,
    look_at_sites,
    refuse_unobservable,
    remark_on_channels,
)


def looks_of(model, *batches, **options):
    looks = []
    look_at_sites(model, batches, looks.append, **options)
    return looks


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


def test_every_way_of_calling_is_one_site_in_order_of_call():
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


def test_a_functional_call_in_a_submodule_is_named_after_it():
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


@pytest.mark.parametrize("kind", ACTIVATION_MODULES, ids=lambda kind: kind.__name__)
def test_each_activation_module_is_one_site_with_its_own_input_and_output(kind):
    arguments = (0.0, 0.0) if kind is nn.Threshold else ()
    module, x = kind(*arguments), torch.randn(6, 3)
    (look,) = looks_of(nn.Sequential(module), x)
    with torch.no_grad():
        expected = module.eval()(x)
    assert look.place == "0"
    torch.testing.assert_close(look.x, x)
    torch.testing.assert_close(look.y, expected)


def test_relu6_is_one_site_of_its_own_kind():
    (site,) = list_sites(nn.Sequential(nn.ReLU6()), torch.randn(2, 3))
    assert site.kind == "relu6"


@pytest.mark.parametrize("kind", [nn.ReLU, nn.SiLU, nn.Hardswish, nn.LeakyReLU, nn.ELU])
def test_an_in_place_activation_keeps_its_input_and_is_applied_once(kind):
    model = nn.Sequential(nn.Linear(4, 8), kind(inplace=True), nn.Linear(8, 3))
    x = torch.randn(16, 4)
    with torch.no_grad():
        before = model(x)
        pre_activation = model[0](x)
        seen = []
        outputs = []
        hook = model.register_forward_hook(lambda module, args, output: outputs.append(output))
        look_at_sites(model, [x], seen.append)
        hook.remove()
    torch.testing.assert_close(seen[0].x, pre_activation, rtol=0, atol=0)
    torch.testing.assert_close(outputs[0], before, rtol=0, atol=0)


def count_activations(model, example):
    """Independent count, at the level of kernels: calls of element-wise activations."""
    counted = []
    known = {
        "relu", "hardtanh", "hardswish", "hardsigmoid", "silu", "gelu", "sigmoid", "leaky_relu",
    }  # fmt: skip

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__.removesuffix("_")
            if name in known:
                counted.append(name)
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Count():
        model.eval()(example)
    return counted


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("alexnet", 64),
        ("resnet18", 32),
        ("densenet121", 32),
        ("googlenet", 32),
        ("inception_v3", 80),
        ("mobilenet_v2", 32),
        ("mobilenet_v3_small", 32),
        ("efficientnet_b0", 32),
        ("shufflenet_v2_x0_5", 32),
        ("squeezenet1_1", 32),
        ("vit_b_16", 224),
        ("swin_t", 32),
        ("convnext_tiny", 32),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_sites_of_torchvision_networks_are_what_the_kernels_count(name, size):
    options = {} if name != "googlenet" and name != "inception_v3" else {"init_weights": False}
    model = torchvision.models.get_model(name, weights=None, **options)
    example = torch.randn(1, 3, size, size)
    sites = list_sites(model, example)
    counted = count_activations(model, example)
    assert len(sites) == len(counted)
    assert len({site.name for site in sites}) == len(sites)
    kinds = [site.kind.replace("relu6", "hardtanh") for site in sites]
    assert kinds == counted
    assert remark_on_channels(sites) == ""


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_functional_and_repeated_calls_bear_the_names_of_the_design():
    resnet = torchvision.models.resnet18(weights=None)
    assert names_of(resnet, torch.randn(1, 3, 32, 32))[:4] == [
        "relu",
        "layer1.0.relu",
        "layer1.0.relu:1",
        "layer1.1.relu",
    ]
    inception = torchvision.models.inception_v3(weights=None, init_weights=False)
    assert "Mixed_5b.branch1x1/relu" in names_of(inception, torch.randn(1, 3, 80, 80))


def test_the_activations_of_a_transformer_layer_are_seen_in_evaluation_too():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu").eval()
    (site,) = list_sites(layer, torch.randn(2, 5, 8))
    assert (site.kind, site.shape, site.channel_axis) == ("gelu", (5, 16), 2)


def state_of(model):
    hooks = [
        (len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in model.modules()
    ]
    return hooks, {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_state(model, before):
    hooks, weights = state_of(model)
    assert hooks == before[0]
    assert weights.keys() == before[1].keys()
    for name, value in weights.items():
        assert torch.equal(value, before[1][name]), name


def test_the_model_is_left_as_it_was_found():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5)).train()
    model[1].eval()
    before = state_of(model)
    look_at_sites(model, [torch.randn(4, 3, 8, 8)] * 2, lambda look: None)
    assert_same_state(model, before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_model_is_left_as_it_was_found_after_an_error_in_the_listener_or_the_model():
    model = Net().train()
    before = state_of(model)

    def fail(look):
        raise KeyError("listener")

    with pytest.raises(KeyError, match="listener"):
        look_at_sites(model, [torch.randn(5, 4)], fail)
    assert_same_state(model, before)
    with pytest.raises(RuntimeError):
        look_at_sites(model, [torch.randn(5, 9)], lambda look: None)
    assert_same_state(model, before)
    assert names_of(model, torch.randn(5, 4))[1] == "block.1"


def test_buffers_that_the_forward_pass_changes_get_their_values_back():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
            self.register_buffer("last", torch.zeros(3))
            self.register_buffer("cache", torch.zeros(0))

        def forward(self, x):
            self.calls += 1
            self.last = x.mean(0)
            self.cache = torch.arange(len(x))
            return torch.relu(x)

    model = Counting()
    last = model.last
    look_at_sites(model, [torch.randn(4, 3)] * 2, lambda look: None)
    assert model.calls.item() == 0
    assert model.last is last
    assert torch.equal(model.last, torch.zeros(3))
    assert len(model.cache) == 4


def test_the_input_is_not_changed_by_a_first_layer_that_works_in_place():
    x = torch.randn(4, 3)
    before = x.clone()
    looks = looks_of(nn.Sequential(nn.Identity(), nn.ReLU(inplace=True)), x)
    torch.testing.assert_close(looks[0].x, before, rtol=0, atol=0)
    torch.testing.assert_close(x, before, rtol=0, atol=0)


def test_batches_are_numbered_and_samples_counted():
    looks = []
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    batches = [torch.randn(5, 3), torch.randn(2, 3)]
    assert look_at_sites(model, batches, looks.append) == 7
    assert [(look.batch, len(look.x)) for look in looks] == [(0, 5), (1, 2)]


def test_no_full_activation_is_kept():
    """What the listener gets of a spatial activation is small and refers to no big storage."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    (look,) = looks_of(model, torch.randn(4, 3, 32, 32))
    for side in (look.x, look.y):
        assert side.untyped_storage().nbytes() == 4 * 8 * 4


def test_half_precision_activations_are_reduced_in_single():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).bfloat16()
    (look,) = looks_of(model, torch.randn(4, 3, 8, 8, dtype=torch.bfloat16))
    assert look.x.dtype == torch.float32


def test_a_scripted_model_is_refused_in_one_line():
    scripted = torch.jit.trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.zeros(1, 2))
    with pytest.raises(RequestError, match="scripted, so its activations can't be observed"):
        list_sites(scripted, torch.zeros(1, 2))


def test_a_compiled_model_is_refused_in_one_line():
    compiled = torch.compile(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    with pytest.raises(RequestError, match="compiled, so its activations can't be observed"):
        list_sites(compiled, torch.zeros(1, 2))


@pytest.mark.parametrize("wrap", [torch.compile, torch.jit.script], ids=["compiled", "scripted"])
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore::DeprecationWarning")
def test_a_part_that_can_not_be_observed_is_refused_by_name(wrap):
    model = nn.Sequential(nn.ReLU(), wrap(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
    with pytest.raises(RequestError, match=r"1 is .*pass the module it was made from"):
        refuse_unobservable(model)
    refuse_unobservable(nn.Sequential(nn.ReLU()))


def test_a_reader_is_told_where_the_channel_axis_is_assumed():
    model = nn.Sequential(nn.ReLU(), nn.Conv2d(3, 4, 1), nn.ReLU())
    sites = list_sites(model, torch.randn(2, 3, 5, 5))
    assert [site.assumed for site in sites] == [True, False]
    assert remark_on_channels(sites) == "channel axis not known, assumed: 0 (axis 1)"
    assert remark_on_channels(sites[1:]) == ""


def test_a_copy_of_a_model_has_the_same_sites():
    model = Net()
    assert names_of(copy.deepcopy(model), torch.randn(2, 4)) == names_of(model, torch.randn(2, 4))
