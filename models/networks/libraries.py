"""The image classifiers of torchvision and timm."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlbench.citation import Source
from nlbench.errors import RequestError, nearest
from nlbench.registry import Family, find_version
from nlbench.subjects.data import Preprocessing
from nlbench.subjects.model import model

if TYPE_CHECKING:
    from torch import nn


class _Library(Family):
    """Image classifiers of a library, under the library's names."""

    library: str

    def describe(self, name: str) -> str:
        """Return a one-line description."""
        return f"{self.library}'s {name}"

    def providers(self) -> tuple[str, ...]:
        """Return the version of the library, if it is installed."""
        version = _version(self.library)
        return (f"{self.library} {version}",) if version else ()

    def _declare(
        self,
        name: str,
        build_network: Callable[[str, int, int, int], nn.Module],
        module: str,
        **info: Any,
    ) -> Callable[..., nn.Module]:
        def build(
            in_channels: int = 3, num_classes: int = 1000, image_size: int = 224
        ) -> nn.Module:
            if num_classes < 1:
                raise RequestError(f"num_classes is {num_classes}, expected at least 1")
            return build_network(name, in_channels, num_classes, image_size)

        build.__name__ = name
        build.__doc__ = f"Build {self.library}'s {name}, freshly initialised."
        source = Source(f"{self.library} {_version(self.library)}, {module}{name}")
        return model(source=source, **info)(build)

    def _unknown(self, name: str, names: Sequence[str]) -> RequestError:
        hint = nearest(name, names, f"{self.library}/")
        return RequestError(f"there is no model '{self.library}/{name}'{hint}")


# Cached, since it is called for each member of a family.
_version = cache(find_version)


def _check_size(image_size: int, minimum: int) -> None:
    if image_size < minimum:
        raise RequestError(
            f"it takes images of at least {minimum}x{minimum} pixels, not {image_size}x{image_size}"
        )


_NAMES = """
    alexnet convnext_base convnext_large convnext_small convnext_tiny densenet121 densenet161
    densenet169 densenet201 efficientnet_b0 efficientnet_b1 efficientnet_b2 efficientnet_b3
    efficientnet_b4 efficientnet_b5 efficientnet_b6 efficientnet_b7 efficientnet_v2_l
    efficientnet_v2_m efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet0_5 mnasnet0_75
    mnasnet1_0 mnasnet1_3 mobilenet_v2 mobilenet_v3_large mobilenet_v3_small regnet_x_16gf
    regnet_x_1_6gf regnet_x_32gf regnet_x_3_2gf regnet_x_400mf regnet_x_800mf regnet_x_8gf
    regnet_y_128gf regnet_y_16gf regnet_y_1_6gf regnet_y_32gf regnet_y_3_2gf regnet_y_400mf
    regnet_y_800mf regnet_y_8gf resnet101 resnet152 resnet18 resnet34 resnet50
    resnext101_32x8d resnext101_64x4d resnext50_32x4d shufflenet_v2_x0_5 shufflenet_v2_x1_0
    shufflenet_v2_x1_5 shufflenet_v2_x2_0 squeezenet1_0 squeezenet1_1 swin_b swin_s swin_t
    swin_v2_b swin_v2_s swin_v2_t vgg11 vgg11_bn vgg13 vgg13_bn vgg16 vgg16_bn vgg19 vgg19_bn
    vit_b_16 vit_b_32 vit_h_14 vit_l_16 vit_l_32 wide_resnet101_2 wide_resnet50_2
"""

NAMES: tuple[str, ...] = tuple(_NAMES.split())
"""A static list, so that listing needs no import; other networks can be loaded too."""

# Minimum image sides in pixels where torchvision's "min_size" is a tested size, not the minimum.
_MIN_SIDES = {"efficientnet_v2": 1, "swin": 4, "swin_v2": 4}

# Networks that undo the ImageNet normalisation when built with pretrained weights.
_RENORMALISING = ("googlenet", "inception_v3")


class Torchvision(_Library):
    """Image classifiers of torchvision."""

    library = "torchvision"
    description = "torchvision's classification networks"

    def names(self) -> Sequence[str]:
        """Return the names of torchvision's ``list_models``."""
        return NAMES

    def load(self, name: str) -> Callable[..., nn.Module]:
        """Return the function that builds a network."""
        from torchvision import models

        known = models.list_models(module=models)
        if name not in known:
            raise self._unknown(name, known)
        weights = [w for w in models.get_model_weights(name) if w.url]
        default = models.get_model_weights(name).DEFAULT
        file = _checkpoint_file(default.url.rpartition("/")[2])
        return self._declare(
            name,
            _build_torchvision,
            "torchvision.models.",
            trained={"imagenet": file},
            obtain=(
                f"download {default.url} ({default.name}) and put it there, "
                "or use another checkpoint's path"
            ),
            preprocessing=lambda path: _torchvision_preprocessing(name, weights, default, path),
            rename=_renaming(name),
        )


def _build_torchvision(name: str, in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    from torchvision import models

    if in_channels != 3:
        raise RequestError(f"torchvision's networks take images of 3 channels, not {in_channels}")
    arguments: dict[str, Any] = {"weights": None, "num_classes": num_classes}
    patch = _patch(name)
    if patch:
        if image_size < patch or image_size % patch:
            raise RequestError(
                f"it takes images whose side is a multiple of {patch} pixels, at least "
                f"{patch}x{patch}, not {image_size}x{image_size}"
            )
        size = "input_size" if name.startswith("maxvit") else "image_size"
        arguments[size] = (image_size, image_size) if size == "input_size" else image_size
    else:
        _check_size(image_size, _min_side(name))
    if name in _RENORMALISING:
        # Auxiliary classifiers are for training only, and would make the output a tuple.
        arguments |= {"aux_logits": False, "init_weights": True}
    return models.get_model(name, **arguments)


def _patch(name: str) -> int:
    """Return the number of pixels that must divide the image side.

    It is 0 if any side is allowed.
    """
    if name.startswith("vit_"):
        return int(name.rpartition("_")[2])
    # MaxViT has 7×7 windows at 1/32 of the resolution.
    return 224 if name.startswith("maxvit") else 0


def _min_side(name: str) -> int:
    from torchvision import models

    family = re.sub(r"_[blmst]$", "", name)
    if family in _MIN_SIDES:
        return _MIN_SIDES[family]
    return int(max(models.get_model_weights(name).DEFAULT.meta["min_size"]))


def _checkpoint_file(name: str) -> Path:
    """Return the path of a checkpoint in NLBENCH_DATA, or in PyTorch's cache."""
    import torch

    cached = Path(torch.hub.get_dir(), "checkpoints", name)
    root = os.environ.get("NLBENCH_DATA", "")
    if not root:
        return cached
    file = Path(root, "weights", name)
    return cached if cached.is_file() and not file.is_file() else file


def _torchvision_preprocessing(
    name: str, weights: Sequence[Any], default: Any, path: Path | None
) -> Preprocessing:
    """Return torchvision's preprocessing for the weights in a file."""
    by_file = {w.url.rpartition("/")[2]: w for w in weights}
    published = by_file.get(path.name) if path else None
    entry = published or default
    transforms = entry.transforms()
    is_renormalised = name in _RENORMALISING and published is not None
    return Preprocessing(
        crop=int(transforms.crop_size[0]),
        resize=int(transforms.resize_size[0]),
        mean=(0.5,) * 3 if is_renormalised else tuple(transforms.mean),
        std=(0.5,) * 3 if is_renormalised else tuple(transforms.std),
        interpolation=transforms.interpolation.value,
        origin=f"torchvision's {entry}",
    )


def _renaming(name: str) -> Callable[[str], str | None] | None:
    """Return a map from parameter names of old checkpoints to the current ones."""
    if name in _RENORMALISING:
        return lambda key: None if key.startswith(("AuxLogits.", "aux1.", "aux2.")) else key
    for prefix, (pattern, replacement) in _RENAMED.items():
        if name.startswith(prefix):
            return lambda key: re.sub(pattern, replacement, key)
    return None


_RENAMED: Mapping[str, tuple[str, Any]] = {
    "densenet": (r"(denselayer\d+\.(?:norm|conv))\.([12]\.)", r"\1\2"),
    "vit": (r"\.mlp\.linear_([12])\.", lambda m: f".mlp.{'0' if m[1] == '1' else '3'}."),
}


class Timm(_Library):
    """Image classifiers of timm, listed only on request, since there are over a thousand."""

    library = "timm"
    description = "timm's image classifiers (extra: pip install 'nlbench[timm]')"
    costly = True

    def names(self) -> Sequence[str]:
        """Return the names of timm's ``list_models``, without the tags of weights."""
        return _timm().list_models()

    def load(self, name: str) -> Callable[..., nn.Module]:
        """Return the function that builds a network. ``NAME.TAG`` uses the tag's preprocessing."""
        timm = _timm()
        if not timm.is_model(name):
            raise self._unknown(name, timm.list_models())
        try:
            timm.models.get_pretrained_cfg(name)
        except RuntimeError as error:
            architecture, _, tag = name.partition(".")
            known = [each.partition(".")[2] for each in timm.list_pretrained(f"{architecture}.*")]
            raise RequestError(
                f"timm/{architecture} has no weights with the tag '{tag}'{nearest(tag, known)}"
            ) from error
        return self._declare(
            name, _build_timm, "", preprocessing=lambda path: _timm_preprocessing(name)
        )


def _timm() -> Any:
    try:
        import timm
    except ImportError as error:
        raise RequestError(
            f"the models timm/* need timm, which can't be imported ({error}); "
            "install it with: pip install 'nlbench[timm]'"
        ) from error
    return timm


def _config(name: str) -> Any:
    config = _timm().models.get_pretrained_cfg(name)
    if config is None:
        raise RequestError(f"timm states no input size for {name}")
    return config


def _build_timm(name: str, in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    import torch

    timm = _timm()
    config = _config(name)
    _check_size(image_size, config.min_input_size[-1] if config.min_input_size else 1)
    arguments: dict[str, Any] = {"num_classes": num_classes, "in_chans": in_channels}
    if config.fixed_input_size and image_size != config.input_size[-1]:
        arguments["img_size"] = image_size
    try:
        # timm doesn't list the models that support other sizes. Some fail only when called, so
        # they are called on the meta device first.
        with torch.device("meta"):
            trial = timm.create_model(name, pretrained=False, **arguments).eval()
            with contextlib.suppress(NotImplementedError):
                trial(torch.zeros(1, in_channels, image_size, image_size))
        network: nn.Module = timm.create_model(name, pretrained=False, **arguments)
    except Exception as error:
        side = config.input_size[-1]
        raise RequestError(
            f"timm can't build it for images of {image_size}x{image_size} pixels and "
            f"{in_channels} channels ({' '.join(str(error).split())[:120]}); its default size is "
            f"{side}x{side}"
        ) from error
    return network


def _timm_preprocessing(name: str) -> Preprocessing:
    """Return timm's preprocessing for a model."""
    config = _timm().data.resolve_data_config(pretrained_cfg=_config(name).to_dict())
    size = config["input_size"][-1]
    if config["crop_mode"] not in ("center", "squash"):
        raise RequestError(
            f"timm/{name} needs crop mode '{config['crop_mode']}', expected center or squash"
        )
    return Preprocessing(
        crop=size,
        resize=math.floor(size / config["crop_pct"]),
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        interpolation=config["interpolation"],
        squash=config["crop_mode"] == "squash",
        origin=f"timm's {name}",
    )
