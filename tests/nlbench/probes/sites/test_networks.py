"""Sites of the networks people use, against the activation kernels that each of them calls."""

import re

import pytest
import torch
import torchvision
from network_sites import DEEPEST, FAMILIES, encode, recorded, timm_network, torchvision_network
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nlbench.introspection.attention import without_fast_path
from nlbench.probes.sites.sites_observation import channel_note, list_sites, observe_sites

KERNELS = {
    "celu", "elu", "gelu", "glu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "mish",
    "prelu", "relu", "selu", "sigmoid", "silu", "softplus", "tanh",
}  # fmt: skip


def count_activations(model, example):
    """Activation kernels of data in their order, as PyTorch dispatches them."""
    counted = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__.removesuffix("_")
            if name in KERNELS and args[0].requires_grad:
                counted.append(name)
            return func(*args, **(kwargs or {}))

    with Count():
        model.eval().requires_grad_(False)(example.clone().requires_grad_())
    return counted


def torchvision_model(name):
    if name == "vit":
        return torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 32)
    known = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    return torchvision.models.get_model(name, weights=None, **known)


def assert_sites_are_the_kernels(model, example):
    sites = list_sites(model, example)
    kinds = [site.kind.replace("relu6", "hardtanh") for site in sites]
    assert kinds == count_activations(model, example)
    assert len({site.name for site in sites}) == len(sites)
    modules = dict(model.named_modules())
    places = [site.name.partition(":")[0].partition("/") for site in sites]
    assert all(
        path in modules or (path == site.kind and not call)
        for (path, _, call), site in zip(places, sites, strict=True)
    )
    return sites


def test_each_torchvision_family_is_tested():
    def family(name):
        return re.match(r"[a-z]+(_v\d|_[xy](?=_))?", name)[0]

    classifiers = torchvision.models.list_models(module=torchvision.models)
    assert {family(name) for name in FAMILIES} == {family(name) for name in classifiers}


@pytest.mark.parametrize("name", FAMILIES)
def test_sites_of_torchvision_classifier_are_kernels_it_calls(name):
    sites = assert_sites_are_the_kernels(*torchvision_network(name))
    assert encode(sites) == recorded("torchvision", name)
    assert channel_note(sites) == ""
    gates = {site.kind for site in sites if site.role == "gate"}
    has_gates = name.startswith(("efficientnet", "maxvit", "mobilenet_v3", "regnet_y"))
    assert gates == ({"hardsigmoid" if "mobilenet" in name else "sigmoid"} if has_gates else set())


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEPEST)
def test_sites_of_deepest_torchvision_classifiers_are_recorded_ones(name):
    assert encode(list_sites(*torchvision_network(name))) == recorded("torchvision", name)


# Family, number of sites, where the channels are, and kinds that are written out by hand.
TIMM = {
    "vit_tiny_patch16_224": (12, {2}),
    "swin_tiny_patch4_window7_224": (12, {2}),
    "swinv2_tiny_window8_256": (12, {2}),
    "convnext_atto": (12, {1}),
    "convnext_tiny.in12k": (18, {3}),
    "mixer_s32_224": (16, {2}),
    "mobilenetv3_small_050": (42, {1}),
    "efficientnet_b0": (65, {1}),
    "maxvit_tiny_tf_224": (68, {1, 3}),
    "regnety_002": (66, {1}),
    "dm_nfnet_f0": (76, {1}),
    "edgenext_xx_small": (12, {3}),
    "gmlp_ti16_224": (30, {2}),
    "resmlp_12_224": (12, {2}),
    "ghostnet_050": (49, {1}),
}


@pytest.mark.parametrize("name", TIMM)
def test_sites_of_timm_networks_are_kernels_they_call(name):
    pytest.importorskip("timm")
    sites = assert_sites_are_the_kernels(*timm_network(name))
    assert encode(sites) == recorded("timm", name)
    assert (len(sites), {site.channel_axis for site in sites}) == TIMM[name]
    assert channel_note(sites) == ""


def test_handwritten_gelu_of_timm_is_one_site_block():
    pytest.importorskip("timm")
    name = "vit_base_patch32_clip_quickgelu_224"
    sites = list_sites(*timm_network(name))
    assert encode(sites) == recorded("timm", name)
    assert [site.name for site in sites] == [f"blocks.{block}.mlp.act" for block in range(12)]
    assert {site.kind for site in sites} == {"quickgelu"}


@pytest.mark.parametrize(
    "name",
    ["resnet18", "googlenet", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1",
     "regnet_y_400mf", "vit", "swin_t", "convnext_tiny"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_observed_network_output_is_bit_equal(name):
    model, x = torchvision_model(name).eval(), torch.randn(2, 3, 32, 32)
    outputs, observations = [], []
    with torch.no_grad():
        expected = model(x)
    hook = model.register_forward_hook(lambda module, args, output: outputs.append(output))
    observe_sites(model, [x], observations.append, functions={"sum": lambda t: t.flatten(1).sum(1)})
    hook.remove()
    assert torch.equal(outputs[0], expected)
    assert len(observations) == len(count_activations(model, x))


def test_all_activations_of_transformer_are_seen_in_order():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.transformer = nn.Transformer(8, 2, 2, 2, 16, batch_first=True)

        def forward(self, x):
            return self.transformer(x, x)

    with without_fast_path():
        sites = assert_sites_are_the_kernels(Model(), torch.randn(3, 5, 8))
    assert [site.name for site in sites] == [
        f"transformer.{part}.layers.{layer}/relu"
        for part in ("encoder", "decoder")
        for layer in (0, 1)
    ]
