"""The image classifiers of timm, as ``timm/NAME``; an extra."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlbench.errors import RequestError, nearest
from nlbench.measure import Source
from nlbench.registry import Family
from nlbench.subjects.data import Preprocessing
from nlbench.subjects.model import model

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Timm"]


class Timm(Family):
    """Image classifiers of timm; its thousand names are listed only when asked for."""

    description = "timm's image classifiers (extra: pip install 'nlbench[timm]')"
    costly = True

    def names(self) -> Sequence[str]:
        """Names as timm's ``list_models`` has them, without their weights' tags.

        Raises
        ------
        nlbench.RequestError
            If timm isn't installed.
        """
        names: list[str] = _timm().list_models()
        return names

    def load(self, name: str) -> Callable[..., nn.Module]:
        """Give the function that builds a network; ``NAME.TAG`` has the preprocessing of a tag.

        Raises
        ------
        nlbench.RequestError
            If timm isn't installed, or has no network of that name.
        """
        timm = _timm()
        if not timm.is_model(name):
            hint = nearest(name, timm.list_models(), "timm/")
            raise RequestError(f"there is no model 'timm/{name}'{hint}")
        architecture, dot, tag = name.partition(".")
        if dot and not _has_tag(name):
            known = [each.partition(".")[2] for each in timm.list_pretrained(f"{architecture}.*")]
            raise RequestError(
                f"timm/{architecture} has no weights with the tag '{tag}'{nearest(tag, known)}"
            )

        def build(
            in_channels: int = 3, num_classes: int = 1000, image_size: int = 224
        ) -> nn.Module:
            return _build(name, in_channels, num_classes, image_size)

        build.__name__ = name
        build.__doc__ = f"Build timm's {name}, freshly initialised."
        return model(
            source=Source(f"timm {timm.__version__}, {name}"),
            preprocessing=lambda path: _preprocessing(name, path),
        )(build)

    def describe(self, name: str) -> str:
        """One line."""
        return f"timm's {name}"

    def providers(self) -> tuple[str, ...]:
        """Version of timm, where it is installed."""
        return _versions()


@cache
def _versions() -> tuple[str, ...]:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return (f"timm {importlib.metadata.version('timm')}",)
    return ()


def _timm() -> Any:
    try:
        import timm
    except ImportError as error:
        raise RequestError(
            f"the models timm/* need timm, which can't be imported ({error}); "
            "install it with: pip install 'nlbench[timm]'"
        ) from error
    return timm


def _has_tag(name: str) -> bool:
    try:
        _timm().models.get_pretrained_cfg(name)
    except RuntimeError:
        return False
    return True


def _config(name: str) -> Any:
    config = _timm().models.get_pretrained_cfg(name)
    if config is None:
        raise RequestError(f"timm states no input size for {name}")
    return config


def _build(name: str, in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    import torch

    timm = _timm()
    if num_classes < 1:
        raise RequestError(f"num_classes is {num_classes}, expected at least 1")
    config = _config(name)
    smallest = config.min_input_size[-1] if config.min_input_size else 1
    if image_size < smallest:
        raise RequestError(
            f"it takes images of at least {smallest}x{smallest} pixels, these are "
            f"{image_size}x{image_size}"
        )
    arguments: dict[str, Any] = {"num_classes": num_classes, "in_chans": in_channels}
    if config.fixed_input_size and image_size != config.input_size[-1]:
        arguments["img_size"] = image_size
    try:
        # Which of its thousand models can be built for other sizes, timm says by failing;
        # some fail only when they are called, which shapes alone show.
        with torch.device("meta"):
            tried = timm.create_model(name, pretrained=False, **arguments).eval()
            with contextlib.suppress(NotImplementedError):
                tried(torch.zeros(1, in_channels, image_size, image_size))
        built: nn.Module = timm.create_model(name, pretrained=False, **arguments)
    except Exception as error:
        own = config.input_size[-1]
        raise RequestError(
            f"timm can't build it for images of {image_size}x{image_size} pixels and "
            f"{in_channels} channels ({' '.join(str(error).split())[:120]}); its own size is "
            f"{own}x{own}"
        ) from error
    return built


def _preprocessing(name: str, path: Path | None) -> Preprocessing:
    """What timm does to images when it evaluates these weights; the file doesn't matter."""
    config = _timm().data.resolve_data_config(pretrained_cfg=_config(name).to_dict())
    size = config["input_size"][-1]
    if config["crop_mode"] not in ("center", "squash"):
        raise RequestError(
            f"timm/{name} wants crop mode '{config['crop_mode']}', expected center or squash"
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
