"""Sites of 47 networks, recorded in ``network_sites.txt``.

A line is a network and its sites in call order. A word in brackets is the kind of the sites after
it, with the role if it is not ``activation``. A name leaves out the parts between dots that it has
in common with the name before it. ``python tests/support/network_sites.py`` records all anew.
"""

import sys
from itertools import takewhile
from pathlib import Path

import torch
import torchvision
from torch.overrides import TorchFunctionMode

from nlbench.probes.sites.sites_observation import list_sites

RECORDED = Path(__file__).with_suffix(".txt")

# Of each family one, and of its kinds of blocks.
FAMILIES = (
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s",
    "googlenet", "inception_v3", "maxvit_t", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small",
    "regnet_x_400mf", "regnet_y_400mf", "resnet18", "resnet50", "resnext50_32x4d",
    "shufflenet_v2_x0_5", "squeezenet1_0", "squeezenet1_1", "swin_t", "swin_v2_t", "vgg11_bn",
    "vit_b_32", "wide_resnet50_2",
)  # fmt: skip
# The others differ in depth and width: the deepest of some families.
DEEPEST = (
    "convnext_large", "densenet201", "efficientnet_b7", "regnet_y_32gf", "resnet152", "swin_b",
    "vgg19",
)  # fmt: skip
TIMM = (
    "convnext_atto", "convnext_tiny.in12k", "dm_nfnet_f0", "edgenext_xx_small", "efficientnet_b0",
    "ghostnet_050", "gmlp_ti16_224", "maxvit_tiny_tf_224", "mixer_s32_224",
    "mobilenetv3_small_050", "regnety_002", "resmlp_12_224", "swin_tiny_patch4_window7_224",
    "swinv2_tiny_window8_256", "vit_base_patch32_clip_quickgelu_224", "vit_tiny_patch16_224",
)  # fmt: skip


INITIALISERS = {
    getattr(torch.Tensor, f"{name}_")
    for name in ("add", "clamp", "erfinv", "fill", "mul", "normal", "uniform", "zero")
}


class WithoutValues(TorchFunctionMode):
    """Parameters get a shape and no values, so that networks of any size are built at once."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in INITIALISERS:
            return args[0]
        if func is torch.empty:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def shape_only(build, size):
    """Build a network and its inputs on the meta device."""
    with WithoutValues():
        model = build()
    return model.to("meta"), torch.empty(2, 3, size, size, device="meta")


def torchvision_network(name):
    """Build a network of torchvision and its inputs."""
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    size = 299 if name == "inception_v3" else 224
    return shape_only(
        lambda: torchvision.models.get_model(name, weights=None, **options).eval(), size
    )


def timm_network(name):
    """Build a network of timm and its inputs."""
    import timm

    return shape_only(lambda: timm.create_model(name), 256 if "256" in name else 224)


def encode(sites):
    """Return the words of a line for sites."""
    words, kind, before = [], "", []
    for site in sites:
        role = "" if site.role == "activation" else f":{site.role}"
        if kind != (kind := f"[{site.kind}{role}]"):
            words.append(kind)
        parts = site.name.split(".")
        pairs = zip(parts[:-1], before, strict=False)
        common = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        words.append(".".join([""] * common + parts[common:]))
        before = parts
    return words


def recorded(package, name):
    """Return the recorded words of a network."""
    lines = map(str.split, RECORDED.read_text().splitlines())
    return next(words for network, *words in lines if network == f"{package}/{name}")


def record_all(path=RECORDED):
    """Record the sites of all networks."""
    networks = [("torchvision", name, torchvision_network) for name in sorted(FAMILIES + DEEPEST)]
    networks += [("timm", name, timm_network) for name in TIMM]
    lines = [
        f"{package}/{name} {' '.join(encode(list_sites(*build(name))))}\n"
        for package, name, build in networks
    ]
    path.write_text("".join(lines))


if __name__ == "__main__":
    record_all(*map(Path, sys.argv[1:]))
