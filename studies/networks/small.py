"""Small perceptrons, ``small/ACTIVATION-wWIDTH-dDEPTH``, for the study of prediction."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from nlbench.citation import Source
from nlbench.errors import RequestError, nearest, shorten
from nlbench.registry import Family
from nlbench.subjects.model import model

if TYPE_CHECKING:
    from torch import nn

ACTIVATIONS = ("relu", "gelu", "tanh")
IMAGE_SIDE = 8
"""Side in pixels of the images after average pooling."""
_NAME = re.compile(rf"({'|'.join(ACTIVATIONS)})-w([1-9][0-9]{{0,4}})-d([1-9][0-9]?)")


class Small(Family):
    """Perceptrons of any width and depth."""

    description = "small perceptrons of any width and depth, for vectors and images"

    def names(self) -> Sequence[str]:
        """Return examples of names. Other numbers are also valid."""
        return tuple(f"{name}-w32-d2" for name in ACTIVATIONS)

    def load(self, name: str) -> Callable[..., nn.Module]:
        """Return the function that builds a network."""
        match = _NAME.fullmatch(name)
        if not match:
            hint = nearest(name, self.names(), "small/")
            raise RequestError(f"there is no model 'small/{shorten(name)}'{hint}")
        activation = match[1]
        width = int(match[2])
        depth = int(match[3])

        def build(num_classes: int = 10, input_shape: tuple[int, ...] = (40,)) -> nn.Module:
            from torch import nn

            modules: Mapping[str, type[nn.Module]] = {
                "relu": nn.ReLU,
                "gelu": nn.GELU,
                "tanh": nn.Tanh,
            }
            layers: list[nn.Module] = [nn.Flatten()]
            if len(input_shape) == 3:
                layers.insert(0, nn.AdaptiveAvgPool2d(IMAGE_SIDE))
                input_shape = (input_shape[0], IMAGE_SIDE, IMAGE_SIDE)
            for fan_in, units in itertools.pairwise([math.prod(input_shape), *[width] * depth]):
                layers += [nn.Linear(fan_in, units), modules[activation]()]
            return nn.Sequential(*layers, nn.Linear(width, num_classes))

        build.__doc__ = self.describe(name)
        return model(source=Source("", "ours, for the study of prediction"), recipe="adam")(build)

    def describe(self, name: str) -> str:
        """Return a one-line description of a network."""
        match = _NAME.fullmatch(name)
        return f"{match[3]} hidden layers of {match[2]} units, {match[1]}" if match else ""
